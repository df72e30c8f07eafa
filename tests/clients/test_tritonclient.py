"""Tests a started server with the released package tritonclient, with its modules http and http.aio. The package must
receive the same numbers as a client of the native API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as aio
from numpy.typing import NDArray
from tritonclient.http import InferenceServerClient as Client
from tritonclient.utils import InferenceServerException

from tests.service.versions import EVENT_MODEL, TEXT_MODEL

INFER = f"/v2/models/{TEXT_MODEL}/infer"
TOKENS = [[5, 6, 7], [8, 9, 10]]
OUTPUTS = ("top_ids", "top_logprobs", "logits", "token_logprobs", "error_bound", "top1_proved", "position")
BINARY = pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
EVENTS = [["event 5", "event 6", "event 7"], ["event 8", "event 9", "event 10"]]


ids = count(1)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[Client]:
    client = Client(url.removeprefix("http://"))
    yield client
    client.close()


@pytest.fixture
async def aio_client(url: str) -> AsyncIterator[aio.InferenceServerClient]:
    client = aio.InferenceServerClient(url.removeprefix("http://"))
    yield client
    await client.close()


def tensor(name: str, values: Any, datatype: str = "INT64", *, binary: bool = True) -> triton.InferInput:
    array = np.array(values, np.int64 if datatype == "INT64" else np.object_)
    given = triton.InferInput(name, list(array.shape), datatype)
    given.set_data_from_numpy(array, binary_data=binary)
    return given


def outputs(*names: str, binary: bool = True) -> list[triton.InferRequestedOutput]:
    return [triton.InferRequestedOutput(name, binary_data=binary) for name in names]


def infer(client: Client, tokens: Sequence[Sequence[int]], *names: str, **options: Any) -> triton.InferResult:
    return client.infer(TEXT_MODEL, [tensor("tokens", tokens)], outputs=outputs(*names) or None, **options)


def floats(values: Any) -> NDArray[np.float32]:
    """Returns numbers of the native API as the Open Inference Protocol sends them: in float32, with NaN instead of
    null."""
    return np.array(values, np.float32)


def predicted(native_of_both: httpx.Client, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = native_of_both.post("/v1/predict", json={"top_k": 16, **body}).raise_for_status().json()
    return answer


def assert_equals_native(result: triton.InferResult, answers: Sequence[Mapping[str, Any]]) -> None:
    """Compares each row of a prediction's outputs with the native answer for this row."""
    for name, field in (("top_ids", "token_id"), ("top_logprobs", "logprob")):
        expected = [[one[field] for one in answer["predictions"]] for answer in answers]
        np.testing.assert_array_equal(result.as_numpy(name), floats(expected) if field == "logprob" else expected)
    np.testing.assert_array_equal(result.as_numpy("error_bound"), floats([one["error_bound"] for one in answers]))


# Health and metadata


def test_the_server_is_live_and_ready(client: Client) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()


def test_a_model_and_its_version_are_ready(client: Client) -> None:
    assert client.is_model_ready(TEXT_MODEL)
    assert client.is_model_ready(EVENT_MODEL, "2")
    assert not client.is_model_ready(TEXT_MODEL, "2")
    assert not client.is_model_ready("nobody")


def test_the_server_advertises_the_extensions_that_it_has(client: Client) -> None:
    metadata = client.get_server_metadata()
    assert metadata["name"] == "wane" and metadata["version"]
    assert metadata["extensions"] == [
        "binary_tensor_data",
        "sequence",
        "sequence(string_id)",
        "model_repository",
        "model_configuration",
        "statistics",
        "parameters",
    ]


@pytest.mark.parametrize("version", ["", "1"], ids=["current", "by version"])
def test_the_metadata_has_the_signature(client: Client, version: str) -> None:
    metadata = client.get_model_metadata(TEXT_MODEL, version)
    assert {name: metadata[name] for name in ("name", "versions", "platform")} == {
        "name": TEXT_MODEL,
        "versions": ["1"],
        "platform": "wane",
    }
    assert {one["name"]: (one["datatype"], one["shape"]) for one in metadata["inputs"]} == {
        "tokens": ("INT64", [-1, -1]),
        "text": ("BYTES", [-1]),
        "events": ("BYTES", [-1, -1]),
        "lengths": ("INT64", [-1]),
    }
    assert {one["name"]: (one["datatype"], one["shape"]) for one in metadata["outputs"]} == {
        "top_ids": ("INT64", [-1, 16]),
        "top_logprobs": ("FP32", [-1, 16]),
        "logits": ("FP32", [-1, 2048]),
        "token_logprobs": ("FP32", [-1, -1]),
        "error_bound": ("FP32", [-1]),
        "top1_proved": ("BOOL", [-1]),
        "position": ("INT64", [-1]),
    }


