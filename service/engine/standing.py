"""How a store of sessions is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Standing:
    """How a store is: `memory` or `redis`, whether it can be reached, and whether requests to sessions can be answered.
    `not_durable`: how many sessions have tokens that only this process has, though others share the store."""

    kind: str
    reachable: bool = True
    ready: bool = True
    not_durable: int = 0
