"""What hostile clients send in the soak is refused as it is, and for what it is sent for."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.soak.attacks import Attack, Bomb, Target, bombs, bombs_of, garbage, malformed, paths
from tests.service.live_server import LiveServer


@pytest.mark.parametrize("attack", [garbage, paths, malformed, bombs], ids=lambda attack: attack.__name__)
async def test_an_attack_is_told_what_it_must_be(live: LiveServer, attack: Attack) -> None:
    target = Target(httpx.URL(live.url).port or 80, None, 2**22, 2048, list)
    told = [one async for one in attack(target)]
    assert told and [one for one in told if one.answer not in one.right] == []


@pytest.mark.parametrize("bomb", [*bombs_of(2048)], ids=lambda bomb: bomb.of)
def test_a_bomb_is_refused_for_what_it_would_cost(http: httpx.Client, bomb: Bomb) -> None:
    refused = http.post(bomb.path, json=bomb.body)
    assert str(refused.status_code) == bomb.right
    assert bomb.of in refused.json()["detail"]
