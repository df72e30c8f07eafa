from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from tests.training.audit.foreign_models import VOCABULARY, AwdLstm, Gru4Rec, Plain, saved
from tests.training.audit.test_vocabulary import byte_level
from tests.training.corpora import REAL_TEXT, experiment, text_corpus, write_events
from wane.cli import main
from wane.models.bundle import Bundle
from wane.models.certificate import certify
from wane.models.layer_registry import Kind
from wane.service.runners.onnx import OnnxRunner
from wane.training.audit.report import AuditReport
from wane.training.audit.vocabulary import read_names
from wane.training.config import ModelConfig
from wane.training.data import load_whole
from wane.training.errors import DataError
from wane.training.run import train

NAMES = ("</s>", "<unk>", *"abcdefghijk")
assert len(NAMES) == VOCABULARY


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file of events and a file of their names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    sequences = [[NAMES[2 + index] for index in generator.integers(11, size=12)] for _ in range(30)]
    write_events(tmp_path / "events.jsonl", sequences)
    (tmp_path / "names.json").write_text(json.dumps(NAMES))
    return tmp_path


def scaled(module: Plain, recurrent: float) -> Plain:
    """Multiplies the module's recurrent matrix by `recurrent`. If `recurrent` is small enough, the audit proves that
    the module forgets."""
    with torch.no_grad():
        module.get_parameter("rnn.weight_hh_l0").mul_(recurrent)
    return module


def audited(folder: Path, *options: str) -> AuditReport:
    command = [
        "audit",
        str(folder / "model.pt"),
        "--data",
        str(folder / "events.jsonl"),
        "--positions",
        "20",
        "--threads",
        "1",
    ]
    assert main([*command, "--vocabulary", str(folder / "names.json"), "--max-window", "16", *options]) == 0
    return AuditReport.model_validate_json((folder / "audits" / "model" / "audit.json").read_text())


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh"])
def test_an_exported_bundle_predicts_like_the_torch_model(folder: Path, cell: Kind) -> None:
    module = Plain(cell, num_layers=2)
    saved(folder / "model.pt", {"state_dict": module.state_dict()})
    report = audited(folder, "--export", str(folder / "bundles"))
    bundle = Bundle.read(folder / "bundles" / "model")
    sequence = [0, 3, 4, 1, 12, 5, 0, 7]
    tokens = np.array([sequence], dtype=np.int64)
    outputs = OnnxRunner(bundle, "cpu", threads=1).run("window", {"tokens": tokens, "lengths": np.array([8])})
    with torch.no_grad():
        expected = module(torch.tensor(sequence)[:, None])[-1]
    assert np.allclose(outputs["logits"], expected.numpy(), atol=1e-5)
    assert bundle.vocabulary.encode_events(["a", "b", "what"]) == [2, 3, 1]

    manifest = bundle.manifest
    assert manifest.max_window == 16
    assert manifest.window == (report.recommended.p99 or 16)
    assert manifest.quality is not None
    assert manifest.quality.recurrent["audit"] == report.perplexity
    assert manifest.quality.window["audit"].positions == report.text.positions == 20
    imported = manifest.provenance.config["imported"]
    assert isinstance(imported, dict)
    assert (imported["file"], imported["sha256"]) == ("model.pt", report.model.sha256)
    assert imported["tensors"]["head.weight"] == "fc.weight"
    assert "--data events.jsonl" in manifest.provenance.command
    assert str(folder) not in manifest.model_dump_json()
    assert str(folder) not in report.model_dump_json()


EVENTS = tuple(f"item/{index}" for index in range(VOCABULARY))


def audited_events(folder: Path, module: nn.Module, *options: str) -> Bundle:
    """Audits a model of EVENTS with `wane audit --export`. Returns the exported bundle."""
    torch.save(module.state_dict(), folder / "model.pt")
    (folder / "names.txt").write_text("\n".join(EVENTS), encoding="utf-8")
    generator = np.random.default_rng(0)
    sessions = [[EVENTS[index] for index in generator.integers(VOCABULARY, size=12)] for _ in range(30)]
    write_events(folder / "sessions.jsonl", sessions)
    command = ["audit", str(folder / "model.pt"), "--data", str(folder / "sessions.jsonl"), "--name", "shop"]
    command += ["--vocabulary", str(folder / "names.txt"), "--positions", "20", "--threads", "1", "--max-window", "16"]
    assert main([*command, "--export", str(folder / "bundles"), *options]) == 0
    return Bundle.read(folder / "bundles" / "shop")


