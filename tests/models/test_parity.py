"""Tests the check that compares graphs with the oracle. The graphs are stand-ins that compute with the oracle. They
must pass the check, and stand-ins with a fault must fail it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.models.random_models import BLOCKS, architecture, random_weights
from tests.models.rounding import rounding
from wane.models.certificate import certify
from wane.models.layer_registry import FADING, Kind
from wane.models.manifest import Role
from wane.models.parity import ParityError, RoundingError, Run, Tensors, check_graphs, compare_bits, log_softmax
from wane.models.reference import Reference

LENGTHS = np.array([7, 1, 4])
TOKENS = np.random.default_rng(0).integers(11, size=(3, 7))


def graphs_of(reference: Reference) -> Run:
    """Returns a stand-in for a bundle's graphs. It computes with the oracle and returns float32."""

    def run(role: Role, feeds: Tensors) -> Tensors:
        return {name: value.astype(np.float32) for name, value in answer(role, feeds).items()}

    def answer(role: Role, feeds: Tensors) -> Tensors:
        if role == "head":
            return {"logits": reference.logits(feeds["hidden"])}
        tokens = feeds["tokens"]
        state = {name: feeds.get(name, value) for name, value in reference.zero_state(len(tokens)).items()}
        if role == "step":
            logits, hidden, state = reference.step(tokens, state)
            return {"logits": logits, "hidden": hidden} | {f"next.{name}": value for name, value in state.items()}
        last: dict[str, np.ndarray] = {}
        logprobs = np.zeros(tokens.shape)
        for t in range(tokens.shape[1]):
            logits, hidden, state = reference.step(tokens[:, t], state)
            inside = t < feeds["lengths"]
            outputs = {"logits": logits, "hidden": hidden} | {f"next.{name}": value for name, value in state.items()}
            last = {name: np.where(inside[:, None], new, last.get(name, new)) for name, new in outputs.items()}
            if role == "scan":
                chosen = np.take_along_axis(log_softmax(logits), feeds["targets"][:, t, None], axis=1)[:, 0]
                logprobs[:, t] = np.where(inside, chosen, 0)
        return last | {"logprobs": logprobs}

    return run


def check(run: Run, reference: Reference) -> float:
    generator = np.random.default_rng(1)
    zeros = reference.zero_state(len(TOKENS))
    start = {name: generator.uniform(-1, 1, value.shape) for name, value in zeros.items()}
    return check_graphs(reference, run, TOKENS, LENGTHS, start)


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("cell", FADING)
def test_correct_graphs_pass(cell: Kind, block: str) -> None:
    model = architecture(cell, block, layers=2)
    reference = Reference(model, random_weights(model, seed=0, recurrent=0.5))
    assert 0 < check(graphs_of(reference), reference) < 1e-5


Fault = Callable[[Role, Tensors, Tensors], Tensors]


