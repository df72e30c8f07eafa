"""Compares the metrics and the baselines with simple implementations of the same definitions."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from wane.training.baselines import Vsknn, baselines_of
from wane.training.ranking import CUTOFFS, best_of, metrics_of, ranks_of
from wane.training.sessions import Sessions

EOS, UNK, SIZE = 0, 1, 14


def ranking(scores: list[float]) -> list[int]:
    """Returns the ids of the events in the order of their scores, highest first. `<eos>` and `<unk>` are left out."""
    return sorted(
        (index for index in range(SIZE) if index not in (EOS, UNK)), key=lambda index: (-scores[index], index)
    )


def expected(rows: list[list[float]], rests: list[list[int]], missed: int) -> dict[str, dict[int, float]]:
    """Returns the metrics by name and k. rows: the scores at each position. rests: the session's remaining events at
    each position, beginning with the next event. An unknown event is `<unk>`. missed: the number of next events that
    are not in the stream. Each of these counts as 0 in every metric."""
    gains: dict[str, dict[int, float]] = {
        name: dict.fromkeys(CUTOFFS, 0.0) for name in ("recall", "mrr", "ndcg", "hit")
    }
    for scores, rest in zip(rows, rests, strict=True):
        ranked = ranking(scores)
        if rest[0] == UNK:
            continue
        for k in CUTOFFS:
            top = ranked[:k]
            if rest[0] in top:
                place = top.index(rest[0]) + 1
                gains["recall"][k] += 1
                gains["mrr"][k] += 1 / place
                gains["ndcg"][k] += 1 / math.log2(place + 1)
            if any(event in top for event in rest):
                gains["hit"][k] += 1
    return {name: {k: gain / (len(rows) + missed) for k, gain in by_k.items()} for name, by_k in gains.items()}


def test_the_metrics_equal_their_definitions() -> None:
    random = np.random.default_rng(1)
    count, missed = 200, 50
    scores = random.integers(0, 6, (count, SIZE)).astype(float)  # only six values, so that many scores are equal
    rests = [random.integers(1, SIZE, random.integers(1, 5)).tolist() for _ in range(count)]
    known = np.array([rest[0] != UNK for rest in rests])
    assert 0 < (~known).sum() < count
    choices = [
        np.array([event for event in rest if event != UNK]) for rest, one in zip(rests, known, strict=True) if one
    ]
    targets = np.array([rest[0] for rest, one in zip(rests, known, strict=True) if one])
    excluded = [EOS, UNK]
    found = metrics_of(
        ranks_of(scores[known], targets, excluded),
        ranks_of(scores[known], best_of(scores[known], choices), excluded),
        count,
        missed / (count + missed),
    )
    definition = expected(scores.tolist(), rests, missed)
    assert found.recall == pytest.approx(definition["recall"])
    assert found.mrr == pytest.approx(definition["mrr"])
    assert found.ndcg == pytest.approx(definition["ndcg"])
    assert found.hit_rate == pytest.approx(definition["hit"])
    assert all(found.hit_rate[k] > found.recall[k] for k in CUTOFFS[:3])


def test_equal_scores_are_ranked_by_id_and_special_tokens_have_no_rank() -> None:
    scores = np.array([[9.0, 9.0, 1.0, 1.0, 1.0]] * 3)
    assert ranks_of(scores, np.array([2, 3, 4]), [EOS, UNK]).tolist() == [1, 2, 3]


def train() -> tuple[Sessions, list[list[int]]]:
    """Returns random sessions in two forms: as a stream and as lists."""
    random = np.random.default_rng(5)
    lists = [random.choice(np.arange(2, SIZE), random.integers(1, 8), p=weights()).tolist() for _ in range(80)]
    stream = [EOS]
    for events in lists:
        stream += [*events, EOS]
    return Sessions(np.array(stream), EOS, "token"), lists


def weights() -> NDArray[np.float64]:
    found: NDArray[np.float64] = 1 / np.arange(1, SIZE - 1)
    found /= found.sum()
    return found


QUERIES = [[2], [5, 5], [13], [3, 9, 4, 3], [2, 3, 4, 5, 6, 7, 8]]


def test_popularity_last_item_and_markov_equal_their_definitions() -> None:
    sessions, lists = train()
    counts = Counter(event for events in lists for event in events)
    pairs = Counter(pair for events in lists for pair in pairwise(events))
    found = baselines_of(sessions, SIZE)
    queries = [np.array(query) for query in QUERIES]
    by_popularity = sorted(range(2, SIZE), key=lambda event: (-counts[event], event))
    for row, query in enumerate(QUERIES):
        last = query[-1]
        assert ranking(found["popularity"].scores(queries)[row].tolist()) == by_popularity
        repeated = [last] + [event for event in by_popularity if event != last]
        assert ranking(found["last item"].scores(queries)[row].tolist()) == repeated
        followers = sorted(range(2, SIZE), key=lambda event: (-pairs[last, event], -counts[event], event))
        assert ranking(found["Markov"].scores(queries)[row].tolist()) == followers


def vsknn(lists: list[list[int]], query: list[int], recent: int, neighbours: int) -> list[float]:
    """Returns the scores of V-SkNN, computed as the paper describes them. recent, neighbours: m and k of the paper."""
    weight = {event: (index + 1) / len(query) for index, event in enumerate(query)}
    related = [index for index, events in enumerate(lists) if set(events) & set(query)][-recent:]
    similarity = {
        index: sum(weight[event] for event in set(lists[index]) & set(query)) / len(set(query)) for index in related
    }
    nearest = sorted(related, key=lambda index: (-round(similarity[index], 12), -index))[:neighbours]
    scores = [0.0] * SIZE
    for index in nearest:
        back = next(place for place, event in enumerate(reversed(query), start=1) if event in lists[index])
        for event in set(lists[index]):
            scores[event] += similarity[index] / back
    return scores


@pytest.mark.parametrize(("recent", "neighbours"), [(1000, 100), (1000, 7), (20, 100), (9, 4)])
def test_vsknn_equals_its_description(monkeypatch: pytest.MonkeyPatch, recent: int, neighbours: int) -> None:
    monkeypatch.setattr("wane.training.baselines.RECENT", recent)
    monkeypatch.setattr("wane.training.baselines.NEIGHBOURS", neighbours)
    sessions, lists = train()
    found = Vsknn(sessions, SIZE).scores([np.array(query) for query in QUERIES])
    for row, query in enumerate(QUERIES):
        assert found[row].tolist() == pytest.approx(vsknn(lists, query, recent, neighbours))
