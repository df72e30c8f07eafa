"""Tests of the page `/docs` in a browser."""

from __future__ import annotations

import json

from tests.console.conftest import TEXT, OpenConsole


def test_the_page_shows_every_route_and_sends_an_example(console: OpenConsole) -> None:
    shown = console("docs")
    page, description = shown.page, shown.http.get("/openapi.json").json()
    page.wait_for_selector(".opblock")
    summaries = {
        (method, path): operation["summary"]
        for path, operations in description["paths"].items()
        for method, operation in operations.items()
    }
    assert page.locator(".opblock").count() == len(summaries)
    text = page.inner_text("#page")
    assert [summary for summary in summaries.values() if " ".join(summary.split()) not in text] == []
    assert "4404" in text and "/v1/sessions/{session}/stream" in text

    predict = page.locator("#operations-predict-predict_v1_predict_post")
    predict.locator(".opblock-summary-control").click()
    predict.locator("textarea.body-param__text").fill(json.dumps({"model": TEXT, "input": "The game", "top_k": 2}))
    predict.locator("button.execute").click()
    answer = predict.locator(".live-responses-table .response-col_description code").first
    assert len(json.loads(answer.inner_text())["predictions"]) == 2

    session = page.locator("#operations-sessions-read_v1_sessions__session__get")
    session.locator(".opblock-summary-control").click()
    assert session.locator("input[placeholder=session]").input_value() == "demo"
    shown.check(network_errors=True)


def test_the_page_shows_what_fields_mean(console: OpenConsole) -> None:
    shown = console("docs")
    predict = shown.page.locator("#operations-predict-predict_v1_predict_post")
    predict.locator(".opblock-summary-control").click()
    predict.locator(".tablinks[data-name=model]").first.click()
    predict.get_by_text("the number of predictions in the answer").first.wait_for()
    shown.check()
