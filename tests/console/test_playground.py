"""Tests of the console's Playground: what is typed, both modes, the window, generation, and the loss of the state."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.console.conftest import HOSTILE, SHOP, TEXT, Console, OpenConsole, listed
from wane.client import Agreement

HISTORY = "The history of the town goes back to the twelfth century , when a small church was built on the hill"


def tokens(console: Console, text: str) -> list[int]:
    ids: list[int] = console.post("/tokenize", model=TEXT, prompt=text)["tokens"]
    return ids


def assert_bound(shown: str, bound: float) -> None:
    if bound >= 1:
        assert shown == "1 (no promise)"
    else:
        assert float(shown) == pytest.approx(bound, rel=0.1)


def test_the_first_page_predicts_by_both_modes_without_a_click(console: OpenConsole) -> None:
    page = console()
    page.settle()
    assert len(page.shown("recurrent")) == len(page.shown("window")) == 8
    assert page.page.title() == "Playground · Wane"
    page.check()


def test_the_first_click_continues_the_sample_and_later_clicks_go_where_they_hit(console: OpenConsole) -> None:
    page = console()
    page.settle()
    sample = page.page.input_value("#text")
    for _ in range(2):
        page.page.click("#text", position={"x": 30, "y": 60})
        page.page.keyboard.type("!")
    typed = page.page.input_value("#text")
    assert typed.endswith("!") and typed.count("!") == 2 and not typed.endswith("!!")
    page.page.click("text=Clear")
    page.page.keyboard.type("A")
    page.page.click("text=Use the sample text")
    page.page.keyboard.press("Control+End")
    page.page.keyboard.type("?")
    assert page.page.input_value("#text") == sample + "?"
    page.check()


def test_the_predictions_after_typing_are_those_of_the_whole_text(console: OpenConsole) -> None:
    page = console()
    page.type("The")
    page.frames.clear()
    page.page.locator("#text").press_sequentially(HISTORY.removeprefix("The"))
    page.page.press("#text", "Backspace")
    page.page.locator("#text").press_sequentially("ls of the river")
    page.settle()
    text = HISTORY[:-1] + "ls of the river"
    assert page.page.input_value("#text") == text
    whole = tokens(page, text)
    answer = page.predict(tokens=whole, mode="both", window=64)
    assert page.shown("recurrent") == listed(answer["modes"]["recurrent"]["predictions"])
    assert page.shown("window") == listed(answer["modes"]["window"]["predictions"])
    assert page.fact("position") == str(len(whole))
    # Each message rewinds to the tokens that are still the same, or appends the others. None sends the text again.
    sent = [frame for frame in page.frames if "tokens" in frame]
    assert {frozenset(frame) for frame in page.frames} >= {frozenset({"rewind"})}
    assert sum(len(frame["tokens"]) for frame in sent) < 4 * len(whole)
    assert all(frame["expected_position"] >= 1 for frame in sent)
    page.check()


def test_a_change_in_the_middle_rewinds_to_the_last_token_that_is_still_the_same(console: OpenConsole) -> None:
    page = console()
    page.type(HISTORY)
    page.frames.clear()
    changed = HISTORY.replace("small", "large")
    page.type(changed)
    before, after = tokens(page, HISTORY), tokens(page, changed)
    same = next(place for place, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
    assert page.frames == [
        {"rewind": same},
        {"tokens": after[same:], "expected_position": same, "top_k": 8},
    ]
    assert page.shown("recurrent") == listed(page.predict(tokens=after, mode="recurrent")["predictions"])
    page.check()


def test_the_slider_moves_the_window_and_marks_what_differs(console: OpenConsole) -> None:
    page = console()
    page.type(HISTORY)
    slider = page.page.locator("#k")
    slider.focus()
    page.page.keyboard.press("Home")
    page.settle()
    assert slider.get_attribute("aria-valuetext") == "1 tokens"
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("ArrowRight")
    page.settle()
    answer = page.predict(tokens=tokens(page, HISTORY), mode="both", window=3, prove=True)
    assert page.shown("window") == listed(answer["modes"]["window"]["predictions"])
    assert page.shown("recurrent") == listed(answer["modes"]["recurrent"]["predictions"])
    distance = answer["agreement"]["total_variation"]
    assert float(page.fact("distance")) == pytest.approx(distance, rel=0.01)
    assert page.page.inner_text("#proved") == ("proved" if answer["agreement"]["top1_proved"] else "not proved")
    assert page.page.locator(".column.window .differs").count() > 0
    page.check()


def test_a_long_window_proves_and_a_window_of_the_whole_text_is_exact(console: OpenConsole) -> None:
    page = console(f"#playground?model={TEXT}&k=64&text=The+history+of")
    page.settle()
    assert page.fact("bound") == "0 (exact)"
    page.type(HISTORY * 8)
    answer = page.predict(tokens=tokens(page, HISTORY * 8), mode="both", window=64, prove=True)["agreement"]
    bound = answer["error_bound"]
    assert (
        page.fact("bound") == "1 (no promise)" if bound >= 1 else float(page.fact("bound")) == pytest.approx(bound, 0.1)
    )
    page.check()


@pytest.mark.parametrize("how", ["click", "Tab"])
def test_a_click_or_tab_takes_a_token(console: OpenConsole, how: str) -> None:
    page = console()
    page.type("The history of")
    first = page.predict(input="The history of", mode="recurrent")["predictions"][0]["token"]
    if how == "click":
        page.page.locator(".column.recurrent .prediction").first.click()
    else:
        page.page.press("#text", "Tab")
    page.page.wait_for_function("text => document.querySelector('#text').value === text", arg=f"The history of{first}")
    page.settle()
    assert page.fact("position") == str(len(tokens(page, f"The history of{first}")))
    page.check()


def test_generated_text_streams_into_the_text_until_escape(console: OpenConsole) -> None:
    page = console()
    page.type("The history of")
    page.page.click("#generate")
    page.page.wait_for_function("() => document.querySelector('#text').value.length > 'The history of'.length + 12")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("#generate:not([disabled])")
    page.settle()
    text = page.page.input_value("#text")
    assert text.startswith("The history of")
    whole = tokens(page, text)
    assert page.shown("recurrent") == listed(page.predict(tokens=whole, mode="recurrent")["predictions"])
    page.check()


def test_the_state_is_lost_and_comes_back_with_its_bound(console: OpenConsole) -> None:
    page = console(f"#playground?model={TEXT}&k=32")
    page.type(HISTORY * 4)
    whole = tokens(page, HISTORY * 4)
    before = len(page.requests)
    page.page.click("#lose")
    page.page.wait_for_selector("#recovery")
    page.settle()
    assert f"its last 32 of {len(whole)} tokens" in page.page.inner_text("#recovery")
    assert page.fact("state") == "rebuilt"
    assert page.fact("position") == str(len(whole))
    session = page.requests[before:]
    assert any(re.search(r"/v1/sessions/[^/]+$", url) for url in session) and any(
        url.endswith("/v1/sessions") for url in session
    )
    # The rebuilt session answers as a session that the test creates from the same tokens.
    made = page.post("/v1/sessions", model=TEXT, history=whole[-32:], position=len(whole))
    expected = page.post("/v1/predict", session=made["session"], top_k=8, mode="both", window=32, prove=True)
    assert page.shown("recurrent") == listed(expected["modes"]["recurrent"]["predictions"])
    assert_bound(page.page.inner_text("#recovered-bound"), expected["error_bound"])
    # The page goes on: a text whose beginning the server has forgotten is sent again.
    page.type("A new text")
    assert page.shown("recurrent") == listed(page.predict(input="A new text", mode="recurrent")["predictions"])
    page.check(network_errors=True)  # the rewind is refused, because the server has forgotten the beginning


def test_an_empty_text_says_what_to_do(console: OpenConsole) -> None:
    page = console()
    page.settle()
    page.page.click("text=Clear")
    page.page.wait_for_selector("text=The text is empty")
    assert page.page.is_disabled("#generate")
    page.page.click("text=Use the sample text")
    page.settle()
    page.check()


def test_the_request_can_be_copied_and_run(console: OpenConsole) -> None:
    page = console(permissions=["clipboard-read", "clipboard-write"])
    page.type("It's the town's \"river\"\n<b>")
    page.page.click("summary")
    page.page.click("#copy")
    page.page.wait_for_selector("#copy:has-text('Copied')")
    copied = page.page.evaluate("navigator.clipboard.readText()")
    assert copied == page.page.inner_text("#recipe")
    page.page.click("text=Python")
    program = page.page.inner_text("#recipe")
    assert "from wane_client import Wane" in program
    answer = page.predict(input="It's the town's \"river\"\n<b>", mode="both", window=64, prove=True)
    assert json.loads(run("bash", "-c", copied))["agreement"] == answer["agreement"]
    printed = run(sys.executable, "-c", program.replace("wane_client", "wane.client")).strip()
    assert printed.endswith(repr(Agreement(**answer["agreement"])))
    page.check()


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def test_events_are_chosen_by_name_and_a_name_is_never_markup(console: OpenConsole) -> None:
    page = console(f"#playground?model={SHOP}")
    page.page.wait_for_selector("text=There are no events yet")
    for count, name in enumerate(HOSTILE, start=1):
        page.page.fill("#event", name[:4])
        page.page.locator("#event-names li", has_text=name).first.click()
        page.page.wait_for_selector(f".chip:nth-child({count})")
        page.settle()
    assert page.page.locator(".chip > span").all_inner_texts() == list(HOSTILE)
    assert page.fact("position") == str(len(HOSTILE))
    expected = page.post("/v1/predict", model=SHOP, events=list(HOSTILE), mode="both", window=64, top_k=8)
    assert page.shown("recurrent") == listed(expected["modes"]["recurrent"]["predictions"])
    assert page.page.locator("#app img:not(.brand img), #app script, #app b b").count() == 0
    page.page.locator(".chip button").nth(1).click()
    page.settle()
    rest = [HOSTILE[0], *HOSTILE[2:]]
    expected = page.post("/v1/predict", model=SHOP, events=rest, mode="recurrent", top_k=8)
    assert page.shown("recurrent") == listed(expected["predictions"])
    # The address brings the names back.
    page.page.wait_for_function(
        "names => new URLSearchParams(location.hash.split('?')[1]).get('events') === JSON.stringify(names)", arg=rest
    )
    page.page.reload()
    page.settle()
    assert page.page.locator(".chip > span").all_inner_texts() == rest
    assert page.page.title() == "Playground · Wane"
    page.check()


def test_enter_takes_the_name_that_was_typed_before_its_completions_arrive(console: OpenConsole) -> None:
    page = console(f"#playground?model={SHOP}")
    page.page.click("#event")
    page.page.wait_for_selector("#event-names li")
    waiting, ends = list[Any](), list[bool]()
    page.page.route("**/vocabulary?*", lambda route: route.continue_() if ends else waiting.append(route))
    page.page.keyboard.type("event 7")
    page.page.keyboard.press("Enter")
    assert waiting
    ends.append(True)  # later requests do not wait
    for route in waiting:
        route.continue_()
    page.page.wait_for_selector(".chip > span")
    page.settle()
    assert page.page.locator(".chip > span").all_inner_texts() == ["event 7"]
    assert page.page.input_value("#event") == ""
    page.check()


def test_an_unknown_event_in_the_address_is_named(console: OpenConsole) -> None:
    page = console(f'#playground?model={SHOP}&events=["no <i>such</i> event"]')
    page.page.wait_for_selector("text=has no event “no <i>such</i> event”")
    page.page.locator(".chip button").click()
    page.page.wait_for_selector("text=There are no events yet")
    page.check()


def test_events_are_generated_as_chips(console: OpenConsole) -> None:
    page = console(f'#playground?model={SHOP}&events=["event 7"]')
    page.settle()
    while page.page.locator(".chip").count() < 3:  # the model may end the session after one event, at random
        page.page.click("#generate")
        page.page.wait_for_selector(".chip:nth-child(3), #generate:not([disabled])")
    page.page.keyboard.press("Escape")
    page.page.wait_for_selector("#generate:not([disabled])")
    page.settle()
    names = page.page.locator(".chip > span").all_inner_texts()
    expected = page.post("/v1/predict", model=SHOP, events=names, mode="recurrent", top_k=8)
    assert page.shown("recurrent") == listed(expected["predictions"])
    page.check()


def test_continuations_are_compared_and_a_fork_goes_on_while_its_session_stays(console: OpenConsole) -> None:
    page = console()
    page.type(HISTORY)
    page.settle()
    lines = ["of the river", "and the town"]
    page.page.fill("#continuations", "\n".join(lines))
    page.page.click("#compare")
    page.page.wait_for_selector("#what-if tbody tr")
    sums = [float(one.get_attribute("data-sum")) for one in page.page.query_selector_all("#what-if tbody tr")]
    begin = len(tokens(console=page, text=HISTORY))
    scores = [page.post("/v1/score", model=TEXT, input=f"{HISTORY} {line}")["logprobs"] for line in lines]
    expected = sorted((sum(one[begin:]) for one in scores), reverse=True)
    assert sums == pytest.approx(expected, abs=1e-4)
    page.page.click("#what-if tbody tr:first-child .fork")
    page.page.wait_for_selector("#back")
    page.settle()
    assert page.page.input_value("#text").startswith(HISTORY + " ")
    forked = page.shown("recurrent")
    page.page.click("#back")
    page.page.wait_for_selector("#back", state="detached")
    page.settle()
    assert page.page.input_value("#text") == HISTORY
    assert page.shown("recurrent") != forked
    page.check()
