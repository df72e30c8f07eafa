"""Compares the metrics and the baselines with simple implementations of the same definitions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import pytrec_eval
from numpy.typing import NDArray

from wane.training.rankings.baselines import Vmis, Vsknn, baselines_of
from wane.training.rankings.metrics import CUTOFFS, UNRANKED, Difference, Judged, Scorer, first_of, judged_of, ranks_of
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


def positions(
    count: int, size: int = SIZE
) -> tuple[NDArray[np.float64], list[list[int]], NDArray[np.int64], NDArray[np.float64]]:
    """Returns random positions: scores, of which many are equal, the remaining events, the session of each position,
    and the counts of the events in training."""
    random = np.random.default_rng(1)
    scores = random.integers(0, 6, (count, size)).astype(float)
    rests = [random.integers(1, size, random.integers(1, 5)).tolist() for _ in range(count)]
    counts = random.integers(1, 9, size).astype(float)
    counts[[EOS, UNK]] = 0
    return scores, rests, np.sort(random.integers(0, count // 3, count)), counts


def judged(scores: NDArray[np.float64], rests: list[list[int]]) -> Judged:
    """Ranks the events as `Judge` does: an unknown next event has no rank, and special tokens are not ranked."""
    scores = scores.copy()
    scores[:, [EOS, UNK]] = -np.inf
    choices = [np.array([event for event in rest if event != UNK and rest[0] != UNK], np.int64) for rest in rests]
    return judged_of(scores, np.array([rest[0] for rest in rests]), choices)


def test_the_metrics_equal_their_definitions() -> None:
    count, missed = 200, 50
    scores, rests, sessions, counts = positions(count)
    assert 0 < sum(rest[0] == UNK for rest in rests) < count
    found = Scorer(sessions, counts, SIZE - 2, missed / (count + missed)).metrics(judged(scores, rests))
    definition = expected(scores.tolist(), rests, missed)
    assert found.recall == pytest.approx(definition["recall"])
    assert found.mrr == pytest.approx(definition["mrr"])
    assert found.ndcg == pytest.approx(definition["ndcg"])
    assert found.hit_rate == pytest.approx(definition["hit"])
    assert all(found.hit_rate[k] > found.recall[k] for k in CUTOFFS[:3])
    for k in CUTOFFS:
        lists = [ranking(row)[:k] for row in scores.tolist()]
        assert found.coverage[k] == len({event for top in lists for event in top}) / (SIZE - 2)
        shares = [counts[event] / counts.max() for top in lists for event in top]
        assert found.popularity[k] == pytest.approx(float(np.mean(shares)))


def test_the_metrics_equal_those_of_trec_eval() -> None:
    """trec_eval orders equal scores by name, so the scores differ here. Its ideal DCG is 1 for one relevant event."""
    random, size, count = np.random.default_rng(2), 60, 150
    scores = random.permuted(np.tile(np.arange(size, dtype=float), (count, 1)), axis=1)
    rests = [random.integers(2, size, 1).tolist() for _ in range(count)]
    found = Scorer(np.arange(count), np.ones(size), size - 2, 0.0).metrics(judged(scores, rests))
    wanted = {str(row): {str(rest[0]): 1} for row, rest in enumerate(rests)}
    measures = {f"{name}.{','.join(map(str, CUTOFFS))}" for name in ("recall", "ndcg_cut", "success")}
    oracle = pytrec_eval.RelevanceEvaluator(wanted, measures)
    run = {str(row): {str(event): own[event] for event in range(2, size)} for row, own in enumerate(scores.tolist())}
    by_position = oracle.evaluate(run).values()
    for k in CUTOFFS:
        assert found.recall[k] == pytest.approx(np.mean([values[f"recall_{k}"] for values in by_position]))
        assert found.ndcg[k] == pytest.approx(np.mean([values[f"ndcg_cut_{k}"] for values in by_position]))
        assert found.hit_rate[k] == pytest.approx(np.mean([values[f"success_{k}"] for values in by_position]))
        cut = {row: dict(sorted(own.items(), key=lambda pair: -pair[1])[:k]) for row, own in run.items()}
        ranks = pytrec_eval.RelevanceEvaluator(wanted, {"recip_rank"}).evaluate(cut).values()
        assert found.mrr[k] == pytest.approx(np.mean([values["recip_rank"] for values in ranks]))


def test_intervals_contain_the_mean_of_new_samples_as_often_as_they_say() -> None:
    """The gains of a session are equal, so an interval that took positions for independent would be too short."""
    random, inside, rounds = np.random.default_rng(3), 0, 60
    for _ in range(rounds):
        found = random.random(40) < 0.3
        hits = np.repeat(found, 5)
        ranks = np.where(hits, 1, UNRANKED)
        one = Judged(ranks, ranks, np.full((200, 20), -1))
        low, high = Scorer(np.repeat(np.arange(40), 5), np.ones(3), 3, 0.0).metrics(one).intervals["recall"][1]
        inside += low <= 0.3 <= high
    assert 0.85 * rounds <= inside <= rounds


def test_a_paired_test_tells_methods_apart_only_if_they_differ() -> None:
    random = np.random.default_rng(4)
    scorer = Scorer(np.arange(300), np.ones(3), 3, 0.0)

    def method(share: float) -> Judged:
        ranks = np.where(random.random(300) < share, 1, UNRANKED)
        return Judged(ranks, ranks, np.full((300, 20), -1))

    good, bad = method(0.6), method(0.4)
    worse = scorer.test(bad, good)["recall"][1]
    assert worse.difference == pytest.approx(good.gains()[:, 0].mean() * -1 + bad.gains()[:, 0].mean())
    assert worse.p < 0.01
    assert scorer.test(good, good)["recall"][1] == Difference(difference=0, p=1)
    assert np.median([scorer.test(method(0.5), method(0.5))["recall"][1].p for _ in range(20)]) > 0.1


def test_equal_scores_are_ranked_by_id_and_special_tokens_have_no_rank() -> None:
    scores = np.array([[-np.inf, -np.inf, 1.0, 1.0, 1.0]] * 3)
    assert ranks_of(scores, np.array([2, 3, 4])).tolist() == [1, 2, 3]
    assert ranks_of(scores, np.array([0, 1, 4])).tolist() == [UNRANKED, UNRANKED, 3]
    assert first_of(scores)[0].tolist() == [2, 3, 4] + [-1] * 17


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


def rule_counts(lists: list[list[int]]) -> tuple[Counter[tuple[int, int]], dict[tuple[int, int], float]]:
    """Returns the numbers of association rules and of sequential rules by pair, as session-rec counts them: event after
    event, with all earlier events of the session, or with the last ten by 1 / distance."""
    together: Counter[tuple[int, int]] = Counter()
    after: dict[tuple[int, int], float] = defaultdict(float)
    for events in lists:
        for at, event in enumerate(events):
            for back, earlier in enumerate(reversed(events[:at]), start=1):
                together[event, earlier] += 1
                together[earlier, event] += 1
                if back <= 10:
                    after[earlier, event] += 1 / back
    return together, after


@pytest.mark.parametrize("most", [20, 3])
def test_rules_and_item_to_item_equal_their_definitions(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr("wane.training.rankings.baselines.RULES", most)
    monkeypatch.setattr("wane.training.rankings.baselines.SIMILAR", most)
    monkeypatch.setattr("wane.training.rankings.baselines.PAIRS_AT_ONCE", 50)
    sessions, lists = train()
    counts = Counter(event for events in lists for event in events)
    together, after = rule_counts(lists)
    similar = {
        (first, second): number / math.sqrt((counts[first] + 20) * (counts[second] + 20))
        for (first, second), number in together.items()
        if first != second
    }
    found = baselines_of(sessions, SIZE)
    for name, table in (("association rules", together), ("sequential rules", after), ("item to item", similar)):
        scores = found[name].scores([np.array(query) for query in QUERIES])
        for row, query in enumerate(QUERIES):
            values = {event: round(table.get((query[-1], event), 0), 9) for event in range(2, SIZE)}
            order = sorted(values, key=lambda event: (-values[event], -counts[event], event))
            kept = [event for event in order if values[event]][:most]
            rest = sorted(set(order) - set(kept), key=lambda event: (-counts[event], event))
            assert ranking(scores[row].tolist())[: len(kept)] == kept, name
            assert ranking(scores[row].tolist())[len(kept) :] == rest, name


def vsknn(
    lists: list[list[int]], query: list[int], recent: int, neighbours: int, by_age: Callable[[int], float]
) -> list[float]:
    """Returns the scores of V-SkNN, computed as the paper describes them. recent, neighbours: m and k of the paper.
    by_age: the factor of a neighbour, by the number of events since the last common one."""
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
            scores[event] += similarity[index] * by_age(back)
    return scores


@pytest.mark.parametrize(("recent", "neighbours"), [(1000, 100), (1000, 7), (20, 100), (9, 4)])
def test_nearest_sessions_are_as_described(recent: int, neighbours: int) -> None:
    sessions, lists = train()
    queries = [np.array(query) for query in QUERIES]
    plain = Vsknn(sessions, SIZE, recent, neighbours).scores(queries)
    indexed = Vmis(sessions, SIZE, recent, neighbours, last=3).scores(queries)
    counts = Counter(event for events in lists for event in events)
    for row, query in enumerate(QUERIES):
        assert plain[row].tolist() == pytest.approx(vsknn(lists, query, recent, neighbours, lambda back: 1 / back))
        scores = vsknn(lists, query[-3:], recent, neighbours, lambda back: 1 - back / 10)
        assert indexed[row][2:].tolist() == pytest.approx(
            [scores[event] * math.log(counts.total() / max(1, counts[event])) for event in range(2, SIZE)]
        )


def test_vsknn_prefers_the_later_of_equally_similar_sessions() -> None:
    query = np.arange(2, 12)  # the weights are 0.1, 0.2, ...; in floating point, 0.1 + 0.2 is larger than 0.3
    train = np.array([EOS, 2, 3, 12, EOS, 4, 13, EOS])
    scores = Vsknn(Sessions(train, EOS, "token"), SIZE, neighbours=1).scores([query])[0]
    assert scores[12] == 0 < scores[13]
