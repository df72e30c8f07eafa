"""Keeps states of sequences that requests without a session have read. A later request whose sequence begins with the
same tokens continues from such a state, and runs only the tokens after it.

A state is kept under its owner and a hash of all tokens that it has read. It is kept at the end of a sequence. It is
also kept where a sequence leaves an earlier one, at the multiple of BLOCK tokens before that place, because more
sequences may leave there (after a common system prompt, for example). Sequences of fewer than BLOCK tokens are neither
looked up nor kept.

A score also leaves the log-probabilities of the tokens that a state has read, so that a later score need not run them.

The states take slots of the pool that also holds the sessions' states. They are evicted before any session's state. All
states of the pool come from one version of one model, so a new version never finds a state of an earlier one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK: Final = 64
"""The number of tokens that are hashed together."""

TOKEN_BYTES: Final = 4
BLOCK_BYTES: Final = BLOCK * TOKEN_BYTES
DIGEST_BYTES: Final = 16
ENTRY_BYTES: Final = 1024
"""The memory of a kept state beside its slot: its keys and its places in the indexes."""

BLOCKS_SEEN: Final = 16_384
"""The largest number of blocks that are remembered without a state: about 4 MB."""

SCORES_BYTES: Final = 16 << 20
"""The largest memory of all kept scores. The least recently used ones are dropped, and their states stay."""

LISTED_BYTES: Final = 192
"""The memory of one token in a list of a score (`Prediction`)."""

Key = tuple[str, bytes]
"""The owner's name, and the hash of all tokens that a state has read."""


class Path:
    """The beginnings of one owner's sequence of n tokens, as keys."""

    def __init__(self, owner: str, tokens: NDArray[np.int64]) -> None:
        """`tokens`: (n), the model's input, with its start token."""
        self.length = len(tokens)
        self._owner = owner
        self._data = tokens.astype(np.int32).tobytes()
        digest = b""
        self.blocks: list[Key] = [(owner, digest)]
        """The keys of the first BLOCK * i tokens, for i = 0, 1, 2, ..."""
        for end in range(BLOCK_BYTES, len(self._data) + 1, BLOCK_BYTES):
            data = self._data[end - BLOCK_BYTES : end]
            digest = blake2b(digest + data, digest_size=DIGEST_BYTES).digest()
            self.blocks.append((owner, digest))

    def key(self, length: int) -> Key:
        """Returns the key of the first `length` tokens."""
        block, rest = divmod(length, BLOCK)
        if not rest:
            return self.blocks[block]
        data = self._data[BLOCK_BYTES * block : TOKEN_BYTES * length]
        return self._owner, blake2b(self.blocks[block][1] + data, digest_size=DIGEST_BYTES).digest()


class Scores(NamedTuple):
    """What a score has computed for all tokens but the first that a state has read. `logprobs`: float64 (n), the
    network's log-probability of each. `lists`: the most probable tokens at the position of each, as the options
    `asked` want them. Both are empty if the score has no lists."""

    logprobs: NDArray[np.float64]
    lists: tuple[tuple[Any, ...], ...] = ()
    asked: tuple[Any, ...] = ()

    @property
    def bytes(self) -> int:
        """The memory of the scores, about."""
        return self.logprobs.nbytes + LISTED_BYTES * sum(map(len, self.lists))


class Found(NamedTuple):
    """The slot of a state that has read a sequence's first `length` tokens. If no state is kept, it is 0, the slot of
    the zero state, and `length` is 0. `branch` is a larger number of tokens after which an earlier sequence went on in
    another way; 0: there is none. `scores`: those that an earlier score has left beside the state."""

    slot: int
    length: int
    branch: int
    scores: Scores | None = None


@dataclass(slots=True)
class _Kept:
    slot: int
    block: Key
    rest: int  # the number of tokens after the block
    touched_s: float


