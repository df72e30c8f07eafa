"""Tests of the run on a GPU machine. A rehearsal runs the code of every part on the CPU, with small sizes."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module, metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from packaging.requirements import Requirement

from benchmarks.gpu import pack as packing
from benchmarks.gpu import parts as kinds
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.clients import wane
from benchmarks.gpu.pack import PackError, pack, requirements, unpack
from benchmarks.gpu.part import Part, Skipped
from benchmarks.gpu.parts import PARTS, Kind
from benchmarks.gpu.precision import in_bf16
from benchmarks.gpu.reach import TARGETS, summary
from benchmarks.gpu.scan import forgetting_lstm, in_chunks
from benchmarks.gpu.step import MODELS, PLAN, bound_s
from benchmarks.gpu.train import EXPERIMENT, SMALL, PlainModel, corpus_of
from tests.docs.transcript import parse, run
from wane.models.networks import Network
from wane.models.vocabulary import Vocabulary
from wane.training.config import DataConfig, Experiment
from wane.training.data import load_corpus
from wane.training.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
LONG = 10
"""The minutes of a rehearsal here. It takes less than one on a machine with nothing else to do, but a busy machine must
not cut off a part."""


def records(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


@pytest.mark.slow
def test_a_rehearsal_measures_every_part(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", f"--out={tmp_path}", "--device=cpu", f"--minutes={LONG}"]
    variables = {name: value for name, value in os.environ.items() if name != "WANE_DATA"} | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = records(tmp_path)
    assert {name: found[name].get("reason", found[name]["status"]) for name in PARTS} == dict.fromkeys(PARTS, "done")
    assert found["chip"]["rates"].keys() == {"float32", "tf32", "bf16"}
    assert all(one["residual"] <= 1e-5 for one in found["scan"]["parallel"])
    assert found["scan"]["in_order"]["tokens"] == found["scan"]["tokens"] and found["scan"]["times_in_order"] > 0
    assert len(found["scan"]["windows"]) == 6
    assert len(found["train"]["curve"]) == 3 and found["train"]["stopped"] == "the last step"
    (bundle,) = found["parity"]["bundles"]
    assert bundle["largest_difference"] < 1e-3 and bundle["states_on"] == ["cpu"] and bundle["bytes_to_device"] > 0
    for way in ("runner", "runner, CUDA graphs", "torch"):
        measured = [step for step in found["step"]["steps"] if step["way"] == way and step["format"] == "float32"]
        assert len(measured) == 3 and all(step["seconds"]["median"] > 0 for step in measured)
    assert [load["connections"] for load in found["served"]["loads"]] == [4, 16]
    assert [one["replicas"] for one in found["cores"]["replicas"]] == [1, 2]
    assert all(one["steps_per_s"] > 0 for one in found["served"]["loads"] + found["cores"]["replicas"])
    assert found["summary"]["parts"] == dict.fromkeys(PARTS, "done")
    assert not any(target["reached"] for target in found["summary"]["targets"])
    assert "min left" in ended.stdout and "A rehearsal" in ended.stdout


def test_the_commands_of_the_page_print_its_output(tmp_path: Path) -> None:
    commands = parse((ROOT / "docs/gpu.md").read_text(encoding="utf-8"))
    assert len(commands) == 1
    environment = {**os.environ, "PYTHON": sys.executable, "NO_COLOR": "1", "COLUMNS": "300"}
    run(commands, ROOT, environment, lambda text: text.replace("runs/rehearsal", str(tmp_path / "rehearsal")))
    assert {
        name: record["status"] for name, record in records(tmp_path / "rehearsal").items() if name != "summary"
    } == {
        "chip": "done",
        "scan": "done",
    }


def endless(part: Part) -> None:
    server = subprocess.Popen(["sleep", "600"], process_group=0)  # in a group of its own, as the servers are
    part.keep(figure=1, server=server.pid)
    part.say("begun")
    time.sleep(600)


def ended(pid: int) -> bool:
    """Returns whether a process has ended. It may still be in the table of processes until its parent reads its end."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def short(part: Part) -> None:
    part.keep(figure=2)


def skipping(part: Part) -> None:
    raise Skipped("needs a moon")


def lacking(part: Part) -> None:
    import_module("no_such_package")


def failing(part: Part) -> None:
    part.keep(figure=3)
    raise ValueError("a bad figure")


def dying(part: Part) -> None:
    part.keep(figure=4)
    os._exit(7)


