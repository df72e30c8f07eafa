"""The latest tokens of a session, packed. A state can be rebuilt from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class TokenHistory:
    """Token ids as little-endian unsigned integers of `width` bytes, oldest first; immutable.

    The leading `<eos>` of a sequence is part of its tail until the first token is cut off. The tail of a sequence whose
    beginning is unknown has no `<eos>`.
    """

    data: bytes
    width: int

    @classmethod
    def start(cls, eos_id: int, vocabulary_size: int) -> Self:
        """Returns the tail of a sequence without tokens: `<eos>` alone. A token takes two bytes if all ids fit."""
        width = 2 if vocabulary_size <= 1 << 16 else 4
        return cls(eos_id.to_bytes(width, "little"), width)

    def __len__(self) -> int:
        return len(self.data) // self.width

    def ids(self) -> NDArray[np.int64]:
        """Returns the token ids, oldest first: int64 (len,)."""
        return np.frombuffer(self.data, dtype=f"<u{self.width}").astype(np.int64)

    def append(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the tail with `tokens` appended; `position` counts the sequence with them.

        A sequence of up to `keep` tokens is kept whole, with `<eos>`; of a longer one the last `keep` tokens are kept.
        """
        width = self.width
        if len(tokens) == 1:
            data = self.data + tokens[0].to_bytes(width, "little")
        else:
            data = self.data + b"".join([token.to_bytes(width, "little") for token in tokens])
        return TokenHistory(data if position <= keep else data[-keep * width :], width)

    def ending(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the tail of a sequence at `position` that ends in `tokens`. This tail must be that of an empty
        sequence.

        With fewer tokens than `position` the beginning is unknown, and the tail has no `<eos>`.
        """
        start = self if len(tokens) == position else TokenHistory(b"", self.width)
        return start.append(tokens, position, keep)

    def without_last(self, count: int) -> TokenHistory:
        """Returns the tail without its latest `count` tokens. At least one token must remain."""
        assert 0 <= count < len(self), "a tail cannot be cut to nothing: this is a bug"
        return TokenHistory(self.data[: len(self.data) - count * self.width], self.width)
