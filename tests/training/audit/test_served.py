"""Runs the README's commands, which train a model outside Wane, and audit, export and serve it. Compares the served
predictions with those of the model's own torch code."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer

from tests.training.test_end_to_end import ROOT, TIMEOUT_S, is_ready, start, wait_until
from wane.training.audit.report import AuditReport

EXAMPLE = ROOT / "examples" / "outside_lstm.py"
PROMPT = "You may reproduce and"
SHORT = "You"


def test_the_example_does_not_import_wane() -> None:
    imported = {
        (node.module or "").partition(".")[0] if isinstance(node, ast.ImportFrom) else alias.name.partition(".")[0]
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    assert imported == {"__future__", "argparse", "pathlib", "tokenizers", "torch"}


def outside_predictions(folder: Path, prompt: str, *, truncated: bool = False) -> torch.Tensor:
    """Returns the probabilities (V) of the next token after the prompt, computed with the model's own code.

    The input begins with the start token, unless `truncated` is true.
    """
    spec = importlib.util.spec_from_file_location("outside_lstm", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = example.LanguageModel(tokenizer.get_vocab_size(), 32, 2).eval()
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True)["model"])
    start = [] if truncated else [tokenizer.token_to_id("<|endoftext|>")]
    tokens = [*start, *tokenizer.encode(prompt).ids]
    with torch.no_grad():
        return torch.softmax(model(torch.tensor([tokens]))[0][0, -1], -1)


def readme_commands(outside: Path, bundles: Path) -> list[list[str]]:
    """Returns the README's commands that train a model outside Wane, audit it and serve it. Each command is a list of
    arguments for Python, in which the README's folders are replaced."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "wane audit" in part]
    lines = block.replace("\\\n", " ").replace("runs/outside", str(outside)).replace("runs/bundles", str(bundles))
    words = [shlex.split(line) for line in lines.splitlines()]
    module = {".venv/bin/python": [], ".venv/bin/wane": ["-m", "wane"]}
    return [[*module[program], *arguments] for program, *arguments in words if program in module]


def python_runs(*arguments: str) -> str:
    """Runs Python in the project's folder and returns its output. Asserts that Python succeeds."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_foreign_torch_lstm_is_audited_exported_and_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # torch is faster with one thread if the matrices are small
    outside, bundles = tmp_path / "outside", tmp_path / "bundles"
    train, audit, serve = readme_commands(outside, bundles)
    python_runs(*train, "--width", "32", "--steps", "40", "--vocabulary", "300")
    sample = ("--positions", "64", "--max-window", "64", "--report", str(tmp_path / "report"))
    printed = python_runs(*audit, *sample)
    assert "model.pt: lstm, 2 layer(s) of 32, vocabulary 300" in printed
    assert "'<|endoftext|>' is assumed to begin a sequence" in printed
    report = AuditReport.model_validate_json((tmp_path / "report" / "audit.json").read_text())
    assert report.text.positions == 64
    manifest = json.loads((bundles / "model" / "manifest.json").read_text())
    assert manifest["certificate"]["certified"] is report.certificate.certified

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(*serve[1:], "--port", port)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=TIMEOUT_S) as client:
            wait_until(lambda: is_ready(client), server)
            asked = {"mode": "recurrent", "top_k": 5}
            answers = [
                (prompt, truncated, client.post("/v1/predict", json={**asked, "input": prompt, "truncated": truncated}))
                for prompt, truncated in ((PROMPT, False), (PROMPT, True), (SHORT, False), (SHORT, True))
            ]
    finally:
        server.send_signal(signal.SIGTERM)
        output, _ = server.communicate(timeout=TIMEOUT_S)
    assert server.returncode == 0, output
    for prompt, truncated, response in answers:
        answer, expected = response.json(), outside_predictions(outside, prompt, truncated=truncated)
        top = torch.topk(expected, 5)
        assert answer["model"] == "model"
        assert [one["token_id"] for one in answer["predictions"]] == top.indices.tolist()
        assert [one["probability"] for one in answer["predictions"]] == pytest.approx(top.values.tolist(), abs=1e-5)
        assert (answer["error_bound"] == 0.0) is not truncated
    begun, own = (outside_predictions(outside, SHORT, truncated=truncated) for truncated in (False, True))
    # After a short input, the start token changes the prediction noticeably.
    assert float((begun - own).abs().max()) > 1e-3
