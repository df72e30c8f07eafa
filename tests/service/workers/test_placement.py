"""Which worker answers a request, and the joined answers of several."""

from __future__ import annotations

from wane.service.app import Application
from wane.service.workers.placement import OF_SESSION, WITH_SESSION, worker_of
from wane.service.workers.totals import Answered, joined_steps, metrics


def test_every_route_whose_body_names_a_session_is_placed_by_it(app: Application) -> None:
    """A new route with such a body must be in WITH_SESSION, or each worker would look for the session in itself."""
    document = app.openapi()
    named = set()
    for path, methods in document["paths"].items():
        for described in methods.values():
            schema = described.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            body = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], {})
            if "session" in body.get("properties", {}):
                named.add(path)
    assert named == {*WITH_SESSION, "/v1/sessions/{session}/fork"}
    in_path = {path for path in document["paths"] if "{session}" in path}
    assert in_path and all(OF_SESSION(path) for path in in_path)


def test_sessions_are_divided_evenly() -> None:
    counts = [0] * 5
    for number in range(5000):
        counts[worker_of(f"user-{number}", 5)] += 1
    assert min(counts) > 900


def answered(text: str, status: int = 200) -> Answered:
    return Answered(status, [(b"content-type", b"application/json")], text.encode())


def test_steps_of_a_part_that_failed_have_its_problem_document() -> None:
    good, bad = answered('{"results":[{"position":1},{"position":2}]}'), answered('{"status":503}', 503)
    joined = joined_steps(3, [([0, 2], good), ([1], bad)])
    assert joined == {"results": [{"position": 1}, {"error": {"status": 503}}, {"position": 2}]}


def test_columns_that_only_some_parts_have_are_filled() -> None:
    one = answered('{"session":["a"],"created":[true],"error":[null],"latency":{"total_ms":1.0}}')
    two = answered('{"session":["b"],"error":[null],"latency":{"total_ms":2.0}}')
    bad = answered('{"status":503}', 503)
    assert joined_steps(3, [([2], one), ([0], two), ([1], bad)]) == {
        "session": ["b", None, "a"],
        "created": [None, None, True],
        "error": [None, {"status": 503}, None],
        "latency": {"total_ms": 2.0},
    }


def test_metrics_are_added_but_for_those_that_are_not_amounts() -> None:
    texts = [
        f"# HELP wane_ready r\n# TYPE wane_ready gauge\nwane_ready {ready}\n"
        f'# HELP wane_answers_total a\n# TYPE wane_answers_total counter\nwane_answers_total{{model="m"}} {count}\n'
        for ready, count in ((1, 3), (0, 4))
    ]
    text = metrics([answered(one) for one in texts]).body.decode()
    assert "wane_ready 0.0\n" in text
    assert 'wane_answers_total{model="m"} 7.0\n' in text
    assert metrics([answered(texts[0]), answered("gone", 503)]).status == 503