@pytest.mark.parametrize("version", ["", "1"], ids=["current", "by version"])
def test_the_configuration_has_the_signature(client: Client, version: str) -> None:
    config, metadata = client.get_model_config(TEXT_MODEL, version), client.get_model_metadata(TEXT_MODEL)
    assert config["name"] == TEXT_MODEL
    assert config["max_batch_size"] == 0  # with this value, `dims` includes the batch dimension
    for field, described in (("input", "inputs"), ("output", "outputs")):
        assert [(one["name"], one["dims"]) for one in config[field]] == [
            (one["name"], one["shape"]) for one in metadata[described]
        ]
    assert {one["data_type"] for one in config["input"]} == {"TYPE_INT64", "TYPE_STRING"}


def test_the_statistics_count_successes_failures_and_times(client: Client) -> None:
    def figures() -> tuple[int, int, int, int]:
        (found,) = client.get_inference_statistics(EVENT_MODEL, "2")["model_stats"]
        assert (found["name"], found["version"]) == (EVENT_MODEL, "2")
        stats = found["inference_stats"]
        for phase in ("success", "queue", "compute_input", "compute_infer", "compute_output"):
            assert stats[phase]["count"] == found["execution_count"]
            assert (stats[phase]["ns"] > 0) == (found["execution_count"] > 0)
        return found["inference_count"], found["execution_count"], stats["fail"]["count"], found["last_inference"]

    before = figures()
    client.infer(EVENT_MODEL, [tensor("tokens", TOKENS)])
    with pytest.raises(InferenceServerException):
        client.infer(EVENT_MODEL, [tensor("tokens", [[10**6]])])
    after = figures()
    assert [new - old for new, old in zip(after[:3], before, strict=False)] == [2, 1, 1]
    assert after[3] > before[3]


def test_the_statistics_of_all_models_have_a_path_of_their_own(client: Client) -> None:
    stats = client.get_inference_statistics()["model_stats"]
    assert {one["name"] for one in stats} == {TEXT_MODEL, EVENT_MODEL}


def test_the_repository_lists_loads_and_unloads(client: Client) -> None:
    assert {one["name"]: one["state"] for one in client.get_model_repository_index()}[EVENT_MODEL] == "READY"
    client.unload_model(EVENT_MODEL)
    assert not client.is_model_ready(EVENT_MODEL)
    client.load_model(EVENT_MODEL)
    assert client.is_model_ready(EVENT_MODEL)


def test_an_unknown_version_is_404(native_of_both: httpx.Client) -> None:
    for path in ("", "/ready", "/config", "/stats"):
        response = native_of_both.get(f"/v2/models/{TEXT_MODEL}/versions/7{path}")
        assert response.status_code == 404 and "version" in response.json()["error"], path
    assert native_of_both.post(f"/v2/models/{TEXT_MODEL}/versions/7/infer", json={}).status_code == 404


# Outputs


@BINARY
@pytest.mark.parametrize("binary_input", [True, False], ids=["binary input", "json input"])
def test_a_prediction_has_the_native_numbers(
    client: Client, native_of_both: httpx.Client, binary: bool, binary_input: bool
) -> None:
    given = tensor("tokens", TOKENS, binary=binary_input)
    names = ("top_ids", "top_logprobs", "error_bound")
    result = client.infer(TEXT_MODEL, [given], outputs=outputs(*names, binary=binary))
    assert_equals_native(result, [predicted(native_of_both, tokens=tokens) for tokens in TOKENS])
    assert result.as_numpy("top_ids").dtype == np.int64
    assert result.as_numpy("top_logprobs").dtype == np.float32


