"""Tests of the console with axe-core, which checks the rules of WCAG 2.2, level AA, and its own best practices."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.alone import import_client
from tests.console.conftest import KEY, SHOP, TEXT, Console, OpenConsole
from tests.service.live_server import live_server

axe = import_client("axe_playwright_python.sync_playwright")

RULES = {"rules": {"target-size": {"enabled": True}}}  # all rules that axe-core runs by itself, and this one
READY = {"playground": "#fact-bound", "forgetting": "#measure", "live": ".tile", "models": ".version"}


def violations(page: Console) -> list[str]:
    found: dict[str, Any] = axe.Axe().run(page.page, options=RULES).response
    assert len(found["passes"]) > 10
    nodes = [
        (one["id"], node["target"], node["failureSummary"]) for one in found["violations"] for node in one["nodes"]
    ]
    return [" ".join(map(str, node)) for node in nodes]


@pytest.mark.parametrize("width", [1100, 390])
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("panel", READY)
def test_a_panel_has_no_violation(console: OpenConsole, panel: str, theme: str, width: int) -> None:
    page = console(f"#{panel}", width=width, color_scheme=theme, reduced_motion="reduce")
    page.page.wait_for_selector(READY[panel])
    if panel == "playground":
        page.settle()
        page.page.click("summary")
        page.page.click("#lose")
        page.page.wait_for_selector("#recovery")
        page.settle()
    assert violations(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_states_without_a_prediction_have_no_violation(console: OpenConsole, theme: str) -> None:
    page = console("#playground?model=nothing", color_scheme=theme, reduced_motion="reduce")
    page.page.wait_for_selector("#text-problem p")
    assert violations(page) == []
    page.page.select_option("#model", SHOP)
    page.page.fill("#event", "event")
    page.page.wait_for_selector("#event-names li")
    page.page.locator("#event-names li").first.click()
    page.page.fill("#event", "event")
    page.page.wait_for_selector("#event-names li")
    page.settle()
    assert violations(page) == []
    page.page.route("**/healthz", lambda route: route.abort())
    page.page.wait_for_selector(".banner")
    assert violations(page) == []


def test_the_question_for_a_key_has_no_violation(console: OpenConsole, bundles: Any) -> None:
    with live_server("--bundles", str(bundles), "--default-model", TEXT, WANE_API_KEYS=f"alice:{KEY}") as guarded:
        page = console(url=guarded.url)
        page.page.wait_for_selector("#key-dialog[open]")
        assert violations(page) == []
