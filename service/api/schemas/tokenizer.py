"""The tokenizer, in the form of vLLM's routes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict  # pydantic requires this one before Python 3.12

from wane.service.api.schemas.common import HISTORY, AtMost, Body, Model, says


class TokenizeBody(Body):
    """Turn a text into token ids."""

    examples = ({"prompt": HISTORY}, {"prompt": "<eos>", "add_special_tokens": False})

    model: Model = None
    prompt: str = Field(description="a text; `<eos>` in it is the id of that token")
    add_special_tokens: bool | None = Field(
        default=None, description="has no effect: the server itself feeds the start token before a sequence"
    )


class DetokenizeBody(Body):
    """Turn token ids into text."""

    examples = ({"tokens": [5, 6, 7]},)

    model: Model = None
    tokens: Annotated[
        list[int],
        Field(fail_fast=True, description="token ids"),
        says(items={"type": "integer", "minimum": 0}),
        AtMost("max_scored_tokens", of_tokens=True),
    ]


class TokenizeDocument(TypedDict):
    """The token ids. `max_model_len` is the longest input."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None


class DetokenizeDocument(TypedDict):
    """The text of the tokens."""

    prompt: str


class TokenizerDocument(TypedDict):
    """The tokenizer's special tokens and class."""

    tokenizer_class: str
    eos_token: str
    bos_token: None
    unk_token: str | None
    pad_token: None
    model_max_length: int
