"""Records docs/figures/console.gif: a shop's session is clicked through in the console while its server is killed.

The server really gets SIGKILL, and is started again on its port. The script needs a bundle of the model `shop`
(docs/tutorial.md exports it), the Debian package `chromium`, and `playwright` and `pillow`.

    python -m docs.console_recording runs/bundles
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from time import monotonic
from urllib.parse import quote

from PIL import Image, ImageDraw, ImageFont
from playwright.async_api import Page, ViewportSize, async_playwright

from docs.console_pictures import FIGURES, TIMEOUT_MS, drain, ready

SIZE: ViewportSize = {"width": 920, "height": 566}
SCROLL = 136
"""The panel's introduction is scrolled out of sight by this number of pixels."""
BAR, TEXT_SIZE = 40, 17
COLOURS = 48
FRAME_MS = 200
MOST_MS, MOST_BYTES = 15_000, 1_000_000
RING, RING_FRAMES = 14, 2
EVENTS = ("aisle-3/4", "popular/0")
WINDOW = 2
CLICK_S, READ_S, END_S = 0.7, 1.4, 1.8


@dataclass
class Film:
    """The frames of a page so far, with their times, the caption, and the place of the last click."""

    page: Page
    caption: str = ""
    frames: list[Image.Image] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    ring: tuple[float, float] | None = None
    ring_left: int = 0

    async def record(self) -> None:
        """Takes a frame every FRAME_MS, until it is cancelled."""
        while True:
            began = monotonic()
            taken = Image.open(BytesIO(await self.page.screenshot())).convert("RGB")
            self.frames.append(self._framed(taken))
            self.times.append(began)
            await asyncio.sleep(max(0.0, began + FRAME_MS / 1000 - monotonic()))

    def _framed(self, taken: Image.Image) -> Image.Image:
        """Returns the picture with the ring of a click, and with the caption below it."""
        if self.ring_left:
            assert self.ring is not None
            (x, y), self.ring_left = self.ring, self.ring_left - 1
            ImageDraw.Draw(taken).ellipse((x - RING, y - RING, x + RING, y + RING), outline="#d1242f", width=4)
        width, height = taken.size
        framed = Image.new("RGB", (width, height + BAR), "#1b1f24")
        framed.paste(taken, (0, 0))
        draw = ImageDraw.Draw(framed)
        draw.text((16, height + BAR // 2), self.caption, "white", ImageFont.load_default(TEXT_SIZE), anchor="lm")
        return framed

    async def click(self, row: int) -> None:
        """Clicks on a prediction of the recurrent column, and keeps the picture for a moment."""
        button = self.page.locator(".column.recurrent .prediction").nth(row)
        box = await button.bounding_box()
        assert box is not None
        self.ring, self.ring_left = (box["x"] + box["width"] / 3, box["y"] + box["height"] / 2), RING_FRAMES
        await asyncio.sleep(2 * FRAME_MS / 1000)
        await button.click()
        await asyncio.sleep(CLICK_S)

    def write(self, path: Path) -> None:
        """Writes the frames with one palette. Equal frames become one. Raises ValueError if the film is too long or its
        file too large."""
        ends = [*self.times[1:], self.times[-1] + END_S]
        palette = self.frames[len(self.frames) // 2].quantize(COLOURS)
        kept: list[Image.Image] = []
        durations: list[int] = []
        for frame, begin, end in zip(self.frames, self.times, ends, strict=True):
            few = frame.quantize(palette=palette, dither=Image.Dither.NONE)
            lasts = round((end - begin) * 100) * 10
            if kept and kept[-1].tobytes() == few.tobytes():
                durations[-1] += lasts
            else:
                kept.append(few)
                durations.append(lasts)
        if sum(durations) > MOST_MS:
            raise ValueError(f"the recording lasts {sum(durations)} ms; at most {MOST_MS} are allowed")
        buffer = BytesIO()
        kept[0].save(buffer, "GIF", save_all=True, append_images=kept[1:], duration=durations, loop=0, optimize=True)
        if len(buffer.getvalue()) > MOST_BYTES:
            raise ValueError(f"the recording has {len(buffer.getvalue())} bytes; at most {MOST_BYTES} are allowed")
        path.write_bytes(buffer.getvalue())


@asynccontextmanager
async def serving(bundles: str, port: str) -> AsyncIterator[str]:
    """Yields the URL of a server, after its models were loaded. Kills the server after the block."""
    program = (sys.executable, "-m", "wane", "serve", "--bundles", bundles, "--port", port, "--log-level", "info")
    server = await asyncio.create_subprocess_exec(*program, stderr=asyncio.subprocess.PIPE)
    try:
        url = await ready(server)
        log = asyncio.create_task(drain(server))
        yield url
    finally:
        server.kill()
        await server.wait()
    await log


async def main(arguments: Sequence[str]) -> None:
    """Starts a server, records, and writes the recording."""
    if len(arguments) != 1:
        raise SystemExit("usage: python -m docs.console_recording BUNDLES")
    (bundles,) = arguments
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=shutil.which("chromium"))
        page = await browser.new_page(viewport=SIZE, color_scheme="light", reduced_motion="reduce")
        page.set_default_timeout(TIMEOUT_MS)
        film = Film(page)
        async with serving(bundles, "0") as url:
            await page.goto(f"{url}/#playground?model=shop&k={WINDOW}&events={quote(json.dumps(EVENTS))}")
            await page.wait_for_selector("#fact-bound")
            await page.evaluate(f"() => scrollTo(0, {SCROLL})")
            film.caption = "A click sends one event. The server keeps the state of the session."
            recording = asyncio.create_task(film.record())
            await asyncio.sleep(READ_S)
            await film.click(0)
            await film.click(1)
            film.caption = "kill -9: the server and all its states are gone."
        await asyncio.sleep(CLICK_S)
        await film.click(0)
        film.caption = "The page keeps what was clicked meanwhile. The server is started again ..."
        async with serving(bundles, url.rsplit(":", 1)[1]):
            await page.wait_for_selector("text=its own bound: 0 (exact)")
            film.caption = "The session goes on from its clicks: nothing is lost, and the state is exact."
            await asyncio.sleep(READ_S)
            await film.click(0)
            recording.cancel()
            await asyncio.wait([recording])
        await browser.close()
    film.write(FIGURES / "console.gif")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
