"""Spreads work that holds the event loop over several of its turns.

The requests of one batch are answered in one turn of the event loop. If each answer takes milliseconds, other sessions
would wait for all of them.
"""

from __future__ import annotations

import asyncio

HEAVY_TOKENS = 4096
"""The least number of tokens in a vocabulary, or of events in a filter, whose processing takes a turn of its own."""


class Turns:
    """Gives each caller a turn of the event loop of its own."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, tokens: int) -> None:
        """Returns at once if the caller's work is for less than HEAVY_TOKENS tokens. Otherwise returns in a turn in
        which no other caller's work begins."""
        if tokens >= HEAVY_TOKENS:
            async with self._lock:
                await asyncio.sleep(0)
