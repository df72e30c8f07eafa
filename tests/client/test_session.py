"""Tests of sessions against a real server. Each test runs with both kinds of client."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import httpx
import pytest

from tests.client.alike import Both, Lossy
from tests.service.live_server import TIMEOUT_S
from tests.service.versions import EVENT_MODEL, TEXT_MODEL
from wane.client import InvalidRequest, PositionConflict, SessionExists, UnknownSession, Unreachable

TEXT = "The history of the town"


@pytest.fixture
def name() -> str:
    """The id of a session that no other test uses."""
    return f"s-{uuid4().hex[:12]}"


def first(answer: Any) -> tuple[int, float]:
    """Returns the first prediction, with the precision in which two runs agree."""
    return answer.predictions[0].token_id, round(answer.predictions[0].logprob, 3)


def test_steps_by_tokens_give_the_answers_of_the_whole_sequence(wane: Any) -> None:
    with wane.session() as session:
        for end in (1, 3, 4):
            answer = session.append([5, 6, 7, 8][session.position : end])
            assert (answer.position, session.position) == (end, end)
            assert first(answer) == first(wane.predict([5, 6, 7, 8][:end], mode="recurrent"))
        assert first(session.predict()) == first(answer)
        assert session.generate(max_tokens=3, temperature=0).tokens[0] == answer.predictions[0].token_id
        session.rewind(1)
        assert session.position == 1
        assert first(session.predict()) == first(wane.predict([5], mode="recurrent"))
        assert first(session.append(6)) == first(wane.predict([5, 6], mode="recurrent"))


def test_a_fork_continues_without_changing_the_other_session(wane: Any, http: httpx.Client, name: str) -> None:
    with wane.session() as session:
        session.append([5, 6, 7])
        with session.fork() as same, session.fork(position=2) as earlier:
            assert (same.position, earlier.position, session.position) == (3, 2, 3)
            assert first(earlier.append(9)) == first(wane.predict([5, 6, 9], mode="recurrent"))
            http.delete(f"/v1/sessions/{same.name}")
            assert first(same.append(8)) == first(wane.predict([5, 6, 7, 8], mode="recurrent"))
            assert same.rebuilds == 1
        assert first(session.append(8)) == first(wane.predict([5, 6, 7, 8], mode="recurrent"))
        named = session.fork(name)
        assert named.name == name and http.get(f"/v1/sessions/{name}").json()["position"] == 4
        named.close()
        for position in (-1, 5, True):
            with pytest.raises(ValueError, match="position must be a whole number from 0 to 4"):
                session.fork(position=position)


def test_a_lost_session_is_made_again_before_it_is_forked_or_continued(wane: Any, http: httpx.Client) -> None:
    with wane.session() as session:
        session.append([5, 6, 7])
        http.delete(f"/v1/sessions/{session.name}")
        with session.fork() as forked:
            assert (forked.position, session.rebuilds) == (3, 1)
        http.post(f"/v1/sessions/{session.name}/rewind", json={"position": 1})
        assert [one.position for one in session.continuations([[8]])] == [4]
        assert session.rebuilds == 2


def test_continuations_are_scored_and_predicted_from_the_session(wane: Any) -> None:
    with wane.session() as session:
        session.append([5, 6])
        known = {one.token_id: one.logprob for one in session.predict(top_k=20).predictions}
        given = [[token] for token in known] + [[7, 8]]
        results = session.continuations([*given, "a text"], top_k=1)
        assert [list(one.tokens) for one in results[:-1]] == given
        assert [round(one.logprobs[0], 3) for one in results[:20]] == [round(one, 3) for one in known.values()]
        assert [len(one.predictions) for one in results] == [1] * 22
        assert first(results[20]) == first(wane.predict([5, 6, 7, 8], mode="recurrent"))
        assert session.predict().position == session.position == 2
        with pytest.raises(ValueError, match="the input is empty"):
            session.continuations([[]])


def test_a_block_ends_a_session_with_a_new_id_and_keeps_one_with_a_given_id(
    wane: Any, http: httpx.Client, name: str
) -> None:
    with wane.session() as made, wane.session(name) as given:
        made.append(5)
        given.append([5, 6])
    assert http.get(f"/v1/sessions/{made.name}").status_code == 404
    with wane.session(name, model=TEXT_MODEL) as again:
        assert again.position == 2
        assert again.append(7).position == 3
        again.close()
        again.close()
    assert http.get(f"/v1/sessions/{name}").status_code == 404
    with pytest.raises(ValueError, match="is closed"):
        again.append(8)


def test_a_session_of_another_model_or_mode_is_refused(wane: Any, name: str) -> None:
    wane.session(name).append(5)
    for options in ({"model": EVENT_MODEL}, {"mode": "window"}):
        with pytest.raises(SessionExists):
            wane.session(name, **options).append(6)


def test_events_are_appended_by_name(wane: Any) -> None:
    with wane.session(model=EVENT_MODEL) as session:
        assert session.append("event 5").position == 1
        answer = session.append(["event 6", "event 7"], exclude_seen=True, top_k=2048)
        assert answer.seen_tokens == session.position == 3
        assert not {one.token for one in answer.predictions} & {"event 5", "event 6", "event 7"}
        with pytest.raises(ValueError, match="either all events or all tokens"):
            session.append(5)
        with pytest.raises(ValueError, match="a session of text"):
            session.type("event 5")


@pytest.mark.parametrize(("unknown", "position"), [("skip", 2), ("token", 4)])
def test_unknown_events_are_counted_as_the_server_counts_them(
    wane: Any, http: httpx.Client, unknown: Any, position: int
) -> None:
    with wane.session(model=EVENT_MODEL, unknown=unknown) as session:
        answer = session.append(["socks", "event 5", "hats", "event 6"])
        assert set(answer.unknown) == {"socks", "hats"}
        assert session.position == position
        assert session.append("socks").position == session.position
        http.delete(f"/v1/sessions/{session.name}")
        assert first(session.predict()) == first(wane.predict(session._inner._known, model=EVENT_MODEL))
        assert session.rebuilds == 1


def test_text_in_pieces_is_tokenised_in_pieces_and_typed_text_is_not(wane: Any) -> None:
    with wane.session() as pieces, wane.session() as typed:
        for part in ("The hist", "ory of the to", "wn"):
            in_pieces = pieces.append(part)
        for end in range(1, len(TEXT) + 1):
            whole = typed.type(TEXT[:end])
        assert whole.position == typed.position == len(wane.score(TEXT).tokens)
        assert first(whole) == first(wane.predict(TEXT, mode="recurrent"))
        assert in_pieces.position > whole.position
        for edited in ("The history of a town", "The", "Once upon a time"):
            assert first(typed.type(edited)) == first(wane.predict(edited, mode="recurrent"))
        assert typed.type("").position == typed.position == 0


def test_typed_text_that_changes_further_back_than_the_server_remembers_is_sent_again(wane: Any) -> None:
    long = "the cat sat on the mat and " * 250
    with wane.session() as session:
        session.type(long)
        assert session.position > 1000
        changed = "A" + long
        assert first(session.type(changed)) == first(wane.predict(changed, mode="recurrent"))
        with pytest.raises(InvalidRequest):
            session.rewind(1)


def test_typing_needs_the_whole_text(wane: Any, name: str) -> None:
    wane.session(name).append([5] * 4)
    with pytest.raises(ValueError, match="all of whose tokens this client remembers"):
        wane.session(name).type("The")


def test_a_lost_session_is_made_again_from_all_of_its_tokens(wane: Any, http: httpx.Client) -> None:
    tokens = list(range(5, 25))
    with wane.session() as session:
        for token in tokens:
            http.delete(f"/v1/sessions/{session.name}")
            answer = session.append(token)
        assert session.rebuilds == 19 + 1
        assert answer.error_bound == 0 and first(answer) == first(wane.predict(tokens, mode="recurrent"))


def total_variation(one: Any, two: Any) -> float:
    """Returns the distance between two whole distributions."""
    left, right = ({item.token_id: item.probability for item in answer.predictions} for answer in (one, two))
    assert left.keys() == right.keys()
    return float(sum(abs(left[token] - right[token]) for token in left) / 2)


@pytest.mark.parametrize("remember", [4, 12, 40])
def test_a_session_made_again_from_few_tokens_is_within_its_bound(wane: Any, http: httpx.Client, remember: int) -> None:
    tokens = [5 + 37 * number % 2000 for number in range(60)]
    with wane.session(remember=remember) as session:
        session.append(tokens[:-1])
        http.delete(f"/v1/sessions/{session.name}")
        answer = session.append(tokens[-1], top_k=2048, include_unknown=True)
    whole = wane.predict(tokens, mode="recurrent", top_k=2048, include_unknown=True)
    assert (session.rebuilds, answer.position, answer.state) == (1, 60, "rebuilt")
    assert 0 < answer.error_bound <= 1
    assert 0 <= total_variation(answer, whole) <= answer.error_bound + 1e-5


def test_without_memory_a_lost_session_is_an_error(wane: Any, http: httpx.Client) -> None:
    with pytest.raises(UnknownSession), wane.session(remember=0) as session:
        session.append("The history")
        http.delete(f"/v1/sessions/{session.name}")
        session.append(" of the")
    assert session.rebuilds == 0


def test_every_call_makes_a_lost_session_again(wane: Any, http: httpx.Client) -> None:
    with wane.session() as session:
        session.append([5, 6, 7])
        for number, call in enumerate((session.predict, session.generate, lambda: session.rewind(2)), 1):
            http.delete(f"/v1/sessions/{session.name}")
            call()
            assert session.rebuilds == number
        assert first(session.predict()) == first(wane.predict([5, 6], mode="recurrent"))


def test_the_last_tokens_that_a_server_has_lost_are_sent_again(wane: Any, http: httpx.Client) -> None:
    with wane.session() as session:
        session.append([5, 6, 7, 8])
        for number, call in enumerate((lambda: session.append(9), session.predict, lambda: session.rewind(3)), 1):
            assert http.post(f"/v1/sessions/{session.name}/rewind", json={"position": 1}).status_code == 200
            call()
            assert session.rebuilds == number
        assert first(session.append(4)) == first(wane.predict([5, 6, 7, 4], mode="recurrent"))


def test_a_step_of_another_client_is_a_conflict(wane: Any, http: httpx.Client) -> None:
    with wane.session() as session:
        session.append(5)
        http.post(f"/v1/sessions/{session.name}/tokens", json={"tokens": [6, 7]}).raise_for_status()
        for call in (lambda: session.append(8), session.predict, session.generate):
            with pytest.raises(PositionConflict) as raised:
                call()
            assert raised.value.position == 3
        assert session.position == 1
        assert http.get(f"/v1/sessions/{session.name}").json()["position"] == 3
        session.close()


def test_a_step_whose_answer_is_lost_is_not_appended_twice(both: Both, url: str) -> None:
    transport = Lossy("/tokens", [True, False, True, True, False])
    client = both(url, transport=transport, deadline_s=TIMEOUT_S)
    with client.session() as session:
        assert (session.append(5).replayed, session.append([6, 7]).replayed, session.append(8).replayed) == (
            True,
            True,
            False,
        )
        assert session.predict().position == 4
    asked = [(json.loads(one.content), one.headers["idempotency-key"]) for one in transport.sent]
    assert [body["expected_position"] for body, _ in asked] == [0, 0, 1, 1, 1, 3]
    keys = [key for _, key in asked]
    assert (len({*keys[:2]}), len({*keys[2:5]}), len({*keys})) == (1, 1, 3)


def test_a_step_that_failed_has_the_same_key_when_it_is_called_again(both: Both, url: str) -> None:
    transport = Lossy("/tokens", [True])
    client = both(url, transport=transport, retry=False, deadline_s=TIMEOUT_S)
    with client.session() as session:
        with pytest.raises(Unreachable):
            session.append(5)
        assert session.position == 0
        assert session.append(5).replayed
        assert session.append(5).position == 2
    first_key, second_key, third_key = (one.headers["idempotency-key"] for one in transport.sent)
    assert first_key == second_key != third_key


def test_a_session_keeps_its_mode_when_it_is_made_again(wane: Any, http: httpx.Client, name: str) -> None:
    wane.session(name, mode="window").append([5, 6])
    again = wane.session(name)
    assert again.append([7, 8]).mode == "window"
    http.delete(f"/v1/sessions/{name}")
    answer = again.append(9)
    assert (answer.mode, answer.position, again.rebuilds) == ("window", 5, 1)
    again.close()


def test_steps_over_a_websocket_are_the_steps_of_the_session(wane: Any, http: httpx.Client) -> None:
    with wane.session() as session:
        session.append(5)
        with session.stream() as stream:
            assert stream.append([6, 7]).position == 3
            http.delete(f"/v1/sessions/{session.name}")
            assert stream.append(8).position == 4
            assert session.rebuilds == 1
            stream.rewind(2)
            answer = stream.append(9)
            with pytest.raises(InvalidRequest):
                stream.append(10**9)
            http.post(f"/v1/sessions/{session.name}/tokens", json={"tokens": [6]}).raise_for_status()
            with pytest.raises(PositionConflict) as raised:
                stream.append(4)
            assert raised.value.position == 4
        assert first(answer) == first(wane.predict([5, 6, 9], mode="recurrent"))


def test_a_websocket_that_is_closed_is_opened_again_at_the_same_position(wane: Any) -> None:
    with wane.session() as session, session.stream() as stream:
        for position in range(1, 6):
            assert stream.append(position + 4).position == position
            session._inner._socket.address = "elsewhere"  # the next step needs a new connection
        assert first(stream.predict()) == first(wane.predict([5, 6, 7, 8, 9], mode="recurrent"))


def test_a_websocket_of_a_server_that_refuses_it_says_why(both: Both) -> None:
    document = {"model": "m", "model_version": "1", "device": "cpu", "mode": "auto", "position": 0}
    transport = httpx.MockTransport(lambda request: httpx.Response(201, json=document))
    session = both("http://127.0.0.1:9", transport=transport, retry=False).session()
    with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9 does not answer"), session.stream() as stream:
        stream.append(5)
