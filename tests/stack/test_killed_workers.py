"""Tests that no token is lost or duplicated when the workers of a server are killed under load. Their sessions are in
Redis."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.service.live_server import live_server
from tests.service.sessions.stores.redis_server import redis_server
from tests.service.workers.test_workers import WORKERS, workers_of
from tests.stack.conftest import BUNDLE, SESSION_HISTORY_TOKENS, STORE_TIMEOUT, Figures
from tests.stack.harness.load_generator import failures, histories, open_clients, stepped, stepping
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 40
RATE = 1.25


async def test_sessions_continue_while_workers_are_killed_one_after_another(tmp_path: Path, figures: Figures) -> None:
    with redis_server(tmp_path / "redis") as redis:
        variables = {"WANE_BUNDLES": str(BUNDLE), "WANE_STORE": redis.url, **STORE_TIMEOUT}
        with live_server("--workers", str(WORKERS), **variables) as server:
            port = int(server.url.rpartition(":")[2])
            async with open_clients(port, [40] * SESSIONS) as clients:
                async with stepping(clients, RATE):
                    for victim in range(WORKERS):
                        await stepped(clients)
                        os.kill(workers_of(server)[victim], signal.SIGKILL)
                        said = f"worker {victim} has ended with status -9, and is started again"
                        await asyncio.to_thread(server.read_until, said)
                        await stepped(clients)
                wrong = [*failures(clients), *await histories(clients, redis.url, SESSION_HISTORY_TOKENS)]
    compared = await asyncio.to_thread(
        ReferenceRun(BUNDLE).compare, [(client.tokens, client.answers) for client in clients]
    )
    figures(
        steps=sum(len(client.timed) for client in clients),
        repeated_by_clients=sum(client.repeated for client in clients),
        compared=compared,
    )
    assert wrong == []
    assert compared.broken == ()
    assert compared.rebuilt > 0
