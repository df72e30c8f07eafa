"""Tests of the console where something is missing: the key, the server, the model, space, or a mouse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.console.conftest import KEY, SHOP, TEXT, OpenConsole, listed
from tests.service.live_server import LiveServer, live_server
from tests.service.sessions.stores.redis_server import free_port
from tests.service.versions import put

PANELS = ("playground", "forgetting", "live", "models")
LIMIT = 40
TOO_LONG = "river " * (LIMIT + 1)


@pytest.fixture(scope="module")
def guarded(bundles: Path) -> Iterator[LiveServer]:
    """A server with an API key, and with a small limit on the number of tokens."""
    options = ("--bundles", str(bundles), "--default-model", TEXT, "--max-input-tokens", str(LIMIT))
    with live_server(*options, WANE_API_KEYS=f"alice:{KEY}") as server:
        yield server


def test_a_key_is_asked_for_and_kept_for_the_tab(console: OpenConsole, guarded: LiveServer) -> None:
    page = console("#playground?text=The+history", url=guarded.url)
    page.page.wait_for_selector("#key-dialog[open]")
    page.page.fill("#key", "wrong-0123456789abcdefgh")
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("text=The key was not accepted")
    page.page.fill("#key", KEY)
    page.page.keyboard.press("Enter")
    page.settle()
    assert page.page.input_value("#text") == "The history"
    assert page.page.evaluate("() => sessionStorage.getItem('wane-key')") == KEY
    assert page.page.evaluate("() => Object.keys(localStorage)") == []
    assert KEY not in page.page.url and not [url for url in page.requests if KEY in url]
    page.page.reload()
    page.settle()
    page.page.click("summary")
    assert KEY not in page.page.inner_text("#recipe") and "$WANE_API_KEY" in page.page.inner_text("#recipe")
    # A key of the scope `use` may not read the metrics; the panel says so.
    page.page.click("nav >> text=Live")
    page.page.wait_for_selector("text=This key may not read /metrics")
    page.check(network_errors=True)


def test_the_forms_of_the_api_page_send_a_key(console: OpenConsole, guarded: LiveServer) -> None:
    page = console("docs", url=guarded.url, http_credentials={"username": "me", "password": KEY}).page
    page.locator(".auth-wrapper > button.authorize").click()
    page.locator(".auth-container input").fill(KEY)
    page.locator(".auth-btn-wrapper button.authorize").click()
    page.locator(".auth-btn-wrapper button.btn-done").click()
    predict = page.locator("#operations-predict-predict_v1_predict_post")
    predict.locator(".opblock-summary-control").click()
    with page.expect_request("**/v1/predict") as sent:
        predict.locator("button.execute").click()
    assert sent.value.all_headers()["authorization"] == f"Bearer {KEY}"
    answer = predict.locator(".live-responses-table .response-col_description code").first
    assert '"predictions"' in answer.inner_text()


def test_a_text_over_the_limit_is_kept_and_named(console: OpenConsole, guarded: LiveServer) -> None:
    page = console(url=guarded.url)
    page.page.wait_for_selector("#key-dialog[open]")
    page.page.fill("#key", KEY)
    page.page.keyboard.press("Enter")
    page.page.wait_for_selector("#key-dialog:not([open])", state="attached")
    page.page.fill("#text", TOO_LONG)
    page.page.wait_for_selector(f"#text-problem >> text=the server accepts {LIMIT}")
    assert page.page.input_value("#text") == TOO_LONG
    page.type("The river")
    assert page.page.inner_text("#text-problem") == ""
    page.check(network_errors=True)


def test_a_server_that_was_killed_is_announced_and_the_session_goes_on(console: OpenConsole, bundles: Path) -> None:
    port = free_port()
    options = ("--bundles", str(bundles), "--default-model", TEXT, "--port", str(port))
    with live_server(*options) as first:
        page = console(url=first.url)
        page.type("The history of the")
        first.kill()
        page.page.wait_for_selector(".banner")
        page.page.locator("#text").press_sequentially(" town")
        page.page.wait_for_selector("#text-problem >> text=Your text stays here")
        assert page.page.input_value("#text") == "The history of the town"
    with live_server(*options):
        page.page.wait_for_selector(".banner", state="detached")
        page.page.wait_for_selector("#text-problem:empty, #text-problem:not(:has(p))", state="attached")
        page.settle()
        expected = page.predict(input="The history of the town", mode="recurrent")["predictions"]
        assert page.shown("recurrent") == listed(expected)
        assert page.page.input_value("#text") == "The history of the town"
        page.type("The history of the town is")
    page.check(network_errors=True)


def test_a_server_that_is_busy_is_asked_again(console: OpenConsole) -> None:
    page = console()
    page.settle()
    refusals = 0

    def refuse_once(route: Any) -> None:
        nonlocal refusals
        if refusals:
            route.continue_()
            return
        refusals += 1
        body = {"status": 429, "code": "overloaded", "detail": "the queue is full", "retry_after_s": 1}
        route.fulfill(status=429, json=body, content_type="application/problem+json")

    page.page.route("**/tokenize", refuse_once)
    page.page.fill("#text", "The river")
    page.page.wait_for_selector("#text-problem >> text=The queue is full")
    assert page.page.input_value("#text") == "The river"
    page.page.wait_for_selector("#text-problem:not(:has(p))", state="attached")
    page.settle()
    assert page.shown("recurrent") == listed(page.predict(input="The river", mode="recurrent")["predictions"])
    page.check(network_errors=True)


def test_a_model_that_was_unloaded_is_named_and_another_can_be_chosen(console: OpenConsole, bundles: Path) -> None:
    folder = bundles.parent / "unloaded" / "bundles"
    folder.mkdir(parents=True)
    for name in (TEXT, "other"):
        put(folder, "2", name=name)
    with live_server("--bundles", str(folder), "--default-model", TEXT) as server:
        page = console("#playground?model=other&text=The+river", url=server.url)
        page.settle()
        assert page.http.post("/v2/repository/models/other/unload").is_success
        page.page.fill("#text", "The river bank")
        page.page.wait_for_selector("#text-problem >> text=Choose another one above")
        assert page.page.input_value("#text") == "The river bank"
        page.page.wait_for_selector("#model option:has-text('not served')", state="attached")
        page.page.select_option("#model", TEXT)
        page.page.wait_for_selector("#text-problem:not(:has(p))", state="attached")
        page.settle()
        assert page.shown("recurrent") == listed(page.predict(input="The river bank", mode="recurrent")["predictions"])
        page.check(network_errors=True)


def test_everything_can_be_done_by_keyboard(console: OpenConsole) -> None:
    page = console()
    page.type("The history of")
    keyboard = page.page.keyboard
    page.page.evaluate("() => document.activeElement.blur()")

    def tab_to(selector: str, most: int = 60) -> None:
        for _ in range(most):
            keyboard.press("Tab")
            if page.page.evaluate("selector => document.activeElement?.matches(selector) ?? false", selector):
                outline = page.page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
                assert outline != "none", selector
                return
        raise AssertionError(f"Tab never reaches {selector}")

    page.page.focus(".skip")
    keyboard.press("Enter")
    tab_to("#text")
    keyboard.press("Tab")  # takes the first token
    page.page.wait_for_function("() => document.querySelector('#text').value.length > 'The history of'.length")
    page.settle()
    keyboard.press("Escape")
    tab_to("#k")  # after Escape, Tab leaves the text
    keyboard.press("ArrowLeft")
    page.settle()
    tab_to("#generate")
    keyboard.press("Enter")
    page.page.wait_for_selector("#stop")
    keyboard.press("Escape")
    page.page.wait_for_selector("#generate:not([disabled])")
    page.settle()
    tab_to("#lose")
    keyboard.press("Enter")
    page.page.wait_for_selector("#recovery")
    page.settle()
    taken = page.page.input_value("#text")
    tab_to(".column.window .prediction")
    keyboard.press("Enter")
    page.page.wait_for_function("text => document.querySelector('#text').value.length > text.length", arg=taken)
    page.settle()
    tab_to("summary")
    keyboard.press("Enter")
    tab_to("#copy")
    tab_to("footer a")
    page.page.focus(".brand")
    for name in ("Forgetting", "Live", "Models"):
        tab_to("nav a:not([aria-current])")
        while page.page.evaluate("() => document.activeElement.textContent") != name:
            keyboard.press("Tab")
        keyboard.press("Enter")
        page.page.wait_for_selector(f"main[data-panel={name.lower()}]")
        page.page.focus(".brand")
    page.page.focus("#model")
    keyboard.type(SHOP)
    page.page.click("nav >> text=Playground")
    tab_to("#event")
    keyboard.type("event 1")
    page.page.wait_for_selector("#event-names li")
    keyboard.press("ArrowDown")
    keyboard.press("Enter")
    page.page.wait_for_selector(".chip")
    page.settle()
    page.check()


@pytest.mark.parametrize("panel", PANELS)
def test_no_panel_is_wider_than_a_small_phone(console: OpenConsole, panel: str) -> None:
    page = console(f"#{panel}", width=360)
    page.page.wait_for_selector(
        {"playground": "#fact-bound", "forgetting": "#measure", "live": ".tile"}.get(panel, ".version")
    )
    if panel == "playground":
        page.page.click("summary")
        page.page.click("#lose")
        page.page.wait_for_selector("#recovery")
    widest = page.page.evaluate("() => document.scrollingElement.scrollWidth")
    assert widest <= 360
    page.check()