def test_the_default_outputs_are_these_four(client: Client, native_of_both: httpx.Client) -> None:
    result = infer(client, TOKENS)
    names = [one["name"] for one in result.get_response()["outputs"]]
    assert names == ["top_ids", "top_logprobs", "error_bound", "position"]
    assert_equals_native(result, [predicted(native_of_both, tokens=tokens) for tokens in TOKENS])
    assert result.as_numpy("position").tolist() == [3, 3]


@BINARY
def test_token_logprobs_are_those_of_score(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    result = client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=outputs("token_logprobs", binary=binary))
    scores = [native_of_both.post("/v1/score", json={"tokens": tokens}).json() for tokens in TOKENS]
    np.testing.assert_array_equal(result.as_numpy("token_logprobs"), floats([one["logprobs"] for one in scores]))


@BINARY
def test_logits_give_the_native_log_probabilities(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    result = client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=outputs("logits", binary=binary))
    logits = result.as_numpy("logits").astype(np.float64)
    assert logits.shape == (2, 2048)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for row, tokens in enumerate(TOKENS):
        for one in predicted(native_of_both, tokens=tokens)["predictions"]:
            assert logprobs[row, one["token_id"]] == pytest.approx(one["logprob"], abs=1e-5)


@BINARY
def test_top1_proved_is_the_native_flag(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    given = tensor("tokens", [[5, 6, 7] * 20, [8, 9, 10] * 20])
    result = client.infer(
        TEXT_MODEL, [given], outputs=outputs("top1_proved", "error_bound", binary=binary), parameters={"mode": "window"}
    )
    answers = [predicted(native_of_both, tokens=tokens * 20, mode="window") for tokens in TOKENS]
    assert result.as_numpy("top1_proved").tolist() == [one["top1_proved"] for one in answers]
    assert result.as_numpy("top1_proved").dtype == np.bool_
    np.testing.assert_array_equal(result.as_numpy("error_bound"), floats([one["error_bound"] for one in answers]))


@BINARY
def test_outputs_come_in_the_requested_order(client: Client, binary: bool) -> None:
    names = OUTPUTS[::-1]
    result = client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=outputs(*names, binary=binary))
    assert [one["name"] for one in result.get_response()["outputs"]] == [*names]
    shapes = {name: result.as_numpy(name).shape for name in names}
    assert shapes == {
        "top_ids": (2, 16),
        "top_logprobs": (2, 16),
        "logits": (2, 2048),
        "token_logprobs": (2, 3),
        "error_bound": (2,),
        "top1_proved": (2,),
        "position": (2,),
    }


def test_each_output_is_binary_or_json_on_its_own(client: Client) -> None:
    wanted = [*outputs("top_ids", binary=True), *outputs("position", binary=False), *outputs("error_bound")]
    result = client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=wanted)
    ids, position, bound = result.get_response()["outputs"]
    assert ids["parameters"] == {"binary_data_size": 2 * 16 * 8} and "data" not in ids
    assert position["data"] == [3, 3] and "parameters" not in position
    assert bound["parameters"] == {"binary_data_size": 8}


def test_a_json_answer_has_flat_data_and_no_header_length(native_of_both: httpx.Client) -> None:
    body = {"inputs": [{"name": "tokens", "shape": [2, 3], "datatype": "INT64", "data": TOKENS}]}
    response = native_of_both.post(INFER, json=body)
    assert response.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in response.headers
    assert len(response.json()["outputs"][0]["data"]) == 32


@BINARY
def test_an_unknown_error_bound_is_nan(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    tokens = [5, 6, 7]
    options = {"mode": "window", "window": 1}
    answer = predicted(native_of_both, tokens=tokens, truncated=True, **options)
    result = client.infer(
        TEXT_MODEL,
        [tensor("tokens", [tokens])],
        outputs=outputs("error_bound", "token_logprobs", binary=binary),
        parameters={"truncated": True, **options},
    )
    np.testing.assert_array_equal(result.as_numpy("error_bound"), floats([answer["error_bound"]]))
    score = native_of_both.post("/v1/score", json={"tokens": tokens, "truncated": True}).json()
    assert score["logprobs"][0] is None  # the first token of a truncated sequence is not predicted
    np.testing.assert_array_equal(result.as_numpy("token_logprobs"), floats([score["logprobs"]]))
    if not binary:
        assert result.get_response()["outputs"][1]["data"][0] is None


def test_the_request_s_id_is_in_the_answer(client: Client) -> None:
    assert infer(client, TOKENS, request_id="my request").get_response()["id"] == "my request"
    assert "id" not in infer(client, TOKENS).get_response()


def test_the_answer_names_the_model_and_its_version(client: Client) -> None:
    response = client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], model_version="1").get_response()
    assert (response["model_name"], response["model_version"]) == (TEXT_MODEL, "1")


