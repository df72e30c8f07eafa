"""Makes a bundle of a graph of one step: checks the file, finds its inputs and outputs, wraps it in loops, and compares
the result with onnxruntime's on the file itself."""

from __future__ import annotations

import hashlib
import platform
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from datetime import UTC, datetime
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper
from safetensors.numpy import save

from wane.models.architecture import ImportedGraph
from wane.models.bundle import IMPORTED, Bundle, BundleError, verify_graphs, write_bundle
from wane.models.imported.first_run import MEMORY_BYTES, LimitedProcess, check_apart, naming, run_apart
from wane.models.imported.graph_file import GraphError, read_graph
from wane.models.imported.roles import Step, build_roles, read_step
from wane.models.imported.rows import RunStep, compare_rows
from wane.models.imported.signature import Arrays, Signature, declared, find_inputs, find_outputs
from wane.models.manifest import SCHEMA_VERSION, Manifest, Provenance, Role, Start, VocabularyInfo
from wane.models.parity import Tensors, compare_bits, log_softmax
from wane.models.tokenizer_files import TOKENIZER, TOKENIZER_CONFIG, tokenizer_config, with_decoder
from wane.models.vocabulary import Vocabulary
from wane.models.weights import tensor_extents

WEIGHTS = "weights.safetensors"

TOLERANCE = 1e-5
"""The largest difference of a log-probability, or of a state divided by its largest value if that is above 1, between
the bundle's graphs and the file."""

TOLERANCE_HALF = 1e-2
"""The same for a graph with float16 states or weights: its own rounding in another batch is up to 1e-3."""

ROWS, TOKENS = 4, 24
"""The number and the length of the sequences of random tokens on which the graphs are compared with the file."""

CHECK_SECONDS = 600.0
"""The time limit of all runs that compare the bundle with the file, in seconds."""

COPIES = 10
"""How many copies of the weights onnxruntime may have in memory while five graphs are open."""

BATCH = 64
"""The number of rows with which the bits of a batch are compared with those of one row: the service's default largest
batch."""

PARSED_HERE = 1 << 20
"""The size of a file up to which it is parsed in this process. Its parsed form may be a hundred times as large. A
larger file is first parsed in a process whose memory is limited."""

LOGITS_AT_ONCE = 1 << 22
"""The largest number of logits of one run that reads every token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Import:
    """What is to be imported, and as what. `pairs`: the name of the next value of each state. `tokens`, `logits`: the
    names of this input and this output, None to find them. `added`: the number of tokens at the end of the vocabulary
    that the graph does not know. The other fields are those of the manifest."""

    path: Path
    vocabulary: Vocabulary
    tokenizer_json: str
    name: str
    version: str
    window: int
    max_window: int
    start: Start
    command: str
    pairs: Mapping[str, str]
    tokens: str | None = None
    logits: str | None = None
    added: int = 0
    attribution: str | None = None


@dataclass(frozen=True, slots=True)
class Imported:
    """The result. `difference`: the largest difference from onnxruntime's results on the file (see TOLERANCE). `notes`:
    what the graph's own form changes for the service."""

    manifest: Manifest
    difference: float
    notes: tuple[str, ...]


def import_graph(asked: Import, target: Path, *, replace: bool = False) -> Imported:
    """Writes the bundle `target`. Raises GraphError if the file is refused or its results differ, BundleExistsError if
    the bundle at `target` may not be replaced."""
    with naming(asked.path):
        return _import(asked, target, replace)


def _import(asked: Import, target: Path, replace: bool) -> Imported:
    path, size = asked.path, asked.vocabulary.size - asked.added
    if path.is_file() and path.stat().st_size > PARSED_HERE:
        check_apart(path)
    model = read_graph(path)
    inputs = find_inputs(model.graph, asked.tokens)
    rows = inputs.probe()
    probe = np.arange(rows) % size
    outputs = run_apart(path, inputs.feeds(probe, inputs.zeros(rows)))
    signature = find_outputs(inputs, outputs, size, asked.pairs, asked.logits)
    step = read_step(model, path.parent, signature, size, outputs[signature.logits].ndim, asked.added)
    unread = _unread(model.graph, signature, outputs)
    memory = MEMORY_BYTES + COPIES * sum(value.nbytes for value in step.tensors.values())
    with LimitedProcess(path, CHECK_SECONDS, memory, "comparing the bundle with it") as process:
        return _write(asked, target, replace, step, unread, process)