MADE: dict[str, Callable[[Part], None]] = {
    "chip": endless, "scan": short, "train": skipping, "parity": lacking, "step": failing, "served": dying
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads, from Python 3.12 on
def test_a_part_that_does_not_end_in_time_loses_only_its_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parts are other functions, in processes that are forked, so that they exist there too."""
    monkeypatch.setattr("benchmarks.gpu.__main__.GRACE_S", 0.0)
    monkeypatch.setattr("benchmarks.gpu.__main__.get_context", fork)
    for name, function in MADE.items():
        monkeypatch.setitem(PARTS, name, Kind("a test", 0.02 if name == "chip" else 1.0, name, function.__name__))
    monkeypatch.setattr(kinds, "import_module", lambda _: sys.modules[__name__])
    argv = ["gpu", f"--out={tmp_path}", "--device=cpu", "--minutes=2", f"--parts={','.join(MADE)}"]
    monkeypatch.setattr(sys, "argv", argv)
    assert main() == 1
    found = records(tmp_path)
    assert (found["chip"]["status"], found["chip"]["figure"]) == ("cut off", 1)
    assert "ended after its limit" in found["chip"]["reason"]
    assert ended(found["chip"]["server"])
    assert (found["scan"]["status"], found["scan"]["figure"]) == ("done", 2)
    assert (found["train"]["status"], found["train"]["reason"]) == ("skipped", "needs a moon")
    assert (found["parity"]["status"], found["parity"]["reason"]) == ("skipped", "needs the package no_such_package")
    assert (found["step"]["status"], found["step"]["reason"]) == ("failed", "ValueError: a bad figure")
    assert (found["served"]["status"], found["served"]["reason"]) == ("cut off", "its process ended")
    assert found["summary"]["parts"]["scan"] == "done"


def fork(_: str) -> Any:
    context: Any = get_context("fork")
    context.set_forkserver_preload = lambda _: None
    return context


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out=x", "--parts=chip,lunch"], "'lunch' is not a part"),
        (["--out=x", "--minutes=0"], "'0' is not a number of minutes"),
        (["--device=cpu"], "--out is missing"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    with pytest.raises(SystemExit):
        main()
    assert message in capsys.readouterr().err


def needed(name: str, found: set[str]) -> set[str]:
    """Adds the distribution `name` and all that it requires to `found`."""
    if name not in found and importlib.util.find_spec(name.replace("-", "_").replace("pyyaml", "yaml")) is not None:
        found.add(name)
        for line in metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                needed(requirement.name.lower(), found)
    return found


def test_the_first_three_parts_need_torch_and_numpy_alone(tmp_path: Path) -> None:
    """They run with links to torch, its requirements and numpy, without the other packages of this interpreter. The
    last part resumes its run, which can be opened where the other packages are."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for name in needed("torch", set()) | {"numpy"}:
        for file in metadata.files(name) or []:
            first = Path(file.parts[0])
            if file.parts[0] != ".." and not (packages / first).is_symlink():
                (packages / first).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / first)
    command = [sys.executable, "-S", "-m", "benchmarks.gpu", f"--out={tmp_path}", "--device=cpu", f"--minutes={LONG}"]
    variables = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(packages)]), "OMP_NUM_THREADS": "1"}
    lacks = "import importlib.util as util; assert not any(map(util.find_spec, ['pydantic', 'tokenizers', 'onnx']))"
    subprocess.run([sys.executable, "-S", "-c", lacks], env=variables, check=True)
    for parts in ("chip,scan,train", "train"):
        ended = subprocess.run(
            [*command, f"--parts={parts}"], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found = records(tmp_path)
        assert {name: found[name].get("reason", found[name]["status"]) for name in parts.split(",")} == dict.fromkeys(
            parts.split(","), "done"
        )
    assert found["train"]["first_step"] == SMALL["training"]["steps"]
    run = RunFolder(tmp_path / "run")
    assert run.experiment().name == "word-chip"
    assert run.network(Vocabulary("words", run.tokenizer_json()).size)[1]["step"] <= SMALL["training"]["steps"]


def test_the_part_train_has_the_experiment_and_the_vocabulary_of_the_trainer(tmp_path: Path) -> None:
    chosen = Experiment.read(ROOT / "training" / "experiments" / "word-chip.toml")
    assert EXPERIMENT.read_text(encoding="utf-8") == chosen.model_dump_json(indent=2) + "\n"
    document = json.loads(EXPERIMENT.read_text(encoding="utf-8"))
    plain, whole = PlainModel(**document["model"]).architecture(50), chosen.model.architecture(50)
    for name in (set(vars(plain)) | {"residual"}) - {"layers"}:
        assert getattr(plain, name) == getattr(whole, name)
    assert [layer.kind for layer in plain.fading] == [layer.kind for layer in whole.fading]
    for found, place in zip(plain.placed(), whole.placed(), strict=True):
        assert found.inputs == place.inputs
        for name in set(vars(found.layer)) - {"shape", "missing"}:
            assert getattr(found.layer, name) == getattr(place.layer, name)
        if place.layer.finite:
            assert found.layer.tensors(found.inputs) == place.layer.tensors(place.inputs)
        else:
            assert set(found.layer.missing) == set(place.layer.missing)
    assert [tensor.shape for tensor in plain.state_tensors()] == [tensor.shape for tensor in whole.state_tensors()]
    assert Network(cast(Any, plain)).weights().keys() == Network(whole).weights().keys()
    text = ROOT / "LICENSE"
    data = DataConfig(kind="text", path=text, vocabulary="words", vocabulary_size=100)
    found, expected = corpus_of({"kind": "text", "path": text, "vocabulary_size": 100}), load_corpus(data)
    assert found.tokenizer_json == expected.tokenizer_json
    assert found.words == expected.words
    for split, stream in expected.streams.items():
        assert np.array_equal(found.streams[split], stream)


# The parts


def test_parallel_chunks_have_the_outputs_of_the_lstm_in_order() -> None:
    lstm = forgetting_lstm(16, "cpu")
    x = torch.randn(1024, 16)
    with torch.no_grad():
        whole = lstm(x.unsqueeze(1))[0].squeeze(1)
        y, residual = in_chunks(lstm, x, 4, 200)
        short, large = in_chunks(lstm, x, 4, 8)
    assert residual < 1e-5 < 1e-2 < large
    torch.testing.assert_close(y, whole, rtol=1e-4, atol=1e-5)
    assert (short - whole).abs().max() > 1e-3


def test_the_roofline_of_a_step_counts_every_matrix_but_the_table() -> None:
    limits = {"bytes_per_s": 1e12, "rates": {"float32": 1e13, "bf16": 1e15}}
    network = Network(MODELS["lstm-32"])
    numbers = 4 * 32 * 32 + 32 * 256
    assert bound_s(network, 4096, "float32", {**limits, "bytes_per_s": 1e30}) == pytest.approx(
        2 * 4096 * numbers / 1e13
    )
    moved = 2 * numbers + 4 * 10 * (2 * 64 + 256)
    assert bound_s(network, 10, "bf16", limits) == pytest.approx(moved / 1e12)


def test_products_in_bf16_have_the_result_of_rounded_factors() -> None:
    weight = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["y"]),
        helper.make_node("Tanh", ["y"], ["z"]),
        helper.make_node("MatMul", ["x", "w"], ["again"]),
    ]
    values = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", width])
        for name, width in (("x", 5), ("z", 7), ("again", 7))
    }
    graph = helper.make_graph(
        nodes, "g", [values["x"]], [values["z"], values["again"]], [numpy_helper.from_array(weight, "w")]
    )
    model = onnx.load_from_string(
        in_bf16(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)]).SerializeToString())
    )
    onnx.checker.check_model(onnx.shape_inference.infer_shapes(model, strict_mode=True))
    assert [node.op_type for node in model.graph.node] == ["Cast", "Cast", "MatMul", "Cast", "Tanh", "MatMul", "Cast"]
    x = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    found = ReferenceEvaluator(model).run(None, {"x": x})
    rounded = torch.from_numpy(x).bfloat16().float() @ torch.from_numpy(weight).bfloat16().float()
    np.testing.assert_allclose(found[1], rounded.numpy(), rtol=2e-2, atol=2e-2)
    assert found[1].dtype == np.float32 and not np.allclose(found[1], x @ weight, rtol=1e-6)


