"""Tests of the console's panels Forgetting, Live and Models, of the address, and of the themes."""

from __future__ import annotations

import pytest

from tests.console.conftest import SHOP, TEXT, Console, OpenConsole

TEXT_OF_MANY_TOKENS = "The history of the town goes back to the twelfth century . " * 12
INK = """id => {
    const canvas = document.querySelector(`#${id} canvas`);
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    for (let at = 0; at < pixels.length; at += 4)
        if (pixels[at + 3] > 200) colours.add(`${pixels[at]},${pixels[at + 1]},${pixels[at + 2]}`);
    return [...colours];
}"""
"""Returns the colours of a chart's opaque pixels."""
COLOUR = """name => {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found.match(/\\d+/g).slice(0, 3).join();
}"""


def rows(page: Console, region: str) -> list[list[str]]:
    found = page.page.locator(f"[aria-label='{region}'] tbody tr")
    return [found.nth(index).locator("th, td").all_inner_texts() for index in range(found.count())]


def test_forgetting_draws_what_was_measured_proved_and_certified(console: OpenConsole) -> None:
    page = console()
    page.type(TEXT_OF_MANY_TOKENS)
    page.page.click("nav >> text=Forgetting")
    page.page.wait_for_selector("#measure")
    tokens = page.post("/tokenize", model=TEXT, prompt=TEXT_OF_MANY_TOKENS)["tokens"]
    ks = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    compared = page.post("/v1/compare", model=TEXT, tokens=tokens, windows=ks, repeat=1)["models"][0]["windows"]
    certified = page.http.get(f"/v1/models/{TEXT}").json()["certificate"]["error_bound"]
    shown = rows(page, "Distance by window, as a table")
    assert [row[0] for row in shown] == [str(k) for k in ks]
    for row, measured in zip(shown, compared, strict=True):
        k = measured["window"]
        assert float(row[1]) == pytest.approx(measured["agreement"]["total_variation"], rel=0.05, abs=1e-9)
        proved = page.predict(tokens=tokens, mode="window", window=k, prove=True)["error_bound"]
        for cell, bound in ((row[2], proved), (row[3], certified[k - 1])):
            if bound >= 1 or bound == 0:
                assert cell == ("1 (no promise)" if bound else "0 (exact)")
            else:
                assert float(cell) == pytest.approx(bound, rel=0.06)
    assert all(cells[1].endswith("of 12") for cells in rows(page, "Agreement and latency by window, as a table")[:-1])
    for chart, names in (
        ("chart-forgetting", ("--window", "--proved", "--muted")),
        ("chart-agreement", ("--window",)),
        ("chart-latency", ("--window", "--recurrent")),
    ):
        ink = page.page.evaluate(INK, chart)
        for name in names:
            assert page.page.evaluate(COLOUR, name) in ink, (chart, name)
    page.check()


def test_forgetting_of_a_model_without_a_bound_says_so(console: OpenConsole) -> None:
    page = console(f'#forgetting?model={SHOP}&events=["event 7","event 8"]')
    page.page.wait_for_selector("#measure")
    assert len(rows(page, "Distance by window, as a table")) == 9
    page.page.click("nav >> text=Playground")
    page.settle()
    page.page.locator(".chip button").first.click()
    page.page.locator(".chip button").first.click()
    page.page.click("nav >> text=Forgetting")
    page.page.wait_for_selector("text=the input is empty")
    page.check()


def test_live_counts_what_other_clients_ask_and_pauses_while_hidden(console: OpenConsole) -> None:
    page = console()
    page.page.clock.install()  # of the next page
    page.page.goto("about:blank")
    page.open("#live")
    page.page.wait_for_selector(".tile")

    def answers() -> int:
        (recurrent, _) = rows(page, "Numbers by mode")
        return int(recurrent[5].replace(",", ""))

    before = answers()
    for _ in range(5):
        page.predict(input="The town", mode="recurrent")
    page.page.wait_for_function(
        """least => Number(document.querySelector("[aria-label='Numbers by mode'] td:nth-child(6)").textContent
        .replace(",", "")) >= least""",
        arg=before + 5,
    )
    assert page.page.locator("[aria-label='Batch sizes by graph'] tbody tr").count() >= 1
    assert page.page.locator("#chart-rates canvas").count() == page.page.locator("#chart-latencies canvas").count() == 1
    hide = "state => { Object.defineProperty(document, 'hidden', {value: state, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.page.evaluate(hide, True)
    page.page.wait_for_load_state("networkidle")
    asked = len([url for url in page.requests if url.endswith("/v1/report")])
    page.page.clock.run_for(10_000)  # milliseconds: five intervals of the panel
    page.page.wait_for_load_state("networkidle")
    assert len([url for url in page.requests if url.endswith("/v1/report")]) == asked
    with page.page.expect_request("**/v1/report"):
        page.page.evaluate(hide, False)
    page.check()


def test_models_shows_every_model_and_one_can_be_tried(console: OpenConsole) -> None:
    page = console("#models")
    page.page.wait_for_selector(".version")
    cards = page.http.get("/v1/models").json()["data"]
    for card in cards:
        shown = page.page.locator(f"[aria-labelledby='model-{card['id']}']").inner_text()
        assert card["description"] in shown
        assert f"version {card['model_version']} · ready" in shown
        certificate = card["certificate"]
        assert ("not certified" not in shown) == (certificate["certified"] or certificate["contractive"])
        if certificate["reason"]:
            assert certificate["reason"] in shown
    page.page.click(f"[aria-label='Try {SHOP}']")
    page.page.wait_for_selector("#event")
    assert page.page.input_value("#model") == SHOP
    page.check()


def test_the_address_keeps_the_panel_the_model_the_window_and_the_text(console: OpenConsole) -> None:
    page = console()
    page.type("A text & its =signs# 100%")
    page.page.locator("#k").focus()
    page.page.keyboard.press("Home")
    page.settle()
    page.page.wait_for_function("() => location.hash.includes('k=1&')")
    other = console("", width=1100)
    other.open(page.page.url.removeprefix(f"{page.url}/"))
    other.settle()
    assert other.page.input_value("#text") == "A text & its =signs# 100%"
    assert other.page.get_attribute("#k", "aria-valuetext") == "1 tokens"
    # Going back opens the panel from which one came, and keeps what was typed since.
    page.page.click("nav >> text=Models")
    page.page.wait_for_selector(".model")
    page.page.click("nav >> text=Playground")
    page.type("Another text")
    page.page.go_back()
    page.page.wait_for_selector(".model")
    page.page.go_forward()
    page.settle()
    assert page.page.input_value("#text") == "Another text"
    assert not [url for url in page.requests if "text=" in url.split("#")[0]]
    page.check()


def test_the_theme_follows_the_system_until_one_is_chosen(console: OpenConsole) -> None:
    page = console(color_scheme="dark")
    page.settle()
    background = "() => getComputedStyle(document.documentElement).backgroundColor"
    dark = page.page.evaluate(background)
    page.page.click("[aria-label=Theme] >> text=light")
    light = page.page.evaluate(background)
    assert dark != light
    page.page.reload()
    page.settle()
    assert page.page.evaluate(background) == light
    page.check()


def test_nothing_moves_for_people_who_prefer_that(console: OpenConsole) -> None:
    durations = "() => [...document.querySelectorAll('*')].map(one => getComputedStyle(one).transitionDuration)"
    for preference, moves in (("reduce", False), ("no-preference", True)):
        page = console(reduced_motion=preference)
        page.settle()
        assert (set(page.page.evaluate(durations)) != {"0s"}) == moves
        page.check()