def _write(
    asked: Import, target: Path, replace: bool, step: Step, unread: Sequence[str], process: LimitedProcess
) -> Imported:
    """Wraps the step, writes the bundle, and compares it with the file. All graphs run in `process`."""
    recorded = _Recorded.of(asked.path, step, process)
    weights = save(step.external())
    together, graphs, reason = _wrap(step, recorded, weights, process)
    notes = _notes(step, unread, reason)
    vocabulary = asked.vocabulary
    tokenizer_json = with_decoder(vocabulary.kind, asked.tokenizer_json)
    architecture = ImportedGraph(
        vocabulary_size=vocabulary.size,
        width=step.width,
        tensors=step.states,
        rows="together" if together else "one by one",
    )
    info = VocabularyInfo(
        kind=vocabulary.kind,
        size=vocabulary.size,
        eos_id=vocabulary.eos_id,
        sha256=Vocabulary(vocabulary.kind, tokenizer_json, vocabulary.reserved).sha256,
        reserved=tuple(sorted(vocabulary.reserved)) if vocabulary.reserved or vocabulary.has_special else None,
    )
    names: dict[Role, str] = {role: f"{role}.onnx" for role in graphs}
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        name=asked.name,
        version=asked.version,
        description=f"Imported from {asked.path.name}.",
        architecture=architecture,
        vocabulary=info,
        start=asked.start,
        state=architecture.state_tensors(),
        window=asked.window,
        max_window=asked.max_window,
        opset=step.opset,
        graphs=names,
        weights=WEIGHTS,
        tokenizer=TOKENIZER,
        files={},
        certificate=IMPORTED,
        provenance=_provenance(asked, notes),
    )
    files = {names[role]: data for role, data in graphs.items()}
    files |= {WEIGHTS: weights, TOKENIZER: tokenizer_json.encode()}
    files[TOKENIZER_CONFIG] = tokenizer_config(vocabulary).encode()
    worst, differ = 0.0, None

    def check(bundle: Bundle) -> None:
        nonlocal worst, differ
        for role in names:
            process.open(role, bundle.graph_path(role))
        run: RunStep = process.run
        worst = max(recorded.compare(run), verify_graphs(bundle, run))
        _read_every_token(run, step)
        _read_longest_window(run, step, asked.max_window)
        differ = compare_bits(architecture, run, BATCH).differ

    try:
        written = write_bundle(target, manifest, files, check, replace=replace)
    except BundleError as error:
        place = target.resolve()
        folder = rf"{re.escape(f'{place.parent}/.{place.name}.')}[^/]*/{re.escape(place.name)}(/|: )"
        raise GraphError(re.sub(folder, "", str(error))) from error
    if differ is not None:
        notes += (
            f"its runs are not bit-identical on this machine, so that error_bound is null in every answer: {differ}",
        )
    return Imported(written, worst, notes)