def test_the_summary_compares_a_run_with_its_reach(tmp_path: Path) -> None:
    def put(name: str, **record: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps({"status": "done", **record}))

    step = {"way": "runner", "seconds": {"median": 1e-3}, "batch": 8192, "format": "bf16", "model": "lstm-1024"}
    torch_step = {**step, "way": "torch", "share": 0.9, "device_s": 1e-3}
    one = {**step, "batch": 1, "format": "float32", "model": "lstm-256", "share": 0.1, "device_s": 28e-6}
    put(
        "step",
        steps=[{**step, "share": 0.61, "device_s": 1e-3}, torch_step, one, {**step, "error": "no", "seconds": 1}][:3],
    )
    put("scan", times_in_order=150.0)
    put("cores", replicas=[{"replicas": count, "steps_per_s": 9e3 * count**0.9} for count in (1, 2, 16)])
    put(
        "served",
        loads=[
            {"connections": 64, "steps_per_s": 1, "busy_share": 0.1},
            {"connections": 1024, "steps_per_s": 2e4, "busy_share": 0.3},
        ],
    )
    lines, record = summary(tmp_path)
    found = {target["what"]: (target["measured"], target["reached"]) for target in record["targets"]}
    assert len(found) == len(TARGETS)
    values = list(found.values())
    assert values[0] == (0.61, True)
    assert values[1] == (150.0, False)
    assert values[2] == (pytest.approx(28), True)
    assert values[3] == (None, None)
    assert values[4:6] == [(2e4, None), (0.3, None)]
    assert values[6] == (pytest.approx(16**0.9), True)
    assert [line.split()[-1] for line in lines[1:3]] == ["reached", "missed"]
    assert PLAN[0] == ("lstm-1024", (8192,)), "the first reach is measured first"