def probabilities_of(module: nn.Module, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Returns the probabilities, (V), that the module predicts after `tokens`, which it reads from the zero state."""
    with torch.no_grad():
        found: NDArray[np.float64] = torch.softmax(module(torch.tensor(tokens)[:, None])[-1, 0].double(), -1).numpy()
    return found


@pytest.mark.parametrize("width", [None, 6], ids=["one-hot into the GRU", "one-hot into a Linear"])
def test_gru4rec_is_exported_with_a_zero_start_and_answers_as_published(folder: Path, width: int | None) -> None:
    module = Gru4Rec(width).eval()
    bundle = audited_events(folder, module, "--eos", "none")
    manifest = bundle.manifest
    assert manifest.start == "zero"
    assert (manifest.vocabulary.size, manifest.vocabulary.eos_id) == (VOCABULARY + 1, VOCABULARY)
    assert manifest.quality is None
    notes = manifest.provenance.config["imported"]["notes"]  # type: ignore[index]
    assert "no event has a usual name of <eos>: <eos> is added as the last event, with probability 0" in notes
    assert any("the sequences are joined for the measurement" in note for note in notes)
    tokens = np.array([[3, 1, 4, 1, 5]])
    outputs = OnnxRunner(bundle, "cpu", threads=1).run("window", {"tokens": tokens, "lengths": np.array([5])})
    found = torch.softmax(torch.from_numpy(outputs["logits"][0]), -1).numpy()
    assert found[VOCABULARY] == 0
    assert np.allclose(found[:VOCABULARY], probabilities_of(module, tokens[0].tolist()), atol=1e-6)


def test_a_model_with_an_end_of_sequence_may_have_a_zero_start(folder: Path) -> None:
    saved(folder / "model.pt", Plain("gru").state_dict())
    report = audited(folder, "--eos", "none", "--export", str(folder / "bundles"))
    manifest = Bundle.read(folder / "bundles" / "model").manifest
    assert (manifest.start, manifest.vocabulary.size, manifest.vocabulary.eos_id) == ("zero", VOCABULARY, 0)
    assert "a sequence starts from the zero state: no token is read before its first token" in report.model.notes
    assert report.text.tokens == 30 * 12 - 1


def test_the_bundle_of_awd_lstm_predicts_like_the_torch_model(folder: Path) -> None:
    module = AwdLstm().eval()
    torch.save(module.state_dict(), folder / "model.pt")
    audited(folder, "--export", str(folder / "bundles"))
    bundle = Bundle.read(folder / "bundles" / "model")
    assert bundle.manifest.start == "token"
    tokens = np.array([[0, 3, 4, 1]])
    outputs = OnnxRunner(bundle, "cpu", threads=1).run("window", {"tokens": tokens, "lengths": np.array([4])})
    with torch.no_grad():
        expected = module(torch.from_numpy(tokens[0])[:, None])[-1]
    assert np.allclose(outputs["logits"], expected.numpy(), atol=1e-5)


def test_the_report_has_the_certificate_with_its_margins(folder: Path) -> None:
    saved(folder / "model.pt", scaled(Plain("rnn_tanh", nonlinearity="tanh"), 0.3).state_dict())
    report = audited(folder)
    assert report.certificate.contractive
    best = [margin for margin in report.margins if margin.best]
    assert [margin.layer for margin in best] == [0]
    assert best[0].factor == report.certificate.layers[0].factor
    assert best[0].margin == pytest.approx(1 - best[0].factor)
    k = report.recommended.certified
    assert k is not None
    error = report.certificate.error_bound_at(k)
    assert error is not None and error <= 1e-2
    for at in report.windows:  # the proved bound must be at least the measured distance
        bound = report.certificate.state_error_at(at.k)
        assert bound is not None
        assert at.distance.max <= bound + 1e-5


def test_a_model_without_a_certificate_is_reported_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder / "model.pt", scaled(Plain("rnn_tanh"), 9.0).state_dict())
    report = audited(folder)
    assert not report.certificate.certified
    assert report.recommended.certified is None
    assert all(margin.margin < 0 for margin in report.margins if margin.margin is not None)
    printed = capsys.readouterr().out
    assert "not certified: " in printed
    assert str(report.certificate.reason)[:40] in printed
    assert "measured at 20 positions spread evenly over the text (all of the given data)" in printed
    assert "proved, for every text              none" in printed


def test_a_model_that_diverges_is_reported_without_measurements(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder / "model.pt", Plain("rnn_tanh").state_dict())
    audited(folder)
    plot = folder / "audits" / "model" / "audit.png"
    assert plot.exists()
    saved(folder / "model.pt", scaled(Plain("rnn_tanh", nonlinearity="relu"), 12.0).state_dict())
    capsys.readouterr()
    report = audited(folder, "--nonlinearity", "relu")
    printed = capsys.readouterr().out
    assert re.fullmatch(r"the uninterrupted run overflows float32 at token \d+", str(report.unmeasured))
    assert f"not measured: {report.unmeasured}" in printed
    assert "not certified: layer 0 is not proved to forget" in printed
    assert not report.certificate.certified
    assert len(report.margins) > 1
    assert (report.perplexity, report.windows, report.gradients) == (None, (), ())
    assert (report.text.tokens, report.text.positions, report.text.gradient_positions) == (390, 0, 0)
    recommended = report.recommended
    assert (recommended.p99, recommended.max, recommended.certified, recommended.perplexity) == (None,) * 4
    assert not plot.exists()  # the plot of the previous model is deleted
    assert "audit.png" not in printed


def test_a_model_that_diverges_is_not_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder / "model.pt", scaled(Plain("rnn_tanh", nonlinearity="relu"), 12.0).state_dict())
    command = ["audit", "model.pt", "--data", "events.jsonl", "--vocabulary", "names.json", "--nonlinearity", "relu"]
    assert main([*command, "--max-window", "8", "--threads", "1", "--export", "bundles"]) == 2
    printed = capsys.readouterr().err
    assert "bundles/model was not written: the uninterrupted run overflows float32 at token" in printed
    assert not (folder / "bundles").exists()
    assert (folder / "audits" / "model" / "audit.json").exists()


@pytest.mark.parametrize("zero", ["fc", "rnn", ""])
def test_a_model_of_zeros_is_reported_plotted_and_exported(
    folder: Path, capsys: pytest.CaptureFixture[str], zero: str
) -> None:
    module = Plain()
    with torch.no_grad():
        for parameter in module.get_submodule(zero).parameters():
            parameter.zero_()
    saved(folder / "model.pt", module.state_dict())
    report = audited(folder, "--export", "bundles")
    assert all(at.gradient.max == 0 for at in report.gradients)
    printed = " ".join(capsys.readouterr().out.split())
    assert "with respect to the input i tokens before it: median 0 at i = 0 recommended k" in printed
    assert (folder / "audits" / "model" / "audit.png").read_bytes().startswith(b"\x89PNG")
    assert Bundle.read(folder / "bundles" / "model").manifest.max_window == 16


def test_the_report_has_a_table_a_plot_and_the_sample(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    report = audited(folder, "--tolerance", "0.05", "--report", "audits/model")
    printed = capsys.readouterr().out
    assert [at.k for at in report.windows] == [1, 2, 3, 4, 6, 8, 12, 16]
    assert [at.i for at in report.gradients] == [0, 1, 2, 3, 4, 6, 8, 12]
    assert all(re.search(rf"\n *{at.k} +\d", printed) for at in report.windows)
    assert "recommended k, total variation <= 0.05" in printed
    assert report.recommended.tolerance == 0.05
    assert (report.text.tokens, report.text.words, report.text.unknown) == (390, None, 0)
    assert list(report.text.files) == ["events.jsonl"]
    assert report.text.behind == 32
    plot = (folder / "audits" / "model" / "audit.png").read_bytes()
    assert plot.startswith(b"\x89PNG")


def test_a_text_is_read_up_to_the_requested_number_of_tokens(folder: Path) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    assert audited(folder, "--tokens", "100").text.tokens == 7 * 13
    assert audited(folder, "--tokens", "9999").text.tokens == 390


def test_windows_too_long_for_the_text_are_skipped(folder: Path) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    report = audited(folder, "--tokens", "52")
    assert report.text.tokens == 52
    assert max(at.k for at in report.windows) == 12


def test_a_bundle_can_be_audited(folder: Path) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    first = audited(folder, "--export", str(folder / "bundles"))
    command = ["audit", str(folder / "bundles" / "model"), "--data", str(folder / "events.jsonl")]
    assert main([*command, "--positions", "20", "--max-window", "16", "--report", "again"]) == 0
    second = AuditReport.model_validate_json((folder / "again" / "audit.json").read_text())
    assert (second.model.source, second.model.sha256) == ("bundle", None)
    assert second.windows == first.windows
    assert second.margins == first.margins
    assert first.certificate.rounding is None
    assert second.certificate == Bundle.read(folder / "bundles" / "model").manifest.certificate


def test_a_text_model_is_audited_on_a_folder_of_text(folder: Path) -> None:
    (folder / "texts" / "more").mkdir(parents=True)
    (folder / "texts" / "a.txt").write_text("the cat sat on the mat\n" * 20)
    (folder / "texts" / "more" / "b.txt").write_text("the dog sat on the log\n" * 20)
    tokenizer = byte_level(folder / "tokenizer.json", ["<|endoftext|>"])
    model = torch.nn.ModuleDict(
        {
            "embedding": torch.nn.Embedding(tokenizer.get_vocab_size(), 6),
            "lstm": torch.nn.LSTM(6, 6),
            "fc": torch.nn.Linear(6, tokenizer.get_vocab_size()),
        }
    )
    saved(folder / "model.pt", model.state_dict())
    command = ["audit", "model.pt", "--data", "texts", "--tokenizer", "tokenizer.json", "--positions", "9"]
    assert main([*command, "--max-window", "8", "--export", "bundles", "--name", "cats"]) == 0
    report = AuditReport.model_validate_json(Path("audits/cats/audit.json").read_text())
    assert list(report.text.files) == ["a.txt", str(Path("more") / "b.txt")]
    assert report.text.words == 40 * 7
    assert report.perplexity is not None
    assert report.perplexity.per_word is not None
    bundle = Bundle.read(Path("bundles/cats"))
    theirs = Tokenizer.from_file("tokenizer.json")
    assert bundle.vocabulary.encode("the cat") == theirs.encode("the cat").ids
    assert certify(bundle.manifest.architecture, bundle.weights(), 8, None) == report.certificate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "no text: name a file or folder with --data"),
        (["--data", "events.jsonl"], "give either --tokenizer tokenizer.json or --vocabulary NAMES"),
        (["--data", "none.jsonl", "--vocabulary", "names.json"], "none.jsonl: No such file or directory"),
        (
            ["--data", "events.jsonl", "--vocabulary", "short.json"],
            "short.json has 3 tokens, but model.pt: embedding.weight has 13 rows: the model was trained with another",
        ),
        (
            ["--data", "short.jsonl", "--vocabulary", "names.json"],
            "the text has 6 tokens, but windows of 8 tokens need at least 32",
        ),
        (["--data", "events.jsonl", "--vocabulary", "names.json", "--map", "x=y"], "--map x=y: expected NAME=THEIRS"),
        (["--data", "bad.jsonl", "--vocabulary", "names.json"], "bad.jsonl, line 2: not JSON"),
        (["--data", ".", "--vocabulary", "names.json"], "holds both text and events (such as bad.jsonl)"),
        (
            ["--data", "events.jsonl", "--vocabulary", "names.json", "--report", "model.pt"],
            "model.pt: the report cannot be written: File exists",
        ),
        (["--tolerance", "2"], "'2' is not a number between 0 and 1"),
        (["--name", "a b"], "'a b' is not a name"),
        (["--max-window", "65537"], "argument --max-window: 65537 is more than 65536, the largest window"),
        (["--max-window", "0"], "argument --max-window: '0' is not a positive integer"),
    ],
)
def test_invalid_input_is_reported_with_its_fault(
    folder: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    (folder / "short.json").write_text('["</s>", "a", "b"]')
    (folder / "short.jsonl").write_text('["a", "b"]\n["c"]\n')
    (folder / "bad.jsonl").write_text('["a", "b"]\n[')
    try:
        status: object = main(["audit", "model.pt", "--max-window", "16", *options])
    except SystemExit as ended:  # argparse raises SystemExit for some of the arguments
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err


def test_a_folder_that_is_no_model_is_refused_and_a_folder_cannot_be_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["audit", str(folder), "--data", "events.jsonl"]
    assert main(command) == 2
    assert "is neither a checkpoint, a run nor a bundle" in capsys.readouterr().err
    assert main([*command, "--export", "bundles"]) == 2
    assert "--export needs a checkpoint" in capsys.readouterr().err


def test_an_exported_bundle_is_replaced_only_on_request(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    audited(folder, "--export", "bundles")
    before = (folder / "bundles" / "model" / "weights.safetensors").read_bytes()
    (folder / "audits" / "model" / "audit.json").unlink()
    capsys.readouterr()
    with torch.no_grad():
        module = Plain()
        module.get_submodule("fc").get_parameter("bias").add_(1)
    saved(folder / "model.pt", module.state_dict())
    command = ["audit", "model.pt", "--data", "events.jsonl", "--vocabulary", "names.json", "--max-window", "16"]
    assert main([*command, "--export", "bundles"]) == 2
    printed = capsys.readouterr().err
    assert "bundles/model was not written: a bundle already exists: version 1, perplexity " in printed
    assert "the new bundle: version 1, not evaluated; use --replace" in printed
    assert not (folder / "audits" / "model" / "audit.json").exists()  # The export fails before anything is measured.
    assert (folder / "bundles" / "model" / "weights.safetensors").read_bytes() == before
    audited(folder, "--export", "bundles", "--replace")
    assert (folder / "bundles" / "model" / "weights.safetensors").read_bytes() != before


def test_an_export_that_cannot_be_written_names_the_bundle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    (folder / "file").write_text("")
    command = ["audit", "model.pt", "--data", "events.jsonl", "--vocabulary", "names.json", "--max-window", "8"]
    assert main([*command, "--positions", "5", "--export", "file"]) == 2
    assert "file/model was not written" in capsys.readouterr().err


def test_load_whole_reads_every_line_in_order_and_counts_the_words() -> None:
    corpus = text_corpus()
    whole = load_whole(REAL_TEXT, corpus.vocabulary, corpus.tokenizer_json, 10**6)
    parts = [corpus.streams[split] for split in ("train", "valid", "test")]
    assert whole.streams["audit"].tolist() == [*parts[0], *parts[1][1:], *parts[2][1:]]
    assert whole.words["audit"] == sum(corpus.words.values())
    assert whole.hashes == corpus.hashes
    part = load_whole(REAL_TEXT, corpus.vocabulary, corpus.tokenizer_json, 100).streams["audit"]
    assert 50 < len(part) <= 101
    assert part.tolist() == whole.streams["audit"][: len(part)].tolist()
    assert part[-1] == corpus.vocabulary.eos_id


def test_a_run_is_audited_on_its_validation_split(folder: Path) -> None:
    train(experiment(ModelConfig(cell="gated", hidden=8)), None, folder / "run", None, "none", Console(quiet=True))
    assert main(["audit", str(folder / "run"), "--positions", "9", "--max-window", "8", "--threads", "1"]) == 0
    report = AuditReport.model_validate_json(Path("audits/run/audit.json").read_text())
    corpus = text_corpus()
    assert (report.model.source, report.text.split) == ("run", "the valid split of the run")
    assert report.text.tokens == len(corpus.streams["valid"]) - 1
    assert report.text.words == corpus.words["valid"]
    assert main(["audit", str(folder / "run"), "--tokens", "60", "--max-window", "8", "--threads", "1"]) == 0
    short = AuditReport.model_validate_json(Path("audits/run/audit.json").read_text())
    assert short.perplexity is not None
    assert (short.text.tokens, short.text.words, short.perplexity.per_word) == (60, None, None)


def test_a_single_window_of_one_token_is_enough(folder: Path) -> None:
    saved(folder / "model.pt", Plain().state_dict())
    report = audited(folder, "--max-window", "1", "--positions", "1")
    assert ([at.k for at in report.windows], [at.i for at in report.gradients]) == ([1], [0])
    assert report.windows[0].distance.median == report.windows[0].distance.max


def test_a_csv_file_holds_events(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(folder / "model.pt", Plain("gru").state_dict())
    rows = [
        f"v{visit},{visit * 100 + click},{NAMES[2 + (3 * visit + click) % 11]}"
        for visit in range(40)
        for click in range(5)
    ]
    (folder / "events.csv").write_text("\n".join(["visit,at,name", *rows]))
    command = ["audit", "model.pt", "--data", "events.csv", "--vocabulary", "names.json", "--threads", "1"]
    command += ["--positions", "8", "--max-window", "8", "--export", "bundles", "--replace"]
    assert main(command) == 2
    assert "visit" in capsys.readouterr().err  # the error names the columns that the file has
    columns = 'columns = {session = "visit", time = "at", item = "name"}'
    (folder / "events.toml").write_text(f'[data]\ntime_unit = "s"\n{columns}\n')
    form = ["--experiment", "events.toml"]
    assert main([*command, *form]) == 0
    report = AuditReport.model_validate_json((folder / "audits" / "model" / "audit.json").read_text())
    assert (report.text.unknown, report.text.tokens) == (0, 240)
    assert Bundle.read(folder / "bundles" / "model").vocabulary.kind == "events"
    assert main(["audit", "bundles/model", "--data", "events.csv", *form, "--max-window", "8"]) == 0


def test_a_text_model_refuses_events(folder: Path) -> None:
    vocabulary = read_names(folder / "names.json", "text", None)
    with pytest.raises(DataError, match=r"events.jsonl: holds events, but the vocabulary is of text"):
        load_whole(folder / "events.jsonl", vocabulary.vocabulary, vocabulary.tokenizer_json, 100)


def test_padding_in_the_data_is_left_out_and_the_manifest_reserves_it(folder: Path) -> None:
    module = Plain("gru")
    saved(folder / "model.pt", {"state_dict": module.state_dict(), "hyper_parameters": {"padding_idx": 2}})
    write_events(folder / "events.jsonl", [["a", "a", "b", "c", "d", "e", "f"]] * 30)
    report = audited(folder, "--export", str(folder / "bundles"))
    assert "'a' is never read, listed or drawn, because the file names it as padding" in report.model.notes
    assert report.text.tokens == 30 * 6
    manifest = json.loads((folder / "bundles" / "model" / "manifest.json").read_text())
    assert manifest["vocabulary"]["reserved"] == [2]
    assert Bundle.read(folder / "bundles" / "model").vocabulary.reserved == {2}
    report = audited(folder, "--ignore-token", "none", "--export", str(folder / "others"))
    assert report.text.tokens == 30 * 8
    assert Bundle.read(folder / "others" / "model").vocabulary.reserved == set()
    names = ["</s>", "<unk>", "[PAD]", *NAMES[3:]]
    (folder / "names.json").write_text(json.dumps(names))
    audited(folder, "--ignore-token", "none", "--export", str(folder / "kept"))
    manifest = json.loads((folder / "kept" / "model" / "manifest.json").read_text())
    assert manifest["vocabulary"]["reserved"] == []  # and not absent, which would reserve [PAD] by its name


def test_a_check_is_in_the_report_or_refuses(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = Plain("gru")
    saved(folder / "model.pt", module.state_dict())
    assert audited(folder).model.notes[-1].startswith("these assumptions were not checked")
    tokens = torch.arange(9)
    with torch.no_grad():
        save_file(
            {"tokens": tokens, "logits": module(tokens[:, None])[:, 0].contiguous()}, folder / "check.safetensors"
        )
    assert (
        audited(folder, "--check", str(folder / "check.safetensors")).model.notes[-1].startswith("checked with check.")
    )
    save_file({"tokens": tokens, "logits": torch.zeros(9, VOCABULARY)}, folder / "check.safetensors")
    command = [
        "audit",
        "model.pt",
        "--data",
        "events.jsonl",
        "--vocabulary",
        "names.json",
        "--check",
        "check.safetensors",
    ]
    assert main([*command, "--report", "none"]) == 2
    assert "the imported model is another than the one that wrote these logits" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_noticed_before_the_work(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(folder / "model.pt", Plain("gru").state_dict())
    (folder / "file").write_text("")
    assert main(["audit", "model.pt", "--data", "no such file", "--report", "file/report"]) == 2
    assert "file/report: the report cannot be written" in capsys.readouterr().err
