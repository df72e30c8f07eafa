"""The requests and answers of the tokenizer's routes, in the same format as vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from wane.service.types.body import HISTORY, Body, Model, TokenId, at_most
from wane.service.types.common import Result, says


class TokenizeBody(Body, kw_only=True):
    """Turn a text into token ids."""

    examples = ({"prompt": HISTORY}, {"prompt": "<eos>", "add_special_tokens": False})

    model: Model = None
    prompt: Annotated[str, says("a text; each `<eos>` in the text becomes the id of the token <eos>")]
    add_special_tokens: Annotated[
        bool | None, says("has no effect: the server itself feeds the start token before a sequence")
    ] = None


class DetokenizeBody(Body, kw_only=True):
    """Turn token ids into text."""

    examples = ({"tokens": [5, 6, 7]},)

    model: Model = None
    tokens: Annotated[
        tuple[TokenId, ...],
        says("token ids"),
        at_most("max_scored_tokens"),
    ]


class TokenizeDocument(Result):
    """The token ids of a text."""

    count: Annotated[int, says("the number of token ids")]
    max_model_len: Annotated[int, says("the longest input that the server accepts, in tokens")]
    tokens: Annotated[Sequence[int], says("the token ids")]
    token_strs: Annotated[None, says("always null")]


class DetokenizeDocument(Result):
    """The text of the tokens."""

    prompt: Annotated[str, says("the text")]


class TokenizerDocument(Result):
    """The tokenizer's special tokens."""

    tokenizer_class: Annotated[str, says("the class of the library transformers that reads the tokenizer")]
    eos_token: Annotated[str, says("the token <eos>")]
    bos_token: Annotated[None, says("always null: the server itself feeds the start token")]
    unk_token: Annotated[str | None, says("the token <unk>; null: the vocabulary has none")]
    pad_token: Annotated[None, says("always null")]
    model_max_length: Annotated[int, says("the longest input that the server accepts, in tokens")]
