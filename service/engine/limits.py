"""Checks requests against the limits of one model and of the server's settings. Each error message names the field, its
value and the limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.engine.logits import FORBID, FORCE
from wane.service.errors import InvalidRequest, TooLarge, truncate_repr
from wane.service.settings import Settings
from wane.service.types.request import GenerateRequest


class Limits:
    """Checks requests against the model's manifest and the settings."""

    def __init__(self, manifest: Manifest, settings: Settings, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._manifest = manifest
        self._settings = settings
        self._size = manifest.vocabulary.size
        self._is_reserved = np.zeros(self._size, np.bool_)
        self._is_reserved[[*vocabulary.reserved]] = True
        limit = settings.max_window
        self.max_window = manifest.max_window if limit is None else min(limit, manifest.max_window)
        self.window = min(manifest.window, self.max_window)

    def tokens(self, tokens: Sequence[int], field: str = "tokens", *, document: bool = False) -> None:
        """Raises TooLarge if there are too many tokens. Raises InvalidRequest if a token is not in the vocabulary, or
        is reserved.

        A `document` is input for scoring, for which the limit is higher."""
        size, reserved = self._size, self._vocabulary.reserved
        if len(tokens) == 1 and 0 <= tokens[0] < size and tokens[0] not in reserved:
            return
        self.length(len(tokens), document=document)
        ids = np.asarray(tokens)
        if not tokens or (ids.min() >= 0 and ids.max() < size and not self._is_reserved[ids].any()):
            return
        index, token = next(
            (at, token) for at, token in enumerate(tokens) if not 0 <= token < size or token in reserved
        )
        if token in reserved:
            raise InvalidRequest(
                f"{field}[{index}] is {token}, which is {self._vocabulary.token(token)!r}, a token that the vocabulary "
                "reserves",
                field,
            )
        raise InvalidRequest(
            f"{field}[{index}] is {truncate_repr(token)}, but the vocabulary has {size} tokens (0..{size - 1})", field
        )

    def longest(self, *, document: bool = False) -> int:
        """Returns the largest allowed number of tokens in an input. `document`: see `tokens`."""
        return self._settings.max_scored_tokens if document else self._settings.max_input_tokens

    def length(self, count: int, how: str = "", *, document: bool = False) -> None:
        """Raises TooLarge if the input has too many tokens. `how` is put before the count in the error message, for
        example "at least "."""
        most = self.longest(document=document)
        if count > most:
            raise TooLarge(f"the input has {how}{count} tokens, but at most {most} are allowed")

    def top_k(self, top_k: int) -> None:
        """Raises InvalidRequest if `top_k` is over the limit."""
        _at_most("top_k", top_k, self._settings.top_k_limit)

    def preferences(self, request: GenerateRequest) -> None:
        """Raises InvalidRequest if `logit_bias` contains a token that is not in the vocabulary, if `logit_bias` forbids
        every token or forces one that is never drawn, or if `top_logprobs` is over the limit."""
        _at_most("top_logprobs", request.top_logprobs or 0, self._settings.top_k_limit)
        bias = request.bias
        if bias is None:
            return
        for token in bias.ids[(bias.ids < 0) | (bias.ids >= self._size)].tolist():
            raise InvalidRequest(
                f"logit_bias contains the token {truncate_repr(token)}, but the vocabulary has {self._size} tokens "
                f"(0..{self._size - 1})",
                "logit_bias",
            )
        never_drawn = self._vocabulary.never_drawn(include_unknown=request.include_unknown)
        for token in never_drawn.intersection(bias.ids[bias.values >= FORCE].tolist()):
            raise InvalidRequest(
                f"logit_bias forces the token {token}, {self._vocabulary.token(token)!r}, which is never drawn",
                "logit_bias",
            )
        if len(never_drawn.union(bias.ids[bias.values <= FORBID].tolist())) == self._size:
            raise InvalidRequest("logit_bias forbids every token of the vocabulary", "logit_bias")

    def of_window(self, window: int | None, field: str = "window") -> None:
        """Raises InvalidRequest if the window is less than 1, or exceeds the limit of the model or of the server."""
        if window is not None and not 1 <= window <= self.max_window:
            raise InvalidRequest(
                f"{field} is {window}, but model {self._manifest.name} takes windows of 1 to {self.max_window} tokens",
                field,
            )

    def generated(self, max_tokens: int) -> None:
        """Raises InvalidRequest if `max_tokens` is over the limit."""
        _at_most("max_tokens", max_tokens, self._settings.max_generated_tokens)


def _at_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise InvalidRequest(f"{field} is {value}, but must be at most {most}", field)
