"""Tests of replicas that load a new version of a model one after another while sessions are in use. No request fails.
Every session continues on the new version from its stored tokens. Each answer is correct for the version that it names.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from tests.models.bundles import edit_manifest
from tests.stack.conftest import BUNDLE, MODEL, SESSION_HISTORY_TOKENS, Figures, MakeStack
from tests.stack.harness.connection import Connection
from tests.stack.harness.load_generator import failures, histories, longest_gap_s, open_clients, stepped, stepping
from tests.stack.harness.reference_run import ReferenceRun

pytestmark = [pytest.mark.stack, pytest.mark.slow]

SESSIONS = 60
LONG = 6
RATE = 1.0
OTHER = BUNDLE.with_name("rnn-stable")
"""A bundle of the same vocabulary as BUNDLE."""


def next_version(folder: Path) -> Path:
    """Writes a copy of the bundle OTHER that has BUNDLE's name and the next version. Returns its path."""
    path = shutil.copytree(OTHER, folder / MODEL)
    edit_manifest(path, "name", value=MODEL)
    edit_manifest(path, "version", value="3")
    return path


async def test_no_request_fails_while_each_replica_loads_a_new_version(
    make_stack: MakeStack, figures: Figures, tmp_path: Path
) -> None:
    served = shutil.copytree(BUNDLE, tmp_path / "bundles" / MODEL)
    coming = next_version(tmp_path / "coming")
    stack = make_stack({"WANE_BUNDLES": str(served.parent)})
    await asyncio.to_thread(stack.start)
    first = [SESSION_HISTORY_TOKENS + 88 if number < LONG else 40 for number in range(SESSIONS)]
    async with open_clients(stack.port, first, retries=False) as clients:
        async with stepping(clients, RATE):
            await stepped(clients)
            old = served.rename(tmp_path / "old")
            coming.rename(served)
            for replica in stack.replicas:
                asking = Connection(replica.port)
                reply = await asking.ask("POST", f"/v2/repository/models/{MODEL}/load")
                asking.close()
                assert reply.status == 200 and reply.document["version"] == "3", reply
            await stepped(clients, 2)
        assert failures(clients) == []
        assert await histories(clients, stack.store, SESSION_HISTORY_TOKENS) == []

    for client in clients:
        versions = [client.answers[position]["model_version"] for position in sorted(client.answers)]
        assert versions == sorted(versions), "a session returned to the old version"
        rebuilt = [one for one in client.answers.values() if one["state"] == "rebuilt"]
        assert len(rebuilt) <= 1, "a session was rebuilt more than once for one new version"
    for version, bundle in (("2", old), ("3", served)):
        answers = [
            {position: answer for position, answer in client.answers.items() if answer["model_version"] == version}
            for client in clients
        ]
        compared = await asyncio.to_thread(
            ReferenceRun(bundle).compare,
            [(client.tokens, given) for client, given in zip(clients, answers, strict=True)],
        )
        figures(version=version, longest_gap_s=longest_gap_s(clients), compared=compared)
        assert compared.answers >= SESSIONS
        assert compared.broken == ()
