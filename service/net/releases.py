"""The releases of uvicorn and websockets that the protocol classes of this folder were tested with.

The classes override methods that any release of the two libraries may change. With any other release the server runs on
uvicorn's own classes (`service/server.py`).
"""

from __future__ import annotations

from importlib.metadata import version

TESTED = {"uvicorn": "0.54.0", "websockets": "17.4"}
"""By distribution; `pyproject.toml` allows only these."""

NOT_IN_FORCE = ("max_connections", "max_header_bytes", "header_timeout_s", "send_timeout_s", "receive_budget_bytes")
"""Settings that uvicorn's own classes do not enforce. They enforce `body_timeout_s` for bodies that a route reads, but
not for WebSocket messages."""


def untested_releases() -> list[str]:
    """Returns the installed releases that were not tested, like `uvicorn 0.53.0`."""
    installed = {name: version(name) for name in TESTED}
    return [f"{name} {installed[name]}" for name in TESTED if installed[name] != TESTED[name]]
