"""The latest tokens of a session, in packed form. A lost state is rebuilt from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class TokenHistory:
    """Token ids as little-endian unsigned integers of `width` bytes, oldest first; immutable.

    The history begins with `<eos>` as long as it holds the whole sequence. The history has no `<eos>` if the beginning
    of the sequence was cut off or was never known.
    """

    data: bytes
    width: int

    @classmethod
    def start(cls, eos_id: int, vocabulary_size: int) -> Self:
        """Returns the history of a sequence without tokens, which holds only `<eos>`. A token takes two bytes if all
        ids fit in two bytes, and four otherwise."""
        width = 2 if vocabulary_size <= 1 << 16 else 4
        return cls(eos_id.to_bytes(width, "little"), width)

    def __len__(self) -> int:
        return len(self.data) // self.width

    def ids(self) -> NDArray[np.int64]:
        """Returns the token ids, oldest first: int64 (len,)."""
        return np.frombuffer(self.data, dtype=f"<u{self.width}").astype(np.int64)

    def append(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the history with `tokens` appended. `position` is the length of the sequence after the append.

        A sequence of up to `keep` tokens is kept whole, with `<eos>`. Only the last `keep` tokens of a longer sequence
        are kept.
        """
        width = self.width
        if len(tokens) == 1:
            data = self.data + tokens[0].to_bytes(width, "little")
        else:
            data = self.data + b"".join([token.to_bytes(width, "little") for token in tokens])
        return TokenHistory(data if position <= keep else data[-keep * width :], width)

    def ending(self, tokens: Sequence[int], position: int, keep: int) -> TokenHistory:
        """Returns the history of a sequence of `position` tokens that ends in `tokens`. `self` must be the history of
        an empty sequence.

        If there are fewer tokens than `position`, the beginning is unknown, and the history has no `<eos>`.
        """
        start = self if len(tokens) == position else TokenHistory(b"", self.width)
        return start.append(tokens, position, keep)

    def without_last(self, count: int) -> TokenHistory:
        """Returns the history without its latest `count` tokens. At least one token must remain."""
        assert 0 <= count < len(self), "a rewind leaves no token: this is a bug"
        return TokenHistory(self.data[: len(self.data) - count * self.width], self.width)
