"""The live accuracy of a served model of events equals a count of the answers that a client got."""

from __future__ import annotations

import re
import urllib.request
from random import Random

import pytest

from tests.service.live_server import live_server, run
from wane.client import Wane

K = 5


def test_live_accuracy_of_a_served_shop() -> None:
    random, ranks = Random(2), list[int]()
    with live_server("--live-accuracy", str(K), WANE_BUNDLES="models/bundles/shop") as server:
        with Wane(server.url) as client:
            for number in range(25):
                aisle = random.randrange(1, 9)
                with client.session(f"visit-{number}", model="shop") as session:
                    listed: list[str] = []
                    for _ in range(random.randrange(2, 7)):
                        event = f"aisle-{aisle}/{random.randrange(1, 13)}"
                        if listed:
                            ranks.append(listed.index(event) + 1 if event in listed else 0)
                        answer = session.append([event], top_k=20, exclude_seen=bool(number % 2))
                        listed = [one.token for one in answer.predictions[:K]]
            (model,) = (one for one in client.report().document["models"] if one["model"] == "shop")
        shown = run("report", server.url)
        with urllib.request.urlopen(f"{server.url}/metrics") as response:
            metrics = response.read().decode()
    hits = [rank for rank in ranks if rank]
    assert 0 < len(hits) < len(ranks)
    expected = {
        "judged": len(ranks),
        "hits": len(hits),
        "reciprocal_ranks": pytest.approx(sum(1 / rank for rank in hits)),
        "recall": pytest.approx(len(hits) / len(ranks)),
        "mrr": pytest.approx(sum(1 / rank for rank in hits) / len(ranks)),
        "unjudged": 0,
    }
    assert model["live_accuracy"] == {"k": K, "since_start": expected, "recent": expected}
    line = next(line for line in shown.stdout.splitlines() if "since the start" in line and "shop" in line)
    assert line.split()[-4:] == [
        str(len(ranks)),
        f"{len(hits) / len(ranks):.4f}",
        f"{sum(1 / rank for rank in hits) / len(ranks):.4f}",
        "0",
    ]
    assert re.search(r'^wane_live_judged_total\{model="shop",version="[^"]+"\} \d', metrics, re.MULTILINE)
