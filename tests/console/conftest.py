"""The console in a headless Chromium, of the Debian package `chromium`, against the real server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.clients.alone import import_client
from tests.service.live_server import TIMEOUT_S, LiveServer, live_server
from tests.service.sessions.stores.redis_server import program
from tests.service.versions import make_eventful, put

SHOP, TEXT = "shop", "text"
HOSTILE = (
    "<img src=x onerror=alert(1)>",
    "<script>document.title='owned'</script>",
    '"><b onmouseover=alert(2)>bold</b>',
    "${alert(3)} `tick` & &lt;",
    "javascript:alert(4)",
)
"""Names of events that a page could mistake for markup or for code."""
KEY = "alice-0123456789abcdefgh"
WAIT_MS = 60_000
NETWORK = re.compile(r"Failed to load resource|WebSocket connection to .* failed")
"""Messages that Chromium itself writes for an answer of 400 or more, and for a connection that fails."""

Document = dict[str, Any]


@pytest.fixture(scope="package")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of text, and with a model of events whose names are hostile."""
    folder = tmp_path_factory.mktemp("console") / "bundles"
    folder.mkdir()
    put(folder, "2", name=TEXT)
    building = put(folder.parent, "1", name=SHOP)
    make_eventful(building, HOSTILE)
    building.rename(folder / SHOP)
    return folder


@pytest.fixture(scope="package")
def server(bundles: Path) -> Iterator[LiveServer]:
    with live_server("--bundles", str(bundles), "--default-model", TEXT) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = program("chromium")
    with import_client("playwright.sync_api").sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Console:
    """An open page of the console. It records what the page asks for and writes to the browser's console."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self.messages: list[str] = []
        self.requests: list[str] = []
        self.frames: list[Document] = []
        """The messages that the page sent to its session's WebSocket."""
        page.set_default_timeout(WAIT_MS)
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("websocket", self._watch)

    def _dismiss(self, dialog: Any) -> None:
        self.messages.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _watch(self, socket: Any) -> None:
        self.requests.append(socket.url)
        socket.on("framesent", lambda payload: self.frames.append(json.loads(payload)))

    def open(self, address: str = "") -> None:
        self.page.goto(f"{self.url}/{address}")

    def settle(self) -> None:
        """Waits until the page shows the answer for what was typed."""
        self.page.wait_for_selector('.output[aria-busy="false"]')
        self.page.wait_for_selector("#fact-position")

    def type(self, text: str) -> None:
        """Replaces the whole text, and waits for the answer."""
        self.page.fill("#text", text)
        self.settle()

    def shown(self, mode: str) -> list[tuple[int, Any]]:
        """Returns the token ids and the probabilities in one of the two columns."""
        rows = self.page.locator(f".column.{mode} .prediction").evaluate_all(
            "rows => rows.map(row => [Number(row.dataset.tokenId), Number(row.dataset.probability)])"
        )
        return [(token_id, probability) for token_id, probability in rows]

    def fact(self, name: str) -> str:
        return str(self.page.inner_text(f"#fact-{name}"))

    def predict(self, **body: Any) -> Document:
        return self.post("/v1/predict", model=TEXT, top_k=8, **body)

    def post(self, path: str, **body: Any) -> Document:
        answer = self.http.post(path, json=body)
        assert answer.is_success, answer.text
        document: Document = answer.json()
        return document

    def check(self, *, network_errors: bool = False) -> None:
        """Checks that the page asked no other host, and wrote nothing to the browser's console. With
        `network_errors`, Chromium's own messages about failed requests are allowed."""
        mine = httpx.URL(self.url)
        assert {(httpx.URL(url).host, httpx.URL(url).port) for url in self.requests} == {(mine.host, mine.port)}
        assert [one for one in self.messages if not (network_errors and NETWORK.match(one))] == []


OpenConsole = Callable[..., Console]


@pytest.fixture
def console(browser: Any, server: LiveServer) -> Iterator[OpenConsole]:
    """Opens consoles, each in a new browser context. Options are those of the context, and the server's URL."""
    opened: list[Console] = []

    def make(address: str = "", url: str = server.url, width: int = 1100, **options: Any) -> Console:
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        opened.append(Console(context.new_page(), url))
        opened[-1].open(address)
        return opened[-1]

    yield make
    for one in opened:
        one.http.close()
        one.page.context.close()


def listed(predictions: Sequence[Document]) -> list[tuple[int, Any]]:
    """Returns the token ids and the approximate probabilities of an answer's predictions."""
    return [(one["token_id"], pytest.approx(one["probability"], rel=1e-4)) for one in predictions]
