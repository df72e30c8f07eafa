"""Requests and answers of comparisons of recurrent mode with windows of several sizes."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from wane.service.api.schemas.common import (
    HISTORY,
    Cache,
    Model,
    Name,
    Positive,
    SequenceBody,
    Window,
    at_most,
    keywords,
)
from wane.service.types.common import says
from wane.service.types.request import MAX_COMPARED_MODELS, MAX_COMPARED_WINDOWS, MAX_REPEAT


class CompareBody(SequenceBody, kw_only=True):
    """Compare recurrent mode with windows of several sizes. The answer has the distance of each window from recurrent
    mode, and the latency of recurrent mode and of each window."""

    examples = ({"input": HISTORY, "windows": [1, 2, 4, 8], "repeat": 3},)
    not_both: ClassVar[tuple[str, ...]] = ("model", "models")

    model: Model = None
    models: Annotated[
        Annotated[tuple[Name, ...], Meta(min_length=1)] | None,
        at_most(MAX_COMPARED_MODELS),
        says("the names of several models, instead of `model`"),
    ] = None
    windows: Annotated[
        tuple[Window, ...],
        at_most(MAX_COMPARED_WINDOWS),
        keywords(minItems=1),
        says("the window sizes to compare, in tokens"),
    ] = (8, 16, 32, 64)
    repeat: Annotated[
        Positive,
        at_most(MAX_REPEAT),
        says("the number of runs of recurrent mode and of each window, for the percentiles of latency"),
    ] = 20
    cache: Cache = True
