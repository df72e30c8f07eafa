"""Takes the pictures of the console in docs/figures/: each panel, light and dark, 1100 and 390 pixels wide.

It starts the server with the shipped models, and needs the Debian package `chromium`, and `playwright` and `pillow`.
While it waits for the panel Live, it sends requests, so that there is something to see.

    python -m docs.console_pictures
"""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import httpx
from PIL import Image
from playwright.async_api import Browser, Page, async_playwright

FIGURES = Path(__file__).parent / "figures"
READY = {"playground": "#fact-bound", "forgetting": "#measure", "models": ".version", "live": ".tile"}
WIDTHS, THEMES = (1100, 390), ("light", "dark")
LIVE_S = 60
"""The time for which the panel Live is watched."""
COLOURS = 64
TIMEOUT_MS = 120_000
TEXT = "The railway reached the town in 1871"


async def main() -> None:
    """Starts a server, and writes the pictures."""
    program = (sys.executable, "-m", "wane", "serve", "--port", "0", "--log-level", "info")
    server = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.PIPE)
    try:
        url = await ready(server)
        log = asyncio.create_task(drain(server))  # a server whose log nobody reads waits
        async with async_playwright() as driver:
            browser = await driver.chromium.launch(executable_path=shutil.which("chromium"))
            for panel in READY:
                traffic = asyncio.create_task(ask(url)) if panel == "live" else None
                pages = [await opened(browser, url, panel, width, theme) for width in WIDTHS for theme in THEMES]
                if traffic is not None:
                    await asyncio.sleep(LIVE_S)
                for page, name in pages:
                    await take(page, name)
                if traffic is not None:
                    traffic.cancel()
                    with suppress(asyncio.CancelledError):
                        await traffic
            await browser.close()
    finally:
        server.terminate()
        await server.wait()
    await log


async def drain(server: asyncio.subprocess.Process) -> None:
    """Reads the server's log until it ends."""
    assert server.stderr is not None
    async for _ in server.stderr:
        pass


async def ready(server: asyncio.subprocess.Process) -> str:
    """Returns the server's URL, after every model was loaded."""
    assert server.stderr is not None
    async for line in server.stderr:
        if b'"url":"' in line:
            url = line.split(b'"url":"')[1].split(b'"')[0].decode()
        if b'"message":"ready"' in line:
            return url
    raise RuntimeError("the server ended before it was ready")


async def opened(browser: Browser, url: str, panel: str, width: int, theme: str) -> tuple[Page, str]:
    """Returns a page of the panel that has its numbers, and the picture's name."""
    page = await browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme="dark" if theme == "dark" else "light",
        reduced_motion="reduce",
    )
    await page.goto(f"{url}/#{panel}")
    await page.wait_for_selector(READY[panel], timeout=TIMEOUT_MS)
    if panel == "playground":  # the first step of a session runs the whole text; show the latency of one token
        await page.locator("#text").press_sequentially(" today", timeout=TIMEOUT_MS)
        await page.wait_for_selector('.output[aria-busy="false"]', timeout=TIMEOUT_MS)
        await page.evaluate("() => document.activeElement.blur()")
    return page, f"console-{panel}-{width}-{theme}.png"


async def take(page: Page, name: str) -> None:
    """Writes a picture of the whole page with few colours, and closes the page."""
    taken = Image.open(BytesIO(await page.screenshot(full_page=True))).convert("RGB")
    counted = taken.getcolors(taken.width * taken.height)
    assert counted is not None
    most = [colour for _, colour in sorted(counted, reverse=True)[:COLOURS]]
    palette = Image.new("P", (1, 1))
    palette.putpalette([channel for colour in most for channel in colour])
    taken.quantize(palette=palette, dither=Image.Dither.NONE).save(FIGURES / name, optimize=True)
    await page.close()


async def ask(url: str) -> None:
    """Sends steps of some sessions and predictions by windows, until it is cancelled."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        while True:
            calls = [
                client.post(f"/v1/sessions/picture-{one}/tokens", json={"input": TEXT, "create": True})
                for one in range(4)
            ]
            calls.append(client.post("/v1/predict", json={"input": TEXT * 9, "mode": "window", "window": 64}))
            for answer in await asyncio.gather(*calls):
                answer.raise_for_status()
            await asyncio.sleep(0.1)


if __name__ == "__main__":
    asyncio.run(main())
