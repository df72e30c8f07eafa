"""The releases of uvicorn and websockets with which the protocol classes of this folder were tested.

The classes override methods that any new release of uvicorn or websockets may change. With an untested release the
server runs on uvicorn's own classes (`service/server.py`).
"""

from __future__ import annotations

from importlib.metadata import version

TESTED = {"uvicorn": "0.54.0", "websockets": "17.4"}
"""The tested release of each distribution. `pyproject.toml` allows only these releases."""

NOT_IN_FORCE = ("max_connections", "max_header_bytes", "header_timeout_s", "send_timeout_s", "receive_budget_bytes")
"""Settings that have no effect with uvicorn's own classes. `body_timeout_s` then has an effect on bodies that a route
reads, but not on WebSocket messages."""


def untested_releases() -> list[str]:
    """Returns the installed releases that were not tested, for example `uvicorn 0.53.0`."""
    installed = {name: version(name) for name in TESTED}
    return [f"{name} {installed[name]}" for name in TESTED if installed[name] != TESTED[name]]