# Inputs


@BINARY
def test_text_is_tokenised_like_by_the_native_api(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    texts = ["The history of the", "A town é"]
    result = client.infer(TEXT_MODEL, [tensor("text", [text.encode() for text in texts], "BYTES", binary=binary)])
    assert_equals_native(result, [predicted(native_of_both, input=text) for text in texts])


@BINARY
def test_lengths_make_a_batch_ragged(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    given = [
        tensor("tokens", [[5, 6, 7], [8, -1, 10**9]], binary=binary),  # the server ignores the padding
        tensor("lengths", [3, 1], binary=binary),
    ]
    names = ("top_ids", "top_logprobs", "error_bound", "position", "token_logprobs")
    result = client.infer(TEXT_MODEL, given, outputs=outputs(*names, binary=binary))
    assert_equals_native(result, [predicted(native_of_both, tokens=[5, 6, 7]), predicted(native_of_both, tokens=[8])])
    assert result.as_numpy("position").tolist() == [3, 1]
    scores = [
        native_of_both.post("/v1/score", json={"tokens": tokens}).json()["logprobs"] for tokens in ([5, 6, 7], [8])
    ]
    padded = floats([scores[0], [*scores[1], None, None]])
    np.testing.assert_array_equal(result.as_numpy("token_logprobs"), padded)


@BINARY
def test_events_are_those_of_the_native_api(client: Client, native_of_both: httpx.Client, binary: bool) -> None:
    given = tensor("events", [[name.encode() for name in row] for row in EVENTS], "BYTES", binary=binary)
    names = ("top_ids", "top_logprobs", "error_bound", "token_logprobs")
    result = client.infer(EVENT_MODEL, [given], outputs=outputs(*names, binary=binary))
    assert_equals_native(result, [predicted(native_of_both, model=EVENT_MODEL, events=row) for row in EVENTS])
    scores = [native_of_both.post("/v1/score", json={"model": EVENT_MODEL, "events": row}).json() for row in EVENTS]
    np.testing.assert_array_equal(result.as_numpy("token_logprobs"), floats([one["logprobs"] for one in scores]))


def test_events_of_ragged_batches_have_lengths(client: Client, native_of_both: httpx.Client) -> None:
    given = [tensor("events", [[b"event 5", b"event 6"], [b"event 7", b""]], "BYTES"), tensor("lengths", [2, 1])]
    result = client.infer(EVENT_MODEL, given)
    rows = [["event 5", "event 6"], ["event 7"]]
    assert_equals_native(result, [predicted(native_of_both, model=EVENT_MODEL, events=row) for row in rows])


def test_an_unknown_event_is_the_unknown_token(client: Client, native_of_both: httpx.Client) -> None:
    result = client.infer(EVENT_MODEL, [tensor("events", [[b"event 5", b"never seen"]], "BYTES")])
    of_native = predicted(native_of_both, model=EVENT_MODEL, events=["event 5", "never seen"])
    assert of_native["unknown"] == ["never seen"]
    assert_equals_native(result, [of_native])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_a_compressed_request_is_inflated(client: Client, native_of_both: httpx.Client, algorithm: str) -> None:
    result = infer(client, TOKENS, request_compression_algorithm=algorithm, response_compression_algorithm=algorithm)
    assert_equals_native(result, [predicted(native_of_both, tokens=tokens) for tokens in TOKENS])


# Parameters


def test_mode_and_window_are_those_of_a_prediction(client: Client, native_of_both: httpx.Client) -> None:
    for options in ({"mode": "recurrent"}, {"mode": "window", "window": 2}, {"mode": "both"}):
        answers = [predicted(native_of_both, tokens=tokens, **options) for tokens in TOKENS]
        assert_equals_native(infer(client, TOKENS, parameters=options), answers)


def test_tolerance_is_that_of_a_prediction(client: Client, native_of_both: httpx.Client) -> None:
    tokens = [[5, 6, 7] * 600]  # with so many tokens, every window is faster than the recurrent mode
    for tolerance, mode in ((0, "recurrent"), (0.5, "window"), (1, "window")):
        answer = predicted(native_of_both, tokens=tokens[0], tolerance=tolerance)
        assert answer["mode"] == mode
        assert_equals_native(infer(client, tokens, parameters={"tolerance": tolerance}), [answer])


def test_truncated_is_that_of_a_prediction(client: Client, native_of_both: httpx.Client) -> None:
    answers = [predicted(native_of_both, tokens=tokens, truncated=True) for tokens in TOKENS]
    assert_equals_native(infer(client, TOKENS, parameters={"truncated": True}), answers)


def test_priority_is_accepted(client: Client) -> None:
    assert infer(client, TOKENS, priority=3).as_numpy("position").tolist() == [3, 3]


def test_timeout_is_a_deadline_in_microseconds(client: Client, native_of_both: httpx.Client) -> None:
    assert infer(client, TOKENS, timeout=20_000_000).as_numpy("position").tolist() == [3, 3]
    assert infer(client, TOKENS, timeout=0).as_numpy("position").tolist() == [3, 3]
    body = {
        "inputs": [{"name": "tokens", "shape": [1, 3], "datatype": "INT64", "data": [5, 6, 7]}],
        "parameters": {"timeout": 1},
    }
    late = native_of_both.post(INFER, json=body)
    assert late.status_code == 504 and "deadline" in late.json()["error"]


# Sequences


def step(client: Client, sequence: Any, token: int, **options: Any) -> triton.InferResult:
    return client.infer(TEXT_MODEL, [tensor("tokens", [[token]])], sequence_id=sequence, **options)


@pytest.mark.parametrize("make", [int, str], ids=["number", "text"])
def test_a_sequence_is_a_session(client: Client, native_of_both: httpx.Client, make: type) -> None:
    sequence = make(next(ids)) if make is int else f"of-{next(ids)}"
    twin = f"twin-{sequence}"
    native_of_both.post("/v1/sessions", json={"session": twin, "model": TEXT_MODEL})
    for index, token in enumerate((5, 6, 7)):
        result = step(client, sequence, token, sequence_start=index == 0)
        body = {"tokens": [token], "top_k": 16}
        answer = native_of_both.post(f"/v1/sessions/{twin}/tokens", json=body).json()
        assert_equals_native(result, [answer])
        assert result.as_numpy("position").tolist() == [answer["position"]] == [index + 1]
    assert native_of_both.get(f"/v1/sessions/{TEXT_MODEL}:{sequence}").json()["position"] == 3


def test_several_tokens_and_all_predicted_outputs_of_a_sequence(client: Client, native_of_both: httpx.Client) -> None:
    sequence = next(ids)
    names = ("top_ids", "top_logprobs", "logits", "error_bound", "top1_proved", "position")
    infer(client, [[5, 6]], *names, sequence_id=sequence, sequence_start=True)
    result = infer(client, [[7, 8, 9]], *names, sequence_id=sequence)
    answer = predicted(native_of_both, tokens=[5, 6, 7, 8, 9], mode="recurrent")
    np.testing.assert_array_equal(result.as_numpy("top_ids")[0], [one["token_id"] for one in answer["predictions"]])
    logits = result.as_numpy("logits")[0].astype(np.float64)
    assert logits.argmax() == answer["predictions"][0]["token_id"]
    assert result.as_numpy("position").tolist() == [5]


def test_token_logprobs_of_a_sequence_go_on_from_its_tokens(client: Client, native_of_both: httpx.Client) -> None:
    sequence = next(ids)
    infer(client, [[5, 6]], sequence_id=sequence, sequence_start=True)
    options = {"sequence_id": sequence, "parameters": {"expected_position": 2}}
    first, again = [infer(client, [[7, 8, 9]], "token_logprobs", "position", **options) for _ in range(2)]
    score = native_of_both.post("/v1/score", json={"tokens": [5, 6, 7, 8, 9]}).json()
    for result in (first, again):
        np.testing.assert_allclose(result.as_numpy("token_logprobs")[0], score["logprobs"][2:], atol=1e-5)
        assert result.as_numpy("position").tolist() == [5]


def test_sequence_start_makes_a_sequence_anew(client: Client) -> None:
    sequence = next(ids)
    first = step(client, sequence, 5, sequence_start=True)
    step(client, sequence, 6)
    again = step(client, sequence, 5, sequence_start=True)
    assert again.as_numpy("position").tolist() == [1]
    np.testing.assert_array_equal(first.as_numpy("top_logprobs"), again.as_numpy("top_logprobs"))


def test_a_sequence_starts_from_the_tokens_of_another_one(client: Client, native_of_both: httpx.Client) -> None:
    source, whole, early = next(ids), next(ids), next(ids)
    infer(client, [[5, 6, 7]], sequence_id=source, sequence_start=True)
    step(client, whole, 9, sequence_start=True)  # is dropped
    options: list[tuple[int, dict[str, Any], list[int]]] = [
        (whole, {"fork_of": source}, [5, 6, 7, 8]),
        (whole, {"fork_of": str(source)}, [5, 6, 7, 8]),
        (early, {"fork_of": source, "expected_position": 2}, [5, 6, 8]),
    ]
    for sequence, parameters, tokens in options:
        result = step(client, sequence, 8, sequence_start=True, parameters=parameters)
        assert_equals_native(result, [predicted(native_of_both, tokens=tokens, mode="recurrent")])
        assert result.as_numpy("position").tolist() == [len(tokens)]
    assert native_of_both.get(f"/v1/sessions/{TEXT_MODEL}:{source}").json()["position"] == 3
    refused: list[tuple[dict[str, Any], bool, str]] = [
        ({"fork_of": 4711}, True, "'4711'"),
        ({"fork_of": source, "expected_position": 4}, True, "position"),
        ({"fork_of": source}, False, "sequence_start"),
        ({"fork_of": whole}, True, "itself"),
        ({"fork_of": -1}, True, "fork_of"),
    ]
    for parameters, starts, message in refused:
        with pytest.raises(InferenceServerException, match=message):
            step(client, whole, 8, sequence_start=starts, parameters=parameters)
        assert native_of_both.get(f"/v1/sessions/{TEXT_MODEL}:{whole}").json()["position"] == 4


def test_sequence_end_deletes_the_sequence_after_the_answer(client: Client, native_of_both: httpx.Client) -> None:
    sequence = next(ids)
    step(client, sequence, 5, sequence_start=True)
    assert step(client, sequence, 6, sequence_end=True).as_numpy("position").tolist() == [2]
    assert native_of_both.get(f"/v1/sessions/{TEXT_MODEL}:{sequence}").status_code == 404


def test_a_sequence_may_start_and_end_in_one_request(client: Client, native_of_both: httpx.Client) -> None:
    sequence = next(ids)
    result = step(client, sequence, 5, sequence_start=True, sequence_end=True)
    assert_equals_native(result, [predicted(native_of_both, tokens=[5])])
    assert native_of_both.get(f"/v1/sessions/{TEXT_MODEL}:{sequence}").status_code == 404


def test_a_request_without_start_for_an_unknown_sequence_names_its_id(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="'4711'") as caught:
        step(client, 4711, 5)
    assert caught.value.status() == "400"


@pytest.mark.parametrize("sequence", [0, ""], ids=["0", "empty"])
def test_an_empty_id_is_no_sequence(client: Client, native_of_both: httpx.Client, sequence: Any) -> None:
    result = step(client, sequence, 5)
    assert_equals_native(result, [predicted(native_of_both, tokens=[5])])
    body = {
        "inputs": [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [5]}],
        "parameters": {"sequence_id": sequence},
    }
    assert native_of_both.post(INFER, json=body).json()["outputs"][3]["data"] == [1]


def test_a_request_sent_again_with_its_position_is_a_replay(client: Client) -> None:
    sequence = next(ids)
    step(client, sequence, 5, sequence_start=True)
    first, again = [step(client, sequence, 6, parameters={"expected_position": 1}) for _ in range(2)]
    np.testing.assert_array_equal(first.as_numpy("top_logprobs"), again.as_numpy("top_logprobs"))
    assert first.as_numpy("position").tolist() == again.as_numpy("position").tolist() == [2]


def test_a_start_sent_again_has_the_same_answer(client: Client) -> None:
    sequence = next(ids)
    options = {"sequence_start": True, "parameters": {"expected_position": 0}}
    first, again = [step(client, sequence, 5, **options) for _ in range(2)]
    np.testing.assert_array_equal(first.as_numpy("top_logprobs"), again.as_numpy("top_logprobs"))
    assert again.as_numpy("position").tolist() == [1]


def test_a_request_at_another_position_is_409(client: Client) -> None:
    sequence = next(ids)
    step(client, sequence, 5, sequence_start=True)
    with pytest.raises(InferenceServerException, match="at position 1,") as caught:
        step(client, sequence, 6, parameters={"expected_position": 7})
    assert caught.value.status() == "409"


def test_a_sequence_of_events(client: Client, native_of_both: httpx.Client) -> None:
    sequence = f"clicks-{next(ids)}"
    for index, name in enumerate(EVENTS[0]):
        given = tensor("events", [[name.encode()]], "BYTES")
        result = client.infer(EVENT_MODEL, [given], sequence_id=sequence, sequence_start=index == 0)
    answer = predicted(native_of_both, model=EVENT_MODEL, events=EVENTS[0], mode="recurrent")
    assert result.as_numpy("top_ids")[0].tolist() == [one["token_id"] for one in answer["predictions"]]
    assert result.as_numpy("position").tolist() == [3]


def test_sequences_of_two_models_with_one_id_are_two(client: Client) -> None:
    sequence = next(ids)
    for model in (TEXT_MODEL, EVENT_MODEL):
        client.infer(model, [tensor("tokens", [[5]])], sequence_id=sequence, sequence_start=True)
    for model in (TEXT_MODEL, EVENT_MODEL):
        result = client.infer(model, [tensor("tokens", [[6]])], sequence_id=sequence)
        assert result.as_numpy("position").tolist() == [2]


# The asynchronous client


async def test_the_asynchronous_client_has_the_native_numbers(
    aio_client: aio.InferenceServerClient, native_of_both: httpx.Client
) -> None:
    assert await aio_client.is_server_live()
    assert await aio_client.is_server_ready()
    assert await aio_client.is_model_ready(TEXT_MODEL)
    assert (await aio_client.get_model_metadata(TEXT_MODEL))["name"] == TEXT_MODEL
    assert (await aio_client.get_model_config(TEXT_MODEL))["name"] == TEXT_MODEL
    assert (await aio_client.get_inference_statistics(TEXT_MODEL))["model_stats"]
    result = await aio_client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)])
    assert_equals_native(result, [predicted(native_of_both, tokens=tokens) for tokens in TOKENS])
    given = tensor("events", [[name.encode() for name in row] for row in EVENTS], "BYTES")
    result = await aio_client.infer(EVENT_MODEL, [given])
    answers = [predicted(native_of_both, model=EVENT_MODEL, events=row) for row in EVENTS]
    assert_equals_native(result, answers)


