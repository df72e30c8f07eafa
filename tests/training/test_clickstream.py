"""Compares the generator `examples/clickstream.py` with probabilities that are computed for one click at a time."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from examples.clickstream import Clicks, Shop, generate, main, optimum
from wane.training.events import read_log

SMALL = Shop(aisles=3, items=4, popular=6)


def following(shop: Shop, seen: list[int]) -> dict[int, float]:
    """Returns the probability of each item as the next click after the clicks `seen`, computed from the parameters of
    the shop."""
    of_aisles = shop.aisles * shop.items
    away = shop.stay if seen[-1] >= of_aisles else shop.leave
    here = next(item for item in reversed(seen) if item < of_aisles)
    aisle, place = divmod(here, shop.items)
    found = dict.fromkeys(range(of_aisles + shop.popular), 0.0)
    for other in range(shop.items):
        found[aisle * shop.items + other] += (1 - away) * (1 - shop.follow) / shop.items
    found[aisle * shop.items + (place + 1) % shop.items] += (1 - away) * shop.follow
    total = sum(1 / rank for rank in range(1, shop.popular + 1))
    for rank in range(1, shop.popular + 1):
        found[of_aisles + rank - 1] += away / rank / total
    assert sum(found.values()) == pytest.approx(1)
    return found


def sessions(clicks: Clicks) -> list[list[int]]:
    return [part.tolist() for part in np.split(clicks.items, clicks.begins[1:-1])]


@pytest.mark.parametrize("shop", [SMALL, Shop(aisles=3, items=4, popular=6, leave=0.0)], ids=["long", "short"])
def test_the_optimum_is_that_of_the_true_probabilities(shop: Shop) -> None:
    clicks = generate(shop, 300, 7)
    recall, nats, positions = dict.fromkeys((1, 3, 5), 0.0), 0.0, 0
    for items in sessions(clicks):
        assert len(items) >= 2
        nats -= math.log(1 / (shop.aisles * shop.items)) + math.log(shop.stop)
        nats -= (len(items) - 2) * math.log(1 - shop.stop)
        for at in range(1, len(items)):
            found = following(shop, items[:at])
            own = found[items[at]]
            nats -= math.log(own)
            positions += 1
            higher = sum(value > own * (1 + 1e-9) for value in found.values())
            tied = sum(math.isclose(value, own, rel_tol=1e-9) for value in found.values())
            for k in recall:
                recall[k] += min(1.0, max(0.0, (k - higher) / tied))
    best = optimum(shop, clicks, (1, 3, 5))
    assert best.recall == pytest.approx({k: hits / positions for k, hits in recall.items()})
    assert best.perplexity == pytest.approx(math.exp(nats / (len(clicks.items) + 300)))


def test_the_clicks_have_the_described_frequencies() -> None:
    clicks = generate(SMALL, 4000, 2)
    of_aisles = SMALL.aisles * SMALL.items
    counts = np.zeros((2, 2))
    for items in sessions(clicks):
        for last, item in pairwise(items):
            counts[int(last >= of_aisles), int(item >= of_aisles)] += 1
    shares = counts[:, 1] / counts.sum(1)
    assert shares == pytest.approx([SMALL.leave, SMALL.stay], abs=0.02)
    assert np.diff(clicks.begins).mean() == pytest.approx(1 + 1 / SMALL.stop, abs=0.5)


def test_both_files_hold_the_same_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path), "--sessions", "200", "--aisles", "3", "--items", "4", "--popular", "6"])
    printed = capsys.readouterr().out
    assert "200 sessions, 18 items" in printed
    assert "best possible on the last 5% of the sessions: recall@1 0." in printed
    lines = [json.loads(line) for line in (tmp_path / "sessions.jsonl").read_text().splitlines()]
    log = read_log([tmp_path / "clicks.csv"])
    grouped = [[log.names[event] for event in part] for part in np.split(log.events, log.begins[1:-1])]
    assert sorted(lines) == sorted(grouped)
    shared = sum(one == other for one, other in zip(lines, grouped, strict=True))
    assert shared >= 195  # sessions that end in the same millisecond may change places