def test_the_service_finds_the_packages_and_the_cuda_libraries_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service does not load torch, which would load the libraries for it."""
    libraries = [
        tmp_path / "nvidia" / "cu13" / "lib",
        tmp_path / "nvidia" / "cudnn" / "lib",
        tmp_path / "torch" / "lib",
    ]
    for folder in libraries:
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/cuda")
    served = wane(["--device=cuda"])
    assert served.environment["LD_LIBRARY_PATH"].split(os.pathsep) == [*map(str, libraries), "/opt/cuda"]
    assert served.environment["PYTHONPATH"].split(os.pathsep) == [str(ROOT), str(tmp_path)]
    assert served.command[-1] == "--device=cuda"


# Packages


def wheel(folder: Path, name: str, text: str) -> None:
    """Writes a wheel with one module."""
    import zipfile

    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", text)
        info = f"{name}-1.0.dist-info"
        file.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{info}/RECORD", "")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packed folder of two small wheels in three pieces. A fake pip downloads them."""
    asked: list[list[str]] = []

    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        folder = Path(command[command.index("--dest") + 1])
        wheel(folder, "first", "VALUE = 1\n")
        wheel(folder, "second", f"VALUE = {'2' * 1500}\n")
        return subprocess.CompletedProcess(command, 0)

    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "run", download)
        patched.setattr(packing, "MB", 5000)
        pack(tmp_path / "packed", f"{sys.version_info.major}.{sys.version_info.minor}", 1, "cuda")
    assert "--python-version" in asked[0] and asked[0][-len(requirements("cuda")) :] == requirements("cuda")
    assert len(list((tmp_path / "packed").glob("packages.*"))) == 3
    return tmp_path / "packed"


def test_packages_are_cut_joined_and_installed_without_a_network(packed: Path, tmp_path: Path) -> None:
    unpack(packed, tmp_path / "installed")
    code = "import first, second; print(first.VALUE + second.VALUE)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True
    )
    assert int(ran.stdout) == 1 + int("2" * 1500)
    with pytest.raises(PackError, match="installed is not empty"):
        unpack(packed, tmp_path / "installed")
    with pytest.raises(PackError, match="packed is not empty"):
        pack(packed, "3.12", 1, "cuda")


def test_a_damaged_or_missing_piece_is_named(packed: Path, tmp_path: Path) -> None:
    piece = packed / "packages.001"
    data = piece.read_bytes()
    piece.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(PackError, match=r"packages\.001 is damaged"):
        unpack(packed, tmp_path / "installed")
    piece.unlink()
    with pytest.raises(PackError, match=r"packages\.001 is missing"):
        unpack(packed, tmp_path / "installed")
    (packed / "pieces.json").unlink()
    with pytest.raises(PackError, match=r"pieces\.json cannot be read"):
        unpack(packed, tmp_path / "installed")
    assert not (tmp_path / "installed").exists()


def test_packages_of_another_python_are_refused(packed: Path, tmp_path: Path) -> None:
    index = json.loads((packed / "pieces.json").read_text())
    (packed / "pieces.json").write_text(json.dumps(index | {"python": "3.99"}))
    with pytest.raises(PackError, match=r"wheels for Python 3\.99"):
        unpack(packed, tmp_path / "installed")


@pytest.mark.parametrize(("python", "piece_mb", "message"), [("3", 1, "not a version"), ("3.12", 0, "not a positive")])
def test_wrong_versions_and_sizes_are_named(python: str, piece_mb: int, message: str, tmp_path: Path) -> None:
    with pytest.raises(PackError, match=message):
        pack(tmp_path, python, piece_mb, "cuda")


def test_the_packages_are_those_of_the_service_with_one_onnxruntime_and_no_torch() -> None:
    cuda, cpu = requirements("cuda"), requirements("cpu")
    assert sum(one.startswith("onnxruntime") for one in cuda) == sum(one.startswith("onnxruntime") for one in cpu) == 1
    assert any(one.startswith("onnxruntime-gpu>=") for one in cuda) and not any("[" in one for one in cuda)
    assert not any(one.startswith("torch") for one in cuda + cpu)
    for name in ("fastapi", "tokenizers", "onnx>"):
        assert any(one.startswith(name) for one in cuda) and any(one.startswith(name) for one in cpu)