def _forgets_a_state(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    return {name: value for name, value in outputs.items() if name != "next.layers.1.c"}


def _swaps_states(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    if role != "advance":
        return outputs
    return outputs | {"next.layers.0.h": outputs["next.layers.0.c"], "next.layers.0.c": outputs["next.layers.0.h"]}


def _counts_the_padding(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    return outputs | {"logprobs": outputs["logprobs"] - 1} if role == "scan" else outputs


def _transposes(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    return outputs | {"logits": outputs["logits"].T} if role == "head" else outputs


def _is_not_a_number(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    return outputs | {"hidden": outputs["hidden"] * np.nan} if role == "step" else outputs


def _answers_in_float64(role: Role, feeds: Tensors, outputs: Tensors) -> Tensors:
    return {name: value.astype(np.float64) for name, value in outputs.items()} if role == "scan" else outputs


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_forgets_a_state, r"window, a batch: the graph has no output next\.layers\.1\.c"),
        (_swaps_states, r"advance, a batch: next\.layers\.0\.h differs from the oracle by .*, tolerance 0\.0001"),
        (_counts_the_padding, "scan, a batch: logprobs differs from the oracle by 1, tolerance"),
        (_transposes, r"head, a batch: logits has shape \(11, 3\), expected \(3, 11\)"),
        (_answers_in_float64, "scan, a batch: logprobs has dtype float64, expected float32"),
        (_is_not_a_number, "step, token 0 of a stream: hidden differs from the oracle by nan"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_error_names_a_faulty_graph(fault: Fault, message: str) -> None:
    model = architecture("lstm", layers=2)
    reference = Reference(model, random_weights(model, seed=0))
    right = graphs_of(reference)
    with pytest.raises(ParityError, match=message):
        check(lambda role, feeds: fault(role, feeds, right(role, feeds)), reference)


def with_top(outputs: Tensors) -> Tensors:
    """If a graph has the output logits, adds the outputs top_ids, top_logits and log_sum_exp for the three largest
    logits."""
    if "logits" not in outputs:
        return outputs
    logits = outputs["logits"]
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    top = np.take_along_axis(logits, ids, axis=1)
    return outputs | {"top_logits": top, "top_ids": ids, "log_sum_exp": np.log(np.exp(logits).sum(axis=1))}


def _omits_the_ids(outputs: Tensors) -> Tensors:
    return {name: value for name, value in outputs.items() if name != "top_ids"}


def _swaps_the_largest(outputs: Tensors) -> Tensors:
    return outputs | {"top_ids": outputs["top_ids"][:, ::-1], "top_logits": outputs["top_logits"][:, ::-1]}


def _raises_the_largest(outputs: Tensors) -> Tensors:
    return outputs | {"top_logits": np.nextafter(outputs["top_logits"], np.float32(np.inf))}


def _sums_too_much(outputs: Tensors) -> Tensors:
    return outputs | {"log_sum_exp": outputs["log_sum_exp"] + np.float32(1e-3)}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_omits_the_ids, "window, a batch: the graph has some of the outputs .*, but not top_ids"),
        (_swaps_the_largest, "window, a batch: top_ids are not the ids of the largest logits"),
        (_raises_the_largest, "window, a batch: top_logits are not the logits of top_ids"),
        (_sums_too_much, "window, a batch: log_sum_exp does not match the logits"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_top_outputs_are_checked_against_the_logits(fault: Callable[[Tensors], Tensors], message: str) -> None:
    model = architecture("lstm", layers=2)
    reference = Reference(model, random_weights(model, seed=0))
    right = graphs_of(reference)
    check(lambda role, feeds: with_top(right(role, feeds)), reference)

    def run(role: Role, feeds: Tensors) -> Tensors:
        outputs = with_top(right(role, feeds))
        return fault(outputs) if "top_ids" in outputs else outputs

    with pytest.raises(ParityError, match=message):
        check(run, reference)


def test_equal_logits_must_be_ordered_by_id() -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0)
    weights["embedding.weight"][:] = 0
    weights["head.bias"][:] = 0
    reference = Reference(model, weights)
    right = graphs_of(reference)
    check(lambda role, feeds: with_top(right(role, feeds)), reference)

    def run(role: Role, feeds: Tensors) -> Tensors:
        outputs = with_top(right(role, feeds))
        return outputs | {"top_ids": outputs["top_ids"][:, ::-1]} if "top_ids" in outputs else outputs

    with pytest.raises(ParityError, match="top_ids"):
        check(run, reference)


@pytest.mark.parametrize(("role", "case"), [("window", "window, a batch"), ("step", "step, a stream")])
def test_the_error_names_a_graph_with_more_than_half_of_the_certified_rounding(role: Role, case: str) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0, recurrent=0.05)
    reference = Reference(model, weights)
    right, zeros = graphs_of(reference), reference.zero_state(len(TOKENS))

    def run(asked: Role, feeds: Tensors) -> Tensors:
        outputs = right(asked, feeds)
        return outputs | {"hidden": outputs["hidden"] + np.float32(1e-5)} if asked == role else outputs

    seen = 1e-5 * np.sqrt(model.hidden)
    for carried in (2.1 * seen, 1.9 * seen):
        certificate = certify(model, weights, 8, None).model_copy(update={"rounding": rounding(2 * carried)})
        if carried > 2 * seen:
            check_graphs(reference, run, TOKENS, LENGTHS, zeros, certificate)
            continue
        with pytest.raises(RoundingError, match=case):
            check_graphs(reference, run, TOKENS, LENGTHS, zeros, certificate)


@pytest.mark.parametrize("order", [(0, 1, 3, 2), (1, 0, 2, 3), (0, 2, 1, 3)], ids=["ifog", "figo", "igfo"])
def test_a_wrong_gate_order_is_detected(order: tuple[int, ...]) -> None:
    model = architecture("lstm")
    weights = random_weights(model, seed=0)
    wrong = {
        name: tensor.reshape(4, model.hidden, -1)[list(order)].reshape(tensor.shape) if ".cell." in name else tensor
        for name, tensor in weights.items()
    }
    with pytest.raises(ParityError, match="window"):
        check(graphs_of(Reference(model, wrong)), Reference(model, weights))


def whole_numbers(factor: int) -> Run:
    """Returns a stand-in for graphs with one state tensor. It computes with integers, so its results do not depend on
    the batch. At every token, it multiplies the state by `factor`."""

    def run(role: Role, feeds: Tensors) -> Tensors:
        state = feeds.get("layers.0.h", np.zeros((len(next(iter(feeds.values()))), 6), np.float32))
        if role == "head":
            state = feeds["hidden"]
        elif role == "step":
            state = (factor * state + feeds["tokens"][:, None]) % 97
        else:
            for column in feeds["tokens"].T:  # all rows have the same length
                state = (factor * state + column[:, None]) % 97
        outputs = {"logits": state + np.arange(6), "hidden": state, "next.layers.0.h": state}
        return {name: value.astype(np.float32) for name, value in outputs.items() if role != "head" or name == "logits"}

    return run


MODEL = architecture("rnn_tanh")


@pytest.mark.parametrize(
    ("role", "name"),
    [
        ("window", "logits"),
        ("window", "hidden"),
        ("advance", "next.layers.0.h"),
        ("scan", "next.layers.0.h"),
        ("head", "logits"),
    ],
)
def test_the_error_names_a_graph_whose_bits_differ(role: Role, name: str) -> None:
    right = whole_numbers(3)

    def run(asked: Role, feeds: Tensors) -> Tensors:
        outputs = right(asked, feeds)
        return outputs | {name: np.nextafter(outputs[name], np.float32(200))} if asked == role else outputs

    assert compare_bits(MODEL, right, 3).differ is None
    differ = compare_bits(MODEL, run, 3).differ
    assert differ is not None and differ.startswith(f"{role}: ")
    assert differ.endswith("is not bitwise equal to that of step in a batch of 3")


def test_the_error_names_a_row_whose_bits_depend_on_its_batch() -> None:
    right = whole_numbers(3)

    def run(asked: Role, feeds: Tensors) -> Tensors:
        outputs = right(asked, feeds)
        alone = asked == "step" and len(feeds["tokens"]) == 1
        return outputs | {"hidden": outputs["hidden"] + np.float32(1e-3)} if alone else outputs

    differ = compare_bits(MODEL, run, 4).differ
    assert differ is not None and differ.startswith("step of one row: hidden")


def test_the_digest_depends_on_the_values_and_not_on_the_batch() -> None:
    one, other = whole_numbers(3), whole_numbers(5)
    assert compare_bits(MODEL, one, 2).digest == compare_bits(MODEL, one, 5).digest
    assert compare_bits(MODEL, one, 2).digest != compare_bits(MODEL, other, 2).digest
