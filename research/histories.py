"""Generates token histories, and measures the distance between two runs that read the same last tokens. One run has
read other tokens (the past) before, and the other starts from the zero state.

Histories are random or adversarial. A greedy history first repeats one token, which drives the state to its extremes.
Then it appends the tokens that keep the two runs farthest apart. A climbed history is the result of a random search
that changes single tokens to increase the distance at the end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wane.models.reference import Reference, State

Tokens = NDArray[np.int64]
Curve = NDArray[np.float64]


def distances(reference: Reference, past: Tokens, last: Tokens) -> Curve:
    """Returns the 2-norm distance (N, K) between the two runs' `hidden` after each of the last tokens. `past` (N, P)
    contains the other tokens, and `last` (N, K) the same last tokens."""
    full = reference.zero_state(len(past))
    for column in past.T:
        _, full = reference.advance(column, full)
    return distances_from(reference, full, last)


def distances_from(reference: Reference, full: State, last: Tokens) -> Curve:
    """Like `distances`, but the first run starts from the states `full`, (N, ...), instead of reading a past.
    last: (N, K)."""
    count = len(last)
    cut = reference.zero_state(count)
    curve = []
    for column in last.T:
        hidden, both = reference.advance(np.tile(column, 2), _stack(full, cut))
        full, cut = _split(both)
        apart = hidden[:count].astype(np.float64) - hidden[count:].astype(np.float64)
        curve.append(np.linalg.norm(apart, axis=1))
    return np.stack(curve, axis=1)


def after(reference: Reference, state: State, past: Tokens | None, window: Tokens) -> Curve:
    """Returns `hidden` (N, H) at the end of runs over `past` (N, P) and then `window` (K). The runs start from the
    states `state` (N, ...). If `past` is None, they read only `window`."""
    for column in () if past is None else past.T:
        _, state = reference.advance(column, state)
    for token in window:
        hidden, state = reference.advance(np.full(len(next(iter(state.values()))), token), state)
    return hidden


def random_histories(generator: np.random.Generator, vocabulary: int, count: int, past: int, last: int) -> Tokens:
    """Returns random tokens (count, past + last). Half of the rows use only two different tokens, which drives the
    states to their extremes."""
    tokens = generator.integers(vocabulary, size=(count, past + last), dtype=np.int64)
    few = generator.integers(vocabulary, size=(count // 2, 2), dtype=np.int64)
    tokens[: count // 2] = np.take_along_axis(few, generator.integers(2, size=(count // 2, past + last)), axis=1)
    return tokens


def greedy_histories(reference: Reference, vocabulary: int, past: int, last: int) -> Tokens:
    """Returns tokens (V, past + last). Each row starts with `past` copies of one token. Each following token is the one
    that keeps the states of the two runs farthest apart."""
    pasts = np.repeat(np.arange(vocabulary, dtype=np.int64)[:, None], past, axis=1)
    full, cut = reference.zero_state(vocabulary), reference.zero_state(vocabulary)
    for column in pasts.T:
        _, full = reference.advance(column, full)
    chosen = []
    every = np.tile(np.arange(vocabulary, dtype=np.int64), vocabulary)
    rows = np.arange(vocabulary)
    for _ in range(last):
        tried = [{name: np.repeat(value, vocabulary, axis=0) for name, value in each.items()} for each in (full, cut)]
        _, after = reference.advance(np.tile(every, 2), _stack(*tried))
        far, near = _split(after)
        apart = sum(((far[name] - near[name]) ** 2).reshape(len(every), -1).sum(axis=1) for name in far)
        best = np.argmax(np.reshape(apart, (vocabulary, vocabulary)), axis=1)
        picked = rows * vocabulary + best
        full, cut = ({name: value[picked] for name, value in each.items()} for each in (far, near))
        chosen.append(best)
    return np.concatenate([pasts, np.stack(chosen, axis=1)], axis=1)


def climbed_histories(
    reference: Reference, generator: np.random.Generator, start: Tokens, past: int, rounds: int
) -> Tokens:
    """Changes a few random tokens of `start` (N, past + last) at a time, in `rounds` rounds. A change is kept if it
    increases the distance at the last token. Returns the changed tokens."""
    tokens, best = start, distances(reference, start[:, :past], start[:, past:])[:, -1]
    for _ in range(rounds):
        changed = generator.random(tokens.shape) < 2 / tokens.shape[1]
        random = generator.integers(reference.architecture.vocabulary_size, size=tokens.shape, dtype=np.int64)
        tried = np.where(changed, random, tokens)
        found = distances(reference, tried[:, :past], tried[:, past:])[:, -1]
        tokens = np.where((found > best)[:, None], tried, tokens)
        best = np.maximum(found, best)
    return tokens


def _stack(first: State, second: State) -> State:
    return {name: np.concatenate([first[name], second[name]]) for name in first}


def _split(state: State) -> tuple[State, State]:
    half = len(next(iter(state.values()))) // 2
    return {name: value[:half] for name, value in state.items()}, {name: value[half:] for name, value in state.items()}
