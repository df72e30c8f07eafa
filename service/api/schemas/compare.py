"""Requests and answers of comparisons of recurrent mode with windows of several sizes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from wane.service.api.schemas.common import HISTORY, AtMost, Cache, Model, Name, Positive, SequenceBody, Window
from wane.service.types import MAX_COMPARED_MODELS, MAX_COMPARED_WINDOWS, MAX_REPEAT


class CompareBody(SequenceBody):
    """Compare recurrent mode with windows of several sizes. The answer has the distance of each window from recurrent
    mode, and the latency of recurrent mode and of each window."""

    examples = ({"input": HISTORY, "windows": [1, 2, 4, 8], "repeat": 3},)
    not_both: ClassVar[tuple[str, ...]] = ("model", "models")

    model: Model = None
    models: Annotated[list[Name] | None, AtMost(MAX_COMPARED_MODELS)] = Field(
        default=None, min_length=1, fail_fast=True, description="the names of several models, instead of `model`"
    )
    windows: Annotated[list[Window], AtMost(MAX_COMPARED_WINDOWS)] = Field(
        default=[8, 16, 32, 64],
        fail_fast=True,
        description="the window sizes to compare, in tokens",
        json_schema_extra={"minItems": 1},
    )
    repeat: Annotated[Positive, AtMost(MAX_REPEAT)] = Field(
        default=20,
        description="the number of runs of recurrent mode and of each window, for the percentiles of latency",
    )
    cache: Cache = True
