"""Fixtures for the whole topology (replicas, HAProxy and Redis). The topology uses the files that docker-compose.yml
mounts, and serves one certified model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from deploy.stack.local import ROOT
from deploy.stack.stack import ENTRANCE, Stack, replicas
from tests.service.sessions.stores.redis_server import program
from wane.models.bundle import Bundle
from wane.service.settings import Settings

MODEL = "gated-stable"
BUNDLE = ROOT / "models" / "bundles" / MODEL
SESSION_HISTORY_TOKENS = max(Settings().session_history_tokens, Bundle.open(BUNDLE).manifest.max_window)
"""How many of a session's last tokens the replicas store."""

STORE_TIMEOUT = {"WANE_STORE_TIMEOUT_MS": "10000"}
"""With the default timeout of a Redis command, replicas would answer 503 when the machine is busy with other tests."""

Variables = Mapping[str, str]
MakeStack = Callable[..., Stack]
Figures = Callable[..., None]
FIGURES = pytest.StashKey[list[str]]()


@pytest.fixture
def make_stack(tmp_path: Path) -> Iterator[MakeStack]:
    """Returns a function that creates a stack on free ports, without starting it. The fixture kills the stack at the
    end of the test. Arguments of the function: `settings` are the environment variables of every replica, by name.
    `own` maps the name of a replica to additional variables of this replica. `balance` is HAProxy's balancing
    algorithm. If `whole` is true, the stack also has API keys and Prometheus."""
    program("redis-server")
    program("haproxy")
    with ExitStack() as made:

        def make(
            settings: Variables | None = None,
            own: Mapping[str, Variables] | None = None,
            balance: str | None = None,
            *,
            whole: bool = False,
        ) -> Stack:
            every = {"WANE_BUNDLES": str(BUNDLE), **STORE_TIMEOUT, **(settings or {})}
            variables = {name: {**every, **(own or {}).get(name, {})} for name in replicas()}
            if balance is not None:
                variables[ENTRANCE] = {"BALANCE": balance}
            stack = Stack(tmp_path / "stack", variables=variables, whole=whole)
            made.callback(stack.kill)
            return stack

        yield make


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Figures:
    """Returns a function that records the figures that a test has measured. The summary at the end of pytest's output
    shows them, whether the test has passed or failed."""

    def figures(**measured: object) -> None:
        shown = [f"{name} {round(value, 4) if isinstance(value, float) else value}" for name, value in measured.items()]
        request.config.stash.setdefault(FIGURES, []).append(f"{request.node.name}: {', '.join(shown)}")

    return figures


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints the recorded figures."""
    for line in config.stash.get(FIGURES, []):
        terminalreporter.write_line(line)
