"""Tests that the server refuses each hostile request of the soak benchmark with the expected status and reason."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.soak.attacks import Attack, Bomb, Target, bombs, bombs_of, garbage, malformed, paths
from tests.service.live_server import LiveServer


@pytest.mark.parametrize("attack", [garbage, paths, malformed, bombs], ids=lambda attack: attack.__name__)
async def test_an_attack_is_answered_as_expected(live: LiveServer, attack: Attack) -> None:
    target = Target(httpx.URL(live.url).port or 80, None, 2**22, 2048, list)
    refused = [one async for one in attack(target)]
    assert refused and [one for one in refused if one.answer not in one.right] == []


@pytest.mark.parametrize("bomb", [*bombs_of(2048)], ids=lambda bomb: bomb.of)
def test_a_bomb_is_refused_with_its_reason(http: httpx.Client, bomb: Bomb) -> None:
    refused = http.post(bomb.path, json=bomb.body)
    assert str(refused.status_code) == bomb.right
    assert bomb.of in refused.json()["detail"]