def _wrap(
    step: Step, recorded: _Recorded, weights: bytes, process: LimitedProcess
) -> tuple[bool, dict[Role, bytes], str | None]:
    """Returns whether the rows of a batch run together, the bundle's graphs, and why the rows do not run together."""
    inputs, extents, reason = step.signature.inputs, tensor_extents(weights), None
    alone_graphs = build_roles(step, WEIGHTS, extents, together=False)
    lonely = [port.name for port in (inputs.tokens, *inputs.states) if port.axis is None]
    if lonely:
        return False, alone_graphs, f"{lonely[0]!r} has no axis for a batch"
    for changed in inputs.batch_axes():
        lifted = replace_fields(step, signature=replace_fields(step.signature, inputs=changed))
        graphs = build_roles(lifted, WEIGHTS, extents, together=True)
        try:
            with _opened(graphs, weights, process, "together") as together:
                recorded.compare(together, ("step",))
                recorded.compare(together, ("step",), BATCH // ROWS)
                with _opened(alone_graphs, weights, process, "alone") as alone:
                    compare_rows(step, together, alone, recorded.tolerance)
            return True, graphs, None
        except GraphError as error:
            reason = reason or str(error)
    return False, alone_graphs, reason


def _unread(graph: onnx.GraphProto, signature: Signature, outputs: Arrays) -> list[str]:
    """Returns the outputs that are not read. Raises GraphError if one may be the next value of an input that has a
    default value: such an input is a constant here, and would never change."""
    unread = [name for name in outputs if name not in (signature.logits, *signature.after)]
    given = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in given:
            continue
        element, dims = declared(value)
        for name in unread:
            shape, own = outputs[name].shape, helper.np_dtype_to_tensor_dtype(outputs[name].dtype)
            fits = len(shape) == len(dims) and all(
                size == dim or not isinstance(dim, int) for size, dim in zip(shape, dims, strict=True)
            )
            if fits and element == own:
                raise GraphError(
                    f"the input {value.name!r} has a default value in the file, so that it is a constant here. But "
                    f"the output {name!r} may be its next value. If it is a state, remove the initialiser: a state "
                    "begins with zeros. If not, remove it from the inputs, or the output"
                )
    return unread


def _notes(step: Step, unread: Sequence[str], reason: str | None) -> tuple[str, ...]:
    inputs = step.signature.inputs
    pairs = (f"{port.name} <- {name}" for port, name in zip(inputs.states, step.signature.after, strict=True))
    notes = [f"the next value of each state: {', '.join(pairs)}; the logits: {step.signature.logits}"]
    if unread:
        notes.append(f"outputs that are not read: {', '.join(unread)}")
    if reason is not None:
        why = "it has a fixed batch of 1" if inputs.fixed else "its rows affect one another, or cannot run together"
        notes.append(f"the rows of a batch run one by one: {why} ({reason})")
    elif inputs.fixed:
        notes.append("its batch of 1 was lifted: the rows of a batch run together")
    for port in inputs.states:
        if port.dtype != np.float32:
            how = "as a float32 number" if port.pieces == 1 else f"as {port.pieces} float32 numbers"
            notes.append(f"a value of the state {port.name!r} of type {port.dtype} is kept exactly, {how}")
    if step.hidden is None:
        notes.append("the last matrix was not found: a state is kept with its logits, which need more memory")
    return tuple(notes)


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What onnxruntime computes with the file itself, one row at a time, from the zero state.

    tokens: (ROWS, TOKENS). logits: (ROWS, TOKENS, V). states: for each state after the last token, (ROWS, *row), as
    `Port.values` returns it.
    """

    step: Step
    tokens: NDArray[np.int64]
    logits: NDArray[np.float64]
    states: list[NDArray[Any]]
    tolerance: float

    @classmethod
    def of(cls, path: Path, step: Step, process: LimitedProcess) -> _Recorded:
        """Runs the file. Raises GraphError if it fails or if a result is not finite."""
        signature, inputs = step.signature, step.signature.inputs
        wanted = [signature.logits, *signature.after]
        process.check(path)
        process.open("file", path)
        tokens = np.random.default_rng(0).integers(step.vocabulary, size=(ROWS, TOKENS), dtype=np.int64)
        logits, states = [], []
        for row in tokens:
            state, scores = inputs.zeros(1), []
            for token in row:
                outputs = process.run("file", inputs.feeds(token[None], state), wanted)
                score, *state = (outputs[name] for name in wanted)
                scores.append(score.reshape(-1).astype(np.float64))
            logits.append(np.stack(scores))
            states.append(
                [
                    value.reshape(port.row if port.pieces > 1 else port.kept)
                    for port, value in zip(inputs.states, state, strict=True)
                ]
            )
        process.close("file")
        found = np.stack(logits)
        if not np.isfinite(found).all():
            raise GraphError("its logits are not finite: every token needs a finite logit")
        after = [
            np.stack(each).astype(np.float64 if np.issubdtype(port.dtype, np.floating) else np.int64)
            for port, each in zip(inputs.states, zip(*states, strict=True), strict=True)
        ]
        half = [*(port.dtype for port in inputs.states), *(value.dtype for value in step.tensors.values())]
        return cls(step, tokens, found, after, TOLERANCE_HALF if np.dtype(np.float16) in half else TOLERANCE)

    def compare(self, run: RunStep, roles: Sequence[Role] = ("step", "window", "scan"), copies: int = 1) -> float:
        """Compares graphs of the bundle with the file, in batches with `copies` rows of each sequence. Returns the
        largest difference. Raises GraphError."""
        if copies > 1:
            repeated = [np.concatenate([value] * copies) for value in (self.tokens, self.logits, *self.states)]
            tokens, logits, *states = repeated
            return _Recorded(self.step, tokens, logits, states, self.tolerance).compare(run, roles)
        rows = len(self.tokens)
        zeros = {tensor.name: np.zeros((rows, *tensor.shape), np.float32) for tensor in self.step.states}
        lengths = np.full(rows, TOKENS, np.int64)
        worst = 0.0
        if "step" in roles:
            state = zeros
            for at, column in enumerate(self.tokens.T):
                outputs = run("step", {"tokens": np.ascontiguousarray(column), **state})
                state = {name: outputs[f"next.{name}"] for name in zeros}
                worst = max(worst, self._apart("step", outputs["logits"], at))
            worst = max(worst, self._states_apart("step", outputs))
        if "window" in roles:
            outputs = run("window", {"tokens": self.tokens, "lengths": lengths})
            worst = max(worst, self._apart("window", outputs["logits"], -1), self._states_apart("window", outputs))
        if "scan" in roles:
            targets = np.roll(self.tokens, -1, axis=1)
            outputs = run("scan", {"tokens": self.tokens, "targets": targets, "lengths": lengths, **zeros})
            expected = np.take_along_axis(log_softmax(self.logits), targets[..., None], axis=2)[..., 0]
            worst = max(worst, self._within("scan", "logprobs", outputs["logprobs"], expected))
            worst = max(worst, self._states_apart("scan", outputs))
        return worst

    def _apart(self, role: Role, logits: NDArray[Any], at: int) -> float:
        own = logits[:, : self.step.vocabulary]
        return self._within(role, "log-probabilities", log_softmax(own), log_softmax(self.logits[:, at]))

    def _states_apart(self, role: Role, outputs: Tensors) -> float:
        worst = 0.0
        for port, tensor, expected in zip(
            self.step.signature.inputs.states, self.step.states, self.states, strict=True
        ):
            found = port.values(outputs[f"next.{tensor.name}"])
            whole = np.issubdtype(expected.dtype, np.integer)
            if whole and not np.array_equal(found, expected):
                raise GraphError(f"{role}: {tensor.name} differ from the file's, row by row")
            scale = max(1.0, float(np.abs(expected).max()))
            worst = max(worst, 0.0 if whole else self._within(role, tensor.name, found, expected, scale))
        return worst

    def _within(
        self, role: Role, name: str, found: NDArray[Any], expected: NDArray[np.float64], scale: float = 1.0
    ) -> float:
        if found.shape != expected.shape:
            raise GraphError(f"{role}: {name} has the shape {list(found.shape)}, expected {list(expected.shape)}")
        difference = float(np.abs(found.astype(np.float64) - expected).max()) / scale
        if not difference <= self.tolerance:  # this condition also holds for NaN
            raise GraphError(f"{role}: {name} differ by {difference:.3g} from the file's, row by row")
        return difference


def _read_every_token(run: RunStep, step: Step) -> None:
    """Runs one step with every token of the vocabulary: a token that the graph cannot read would fail a whole batch of
    requests. Raises GraphError."""
    rows = max(1, min(1024, LOGITS_AT_ONCE // step.size))
    for first in range(0, step.size, rows):
        tokens = np.arange(first, min(first + rows, step.size))
        zeros = {tensor.name: np.zeros((len(tokens), *tensor.shape), np.float32) for tensor in step.states}
        where = f"one of the tokens {first} to {int(tokens[-1])}"
        try:
            outputs = run("step", {"tokens": tokens, **zeros})
        except GraphError as error:
            raise GraphError(f"cannot read {where}: {error}") from error
        if not np.isfinite(outputs["logits"]).all():
            raise GraphError(f"its logits are not finite after {where}")


def _read_longest_window(run: RunStep, step: Step, length: int) -> None:
    """Reads a window of the largest length, as the server does when it loads the bundle. Raises GraphError."""
    tokens = np.random.default_rng(2).integers(step.size, size=(1, length))
    logits = run("window", {"tokens": tokens, "lengths": np.array([length])})["logits"]
    if not np.isfinite(logits).all():
        raise GraphError(f"its logits are not finite after {length} tokens (--max-window)")


@contextmanager
def _opened(graphs: Mapping[Role, bytes], weights: bytes, process: LimitedProcess, name: str) -> Iterator[RunStep]:
    """Opens graphs in a temporary folder. Yields the function that runs them. Raises GraphError."""
    roles: tuple[Role, ...] = ("step", "advance", "head")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / WEIGHTS).write_bytes(weights)
        for role in roles:
            place = Path(folder) / f"{role}.onnx"
            place.write_bytes(graphs[role])
            process.open(f"{name} {role}", place)
    try:
        yield lambda role, feeds: process.run(f"{name} {role}", feeds)
    finally:
        for role in roles:
            process.close(f"{name} {role}")


def _provenance(asked: Import, notes: tuple[str, ...]) -> Provenance:
    """Returns the provenance. The figures of the training are 0, because Wane did not train the model."""
    digest = hashlib.sha256(asked.path.read_bytes()).hexdigest()
    imported = {"file": asked.path.name, "sha256": digest, "notes": list(notes)}
    return Provenance(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=asked.command,
        config={"imported": imported},
        seed=0,
        steps=0,
        best_step=0,
        git_commit=None,
        data={},
        versions={name: version_of(name) for name in ("numpy", "onnx", "onnxruntime")},
        hardware=platform.machine(),
        train_wall_s=0.0,
        attribution=asked.attribution,
    )