class PrefixStates:
    """The kept states of one pool, least recently used first."""

    def __init__(
        self,
        users: Sequence[int],
        retain: Callable[[int], object],
        release: Callable[[int], object],
        most: int,
        clock: Callable[[], float],
        count: Callable[[int], object],
    ) -> None:
        """`users`, `retain`, `release`: see `StatePool`. `most` is the largest number of kept states. `count` is called
        for each sequence that is looked up, with the number of tokens that its state has read."""
        self._users, self._retain, self._release = users, retain, release
        self._most = most
        self._clock = clock
        self._count = count
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._rests: dict[Key, list[int]] = {}  # for each block, how many tokens after it each state has read
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self._scores: OrderedDict[Key, Scores] = OrderedDict()
        self._scores_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, path: Path, scored: Callable[[Scores], bool] | None = None) -> Found:
        """Returns the state of the longest beginning whose state is kept. Counts as a use of the state. The caller must
        hold its slot before the event loop runs anything else. With `scored`, looks only for states beside whose scores
        it accepts."""
        branch = 0
        for block in range(path.length // BLOCK, 0, -1):
            start = BLOCK * block
            at = path.blocks[block]
            for rest in sorted({*self._rests.get(at, ())}, reverse=True):
                length = start + rest
                if length > path.length:
                    continue
                key = path.key(length)
                kept, scores = self._kept.get(key), self._scores.get(key)
                if kept is not None and (scored is None or (scores is not None and scored(scores))):
                    self._touch(key, kept)
                    self._count(length)
                    return Found(kept.slot, length, branch if branch > length else 0, scores)
            if not branch and at in self._seen and start < path.length:
                branch = start
        self._count(0)
        return Found(0, 0, branch)

    def keep(self, path: Path, length: int, slot: int, scores: Scores | None = None) -> None:
        """Keeps the state in `slot`, which has read the first `length` tokens of a sequence, and retains the slot. If
        such a state is kept already, keeps only the `scores`."""
        if length < BLOCK:
            return
        if length == path.length:
            for block in path.blocks[1:]:
                self._seen[block] = None
                self._seen.move_to_end(block)
            while len(self._seen) > BLOCKS_SEEN:
                self._seen.popitem(last=False)
        key = path.key(length)
        kept = self._kept.get(key)
        if kept is None:
            self._retain(slot)
            kept = self._kept[key] = _Kept(slot, path.blocks[length // BLOCK], length % BLOCK, 0.0)
            self._rests.setdefault(kept.block, []).append(kept.rest)
        if scores is not None:
            self._forget(key)
            self._scores[key] = scores
            self._scores_bytes += scores.bytes
        self._touch(key, kept)
        while len(self._kept) > self._most:
            self._drop(next(iter(self._kept)))
        while self._scores_bytes > SCORES_BYTES:
            self._forget(next(iter(self._scores)))

    def evict(self) -> bool:
        """Frees the slot of the least recently used state that no request uses. Returns False if there is none."""
        for key, kept in self._kept.items():
            if self._users[kept.slot] == 1:
                self._drop(key)
                return True
        return False

    def drop_idle(self, since_s: float) -> None:
        """Drops the states that were last used before `since_s`."""
        while self._kept:
            key, kept = next(iter(self._kept.items()))
            if kept.touched_s >= since_s:
                return
            self._drop(key)

    def _touch(self, key: Key, kept: _Kept) -> None:
        kept.touched_s = self._clock()
        self._kept.move_to_end(key)
        if key in self._scores:
            self._scores.move_to_end(key)

    def _forget(self, key: Key) -> None:
        """Drops the scores beside a state, if there are any."""
        scores = self._scores.pop(key, None)
        self._scores_bytes -= 0 if scores is None else scores.bytes

    def _drop(self, key: Key) -> None:
        self._forget(key)
        kept = self._kept.pop(key)
        self._rests[kept.block].remove(kept.rest)
        if not self._rests[kept.block]:
            del self._rests[kept.block]
        self._release(kept.slot)

    def faults(self) -> list[str]:
        """Returns the faults of the indexes. For tests and debugging."""
        slots = [kept.slot for kept in self._kept.values()]
        rests = Counter((kept.block, kept.rest) for kept in self._kept.values())
        indexed = Counter((block, rest) for block, rests in self._rests.items() for rest in rests)
        wrong = {
            "a slot holds two kept states": len({*slots}) < len(slots),
            "a slot with a kept state is free": any(not self._users[slot] for slot in slots),
            "the index of the kept states is wrong": rests != indexed,
            "scores are kept without a state": not self._scores.keys() <= self._kept.keys(),
            "the memory of the scores is wrong": self._scores_bytes
            != sum(each.bytes for each in self._scores.values()),
            "too many states are kept": len(slots) > self._most,
        }
        return [text for text, is_wrong in wrong.items() if is_wrong]
