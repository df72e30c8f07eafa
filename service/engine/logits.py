"""Computes log-probabilities and the most probable tokens from logits. Draws tokens, with a bias for each token,
penalties, temperature, top-k and top-p.

`Ranking` selects the tokens that an answer may list: all tokens, or the events that a request's filter allows. A filter
does not change the probabilities of the listed tokens. They are those of the whole distribution.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wane.models.vocabulary import Vocabulary
from wane.service.engine.forward import RunResult
from wane.service.runners.outputs import Largest
from wane.service.types.answer import Prediction
from wane.service.types.request import NO_FILTER, Bias, Filter, GenerateRequest


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Returns log-probabilities at temperature 1: float64 (V), from finite logits."""
    shifted = logits.astype(np.float64) - logits.max()
    normalised: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return normalised


def log_sum_exp_of(logits: NDArray[np.float32]) -> float:
    """Returns the log-sum-exp of finite logits (V)."""
    highest = float(logits.max())
    return highest + float(np.log(np.exp(logits.astype(np.float64) - highest).sum()))


def order_of(values: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """Returns the indexes of the `count` largest values in descending order: int64. Among equal values, the smaller
    index comes first."""
    least = np.partition(values, -count)[-count]
    places = np.flatnonzero(values >= least)  # includes all values that tie for the last place
    return places[np.argsort(-values[places], kind="stable")][:count]


def largest(
    logits: NDArray[np.float32],
    count: int,
    ids: NDArray[np.int64] | None = None,
    log_sum_exp: float | None = None,
) -> Largest:
    """Returns the `count` most probable tokens in descending order. Among equal probabilities, the smaller id comes
    first.

    logits: float32 (V). ids: the ids of the tokens to list, int64, ascending; None lists all tokens. log_sum_exp: the
    log-sum-exp of all logits; if it is None, this function computes it.
    """
    listed_logits = logits if ids is None else logits[ids]
    count = min(count, len(listed_logits))
    if not count:
        return Largest([], [], [], [])
    order = order_of(listed_logits, count)
    values = listed_logits[order].astype(np.float64)
    # Because the log-sum-exp is rounded, a log-probability near 0 may come out above 0.
    logprobs = np.minimum(values - (log_sum_exp_of(logits) if log_sum_exp is None else log_sum_exp), 0.0)
    listed_ids = order if ids is None else ids[order]
    return Largest(listed_ids.tolist(), values.tolist(), logprobs.tolist(), np.exp(logprobs).tolist())


NO_TOKENS = np.empty(0, np.int64)


class Ranking:
    """The tokens that an answer may list, most probable first."""

    def __init__(
        self,
        size: int,
        excluded: NDArray[np.bool_] | None = None,
        candidates: NDArray[np.int64] | None = None,
        seen: NDArray[np.int64] | None = None,
        kept: int = 0,
    ) -> None:
        """`size` is the number V of tokens in the vocabulary. `excluded` says for each token whether it is not listed:
        bool (V); None excludes no token. The tokens `seen`, int64, are not listed either, except for the token `kept`.
        If `candidates` is not None, only these ids are listed: int64, ascending, none of them excluded."""
        self._size = size
        self._first_excluded = excluded
        self._candidates = candidates
        self._seen = seen
        self._kept = kept

    @property
    def seen_tokens(self) -> int | None:
        """See `Answer`."""
        return None if self._seen is None else len(self._seen)

    @cached_property
    def _excluded(self) -> NDArray[np.bool_] | None:
        """For each token, whether it is not listed: bool (V). None if every token is listed."""
        excluded, kept = self._first_excluded, self._kept
        if excluded is None or self._seen is None:
            return excluded
        excluded = excluded.copy()
        is_kept = excluded[kept]
        excluded[self._seen] = True
        excluded[kept] = is_kept
        return excluded

    @cached_property
    def ids(self) -> NDArray[np.int64] | None:
        """The ids of the tokens that may be listed: int64, ascending. None if every token may be listed."""
        if self._candidates is not None or self._excluded is None:
            return self._candidates
        return np.flatnonzero(~self._excluded).astype(np.int64)

    def excludes(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns, for each id, whether the token is excluded: bool, of the shape of `ids`."""
        excluded, seen = self._first_excluded, self._seen
        if excluded is None:
            return np.zeros(ids.shape, np.bool_)
        if seen is None:
            return excluded[ids]
        if ids.size * len(seen) > self._size:
            assert self._excluded is not None, "a ranking without excluded tokens excludes some: this is a bug"
            return self._excluded[ids]
        # faster than an array of the vocabulary's size
        flags: NDArray[np.bool_] = (ids[..., None] == seen).any(axis=-1)
        flags &= ids != self._kept
        flags |= excluded[ids]
        return flags

    @cached_property
    def _excluded_tokens(self) -> int:
        """The number of excluded tokens."""
        return 0 if self._excluded is None else int(np.count_nonzero(self._excluded))

    def largest(self, result: RunResult, count: int) -> Largest:
        """Returns at least the `count` most probable of the tokens that may be listed. If fewer than `count` tokens may
        be listed, returns all of them."""
        excluded = self._excluded
        if self._candidates is None:
            wanted = min(count + self._excluded_tokens, self._size)
            asked = count if excluded is None else min(wanted, result.row.most)
            largest_listed = result.largest(asked) if asked else None
            if largest_listed is not None and excluded is not None:
                largest_listed = _without(largest_listed, excluded)
                if len(largest_listed.ids) < count and wanted > result.row.most:
                    largest_listed = None  # the graph outputs too few tokens, so the code below uses all logits
            if largest_listed is not None:
                return largest_listed
        logits, total = result.logits, result.log_sum_exp
        if self._candidates is not None or excluded is None:
            return largest(logits, count, self._candidates, total)
        total = log_sum_exp_of(logits) if total is None else total
        # faster than copying the logits of the allowed tokens
        return largest(np.where(excluded, -np.inf, logits), min(count, self._size - self._excluded_tokens), None, total)


def excluded_by_each(rankings: Sequence[Ranking], ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Returns, for each id, whether its row's ranking excludes the token: bool (R, K). rankings: R rankings of one
    model. ids: (R, K)."""
    seen = [NO_TOKENS if ranking._seen is None else ranking._seen for ranking in rankings]
    counts = [*map(len, seen)]
    bases = [ranking._first_excluded for ranking in rankings if ranking._first_excluded is not None]
    if len(bases) < len(rankings) or ids.shape[1] * sum(counts) <= rankings[0]._size * len(rankings):
        return np.stack([ranking.excludes(row) for ranking, row in zip(rankings, ids, strict=True)])
    excluded, kept = np.stack(bases), next(ranking._kept for ranking in rankings if ranking._seen is not None)
    is_kept = excluded[:, kept].copy()
    excluded[np.repeat(np.arange(len(rankings)), counts), np.concatenate(seen)] = True
    excluded[:, kept] = is_kept
    return np.take_along_axis(excluded, ids, axis=1)


def largest_of_each(
    rankings: Sequence[Ranking], logits: NDArray[np.float32], count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns the `count` most probable of the tokens that each row's ranking may list, in the order of `largest`, and
    their logits: (R, count). The logits of a row with fewer tokens end with -inf. rankings: R rankings without
    candidates, each with excluded tokens. logits: float32 (R, V)."""
    excluded = [ranking._excluded for ranking in rankings if ranking._excluded is not None]
    listed_logits = np.where(np.stack(excluded), -np.inf, logits)
    least = np.partition(listed_logits, -count, axis=1)[:, -count, None]
    rows, ids = np.nonzero(listed_logits >= least)  # includes all tokens that tie for the last place
    values = listed_logits[rows, ids]
    order = np.lexsort((-values, rows))  # stable, so that of equal logits, the smaller id comes first
    places = order[np.searchsorted(rows, np.arange(len(rankings)))[:, None] + np.arange(count)]
    return ids[places], values[places].astype(np.float64)


def _without(tokens: Largest, excluded: NDArray[np.bool_]) -> Largest:
    """Returns `tokens` without the excluded tokens."""
    flags = excluded[tokens.ids].tolist()
    if True not in flags:
        return tokens
    kept = [not flag for flag in flags]
    ids, logits, logprobs, probabilities = tokens
    return Largest(
        [*compress(ids, kept)],
        [*compress(logits, kept)],
        [*compress(logprobs, kept)],
        [*compress(probabilities, kept)],
    )


class Rankings:
    """Creates the rankings for one model's answers."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        size = vocabulary.size
        self._size = size
        self._eos_id = vocabulary.eos_id
        self._unk_id = vocabulary.unk_id
        self._excluded = np.zeros(size, np.bool_)
        self._excluded[list(vocabulary.unlisted)] = True
        self.of_all = Ranking(size)
        self.default = Ranking(size, self._excluded) if vocabulary.unlisted else self.of_all
        """The ranking for a request without a filter. It lists neither `<unk>` nor reserved tokens and, for a model of
        events, not `<eos>`."""

    def of(self, wanted: Filter, known: Sequence[int] | NDArray[np.int64]) -> Ranking:
        """Returns the ranking for the filter `wanted`. `known` are the tokens of the sequence that the server knows,
        without the start token."""
        if not wanted.exclude_seen and wanted == NO_FILTER:
            return self.default
        excluded, eos_id = self._excluded, self._eos_id
        if wanted.include_end or wanted.include_unknown or wanted.exclude:
            excluded = excluded.copy()
        if wanted.include_end:
            excluded[eos_id] = False
        if wanted.include_unknown and self._unk_id is not None:
            excluded[self._unk_id] = False
        if wanted.exclude:
            excluded[list(wanted.exclude)] = True
        # <eos> is not an event: only `include_end` decides whether it is listed.
        seen = np.asarray(known, np.int64) if wanted.exclude_seen else None
        candidates: NDArray[np.int64] | None = None
        if wanted.candidates is not None:
            # np.unique takes 7 ms at its first call, because it imports numpy.ma
            candidates = np.array(sorted({*wanted.candidates}), np.int64)
            candidates = candidates[~Ranking(self._size, excluded, None, seen, eos_id).excludes(candidates)]
        return Ranking(self._size, excluded, candidates, seen, eos_id)


def listed(tokens: Largest, count: int, vocabulary: Vocabulary) -> tuple[Prediction, ...]:
    """Returns the first `count` tokens as predictions."""
    ids = tokens.ids[:count]
    texts, partials = map(vocabulary.texts.__getitem__, ids), map(vocabulary.partials.__getitem__, ids)
    return tuple(map(Prediction, ids, texts, tokens.probabilities, tokens.logprobs, partials))


def most_probable(
    logprobs: NDArray[np.float64],
    count: int,
    also: int,
    vocabulary: Vocabulary,
    omitted: frozenset[int] = frozenset(),
) -> tuple[Prediction, ...]:
    """Returns the `count` most probable tokens, as in `largest`, and the token `also` at the end if it is not one of
    them. `logprobs`: the log-probabilities, float64 (V). The result contains a token of `omitted` only if it is
    `also`."""
    if omitted := omitted - {also}:
        logprobs = logprobs.copy()
        logprobs[list(omitted)] = -np.inf
        count = min(count, len(logprobs) - len(omitted))
    count = min(count, len(logprobs))
    ids: list[int] = order_of(logprobs, count).tolist() if count else []
    if also not in ids:
        ids.append(also)
    of_ids = logprobs[ids]
    return listed(Largest(ids, [], of_ids.tolist(), np.exp(of_ids).tolist()), len(ids), vocabulary)


FORCE, FORBID = 100.0, -100.0
"""If any token has a bias of FORCE or more, only such tokens are drawn. A token with a bias of FORBID or less is never
drawn.
"""


class Sampler:
    """Draws tokens. Samplers with the same parameters, including a seed, draw the same tokens from the same logits.

    Before a token is drawn, its bias is added to its log-probability, and penalties are subtracted if the token was
    drawn before: `presence_penalty` once, and `frequency_penalty` once for each time. If any token's bias is FORCE or
    more, only tokens with such a bias are drawn. Tokens with a bias of FORBID or less are never drawn.
    """

    def __init__(self, request: GenerateRequest, size: int, never_drawn: frozenset[int]) -> None:
        """`request` has the parameters. A `temperature` of 0 always draws the most probable token. top_k or top_p
        excludes no tokens if it is None. `sample` is the index of this sample among several samples with the same seed.
        Different indices give different random numbers. `size` is the number of tokens in the vocabulary. The bias and
        the tokens `never_drawn` must not forbid every token together."""
        self._request = request
        seed, sample = request.seed, request.sample
        self._random = np.random.default_rng([seed, sample] if sample and seed is not None else seed)
        self._has_penalties = bool(request.presence_penalty or request.frequency_penalty)
        self._drawn = Counter[int]()
        self._bias: NDArray[np.float64] | None = None
        if self._has_penalties or request.bias is not None or never_drawn:
            self._bias = _bias_of_each(request.bias or Bias({}), size, never_drawn)

    def draw(self, logprobs: NDArray[np.float64]) -> int:
        """Draws a token. `logprobs` are the tokens' log-probabilities at temperature 1, float64 (V)."""
        request = self._request
        if self._bias is not None:
            logprobs = logprobs + self._bias
            for token, times in self._drawn.items():
                logprobs[token] -= request.presence_penalty + request.frequency_penalty * times
        token = int(logprobs.argmax()) if request.temperature == 0 else self._sample(logprobs)
        if self._has_penalties:
            self._drawn[token] += 1
        return token

    def _sample(self, logprobs: NDArray[np.float64]) -> int:
        """Applies the temperature, top-k and top-p, and draws a token. Top-p keeps the fewest tokens with a total
        probability of at least p."""
        # The largest value becomes exactly 0. Tiny temperatures therefore give 0 and -inf, never NaN.
        with np.errstate(over="ignore"):
            scaled = (logprobs - logprobs.max()) / self._request.temperature
        order = np.argsort(-scaled, kind="stable")[: self._request.top_k]
        if self._bias is not None:
            order = order[np.isfinite(scaled[order])]  # without the tokens that are never drawn
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        cumulative = np.cumsum(weights)
        if self._request.top_p is not None:
            # A token is kept if the probabilities of all more probable tokens add up to less than p. At least one token
            # is kept.
            keep = int(np.searchsorted(cumulative, self._request.top_p, side="left")) + 1
            order, cumulative = order[:keep], cumulative[:keep]
        drawn = self._random.random() * cumulative[-1]
        return int(order[min(int(np.searchsorted(cumulative, drawn, side="right")), len(order) - 1)])


def _bias_of_each(bias: Bias, size: int, never_drawn: frozenset[int]) -> NDArray[np.float64]:
    """Returns what is added to the log-probability of each token of the vocabulary: float64 (V), -inf for a token that
    is never drawn. All samples of a request share the array."""
    if bias.added is None or len(bias.added) != size:
        is_forced = bias.values >= FORCE
        bias.added = np.full(size, -np.inf if is_forced.any() else 0.0)
        if is_forced.any():
            bias.added[bias.ids[is_forced]] = 0.0
        else:
            bias.added[bias.ids] = np.where(bias.values <= FORBID, -np.inf, bias.values)
        bias.added[[*never_drawn]] = -np.inf
    return bias.added
