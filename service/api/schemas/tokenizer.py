"""The requests and answers of the tokenizer's routes, in the same format as vLLM."""

from __future__ import annotations

from typing import Annotated

from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.api.schemas.common import HISTORY, Body, Model, TokenId, at_most
from wane.service.types.common import says


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
        at_most("max_scored_tokens", of_tokens=True),
    ]


class TokenizeDocument(TypedDict):
    """The token ids. `count` is the number of token ids, and `max_model_len` the longest input in tokens that the
    server accepts."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class DetokenizeDocument(TypedDict):
    """The text of the tokens."""

    prompt: str


class TokenizerDocument(TypedDict):
    """The tokenizer's special tokens. `tokenizer_class` is the class of the library transformers that reads the
    tokenizer, and `model_max_length` the longest input in tokens that the server accepts."""

    tokenizer_class: str
    eos_token: str
    bos_token: None
    unk_token: str | None
    pad_token: None
    model_max_length: int