async def test_the_asynchronous_client_keeps_sequences(aio_client: aio.InferenceServerClient) -> None:
    sequence = next(ids)
    for index, token in enumerate((5, 6)):
        result = await aio_client.infer(
            TEXT_MODEL,
            [tensor("tokens", [[token]])],
            sequence_id=sequence,
            sequence_start=index == 0,
            sequence_end=index == 1,
        )
        assert result.as_numpy("position").tolist() == [index + 1]
    with pytest.raises(InferenceServerException, match=f"'{sequence}'"):
        await aio_client.infer(TEXT_MODEL, [tensor("tokens", [[7]])], sequence_id=sequence)


# Errors that the package itself can cause


def test_shared_memory_is_refused_by_name(client: Client) -> None:
    given = triton.InferInput("tokens", [1, 1], "INT64")
    given.set_shared_memory("region", 8)
    with pytest.raises(InferenceServerException, match="tokens: shared memory"):
        client.infer(TEXT_MODEL, [given])
    output = triton.InferRequestedOutput("top_ids")
    output.set_shared_memory("region", 8)
    with pytest.raises(InferenceServerException, match="top_ids: shared memory"):
        client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=[output])


def test_classification_is_refused_by_name(client: Client) -> None:
    output = triton.InferRequestedOutput("logits", class_count=3)
    with pytest.raises(InferenceServerException, match="logits: classification"):
        client.infer(TEXT_MODEL, [tensor("tokens", TOKENS)], outputs=[output])
