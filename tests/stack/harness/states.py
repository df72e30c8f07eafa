"""The states that HAProxy shows for its servers."""

from __future__ import annotations

import asyncio

import httpx

WAIT_S = 120.0
ASK_EVERY_S = 0.05


async def until(operations: int, **states: str) -> None:
    """Waits until HAProxy's status page, at the port `operations`, shows these states of its servers, such as
    `wane_1="UP"`."""
    wanted = {name.replace("_", "-"): state for name, state in states.items()}
    url = f"http://127.0.0.1:{operations}"
    async with asyncio.timeout(WAIT_S), httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
        while True:
            rows = [line.split(",") for line in (await client.get("/;csv")).text.splitlines()]
            found = {row[1]: row[17] for row in rows if row[0] == "replicas"}
            if all(found[name].startswith(state) for name, state in wanted.items()):
                return
            await asyncio.sleep(ASK_EVERY_S)
