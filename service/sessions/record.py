"""The latest tokens of a session, packed: what a state can be rebuilt from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class TokenHistory:
    """Token ids as little-endian unsigned integers of `width` bytes, oldest first; immutable.

    The leading `<eos>` of a sequence is part of its tail until the first token has been cut off. A tail that began with
    the end of a longer sequence never has it.
    """

    data: bytes
    width: int

    @classmethod
    def start(cls, eos_id: int, vocabulary_size: int) -> Self:
        """The tail of a sequence with no tokens yet: `<eos>` alone, in two bytes a token where ids fit."""
        width = 2 if vocabulary_size <= 1 << 16 else 4
        return cls(eos_id.to_bytes(width, "little"), width)

    def __len__(self) -> int:
        return len(self.data) // self.width

    def ids(self) -> NDArray[np.int64]:
        """The token ids, oldest first: int64 (len,)."""
        return np.frombuffer(self.data, dtype=f"<u{self.width}").astype(np.int64)

    def append(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """With `tokens` behind; `position` counts the sequence with them.

        `<eos>` counts nothing: a sequence of up to `keep` tokens is kept whole, a longer one by its last `keep`.
        """
        width = self.width
        if len(tokens) == 1:
            data = self.data + tokens[0].to_bytes(width, "little")
        else:
            data = self.data + b"".join([token.to_bytes(width, "little") for token in tokens])
        return TokenHistory(data if position <= keep else data[-keep * width :], width)

    def ending(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """That of a sequence at `position` which ends in `tokens`, where this one is of a sequence with none yet.

        With fewer tokens than `position` the beginning is not known, and `<eos>` is no part of it.
        """
        start = self if len(tokens) == position else TokenHistory(b"", self.width)
        return start.append(tokens, position, keep)

    def without_last(self, count: int) -> TokenHistory:
        """Without the latest `count` tokens. At least one token must remain."""
        assert 0 <= count < len(self), "a tail cannot be cut to nothing: this is a bug"
        return TokenHistory(self.data[: len(self.data) - count * self.width], self.width)
