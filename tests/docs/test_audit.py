"""Tests that each command on the page about audits works and exports a valid bundle."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.docs.transcript import bash, scripts
from wane.models.bundle import Bundle

ROOT = Path(__file__).parents[2]
QUICK = "--positions 64 --tokens 4000 --max-window 64 --threads 1"


@pytest.mark.slow
def test_each_layout_on_the_page_is_audited_and_exported(tmp_path: Path) -> None:
    blocks = scripts((ROOT / "docs" / "audit.md").read_text(encoding="utf-8"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
    for command in [line for block in blocks for line in block]:
        if command.startswith("wane audit"):
            name = command.split("--name ")[1].split()[0]
            command += f" {QUICK} --report {tmp_path}/reports/{name}"
        spelt = command.replace("runs/", f"{tmp_path}/").replace("wane audit", f"{sys.executable} -m wane audit")
        spelt = spelt.replace("python ", f"{sys.executable} ", 1) if spelt.startswith("python ") else spelt
        ended = bash(spelt, ROOT, environment)
        assert ended.returncode == 0, f"{spelt}\n{ended.stdout}"
    exported = sorted(path.name for path in (tmp_path / "audited").iterdir())
    layouts = ["awd", "checked", "graph", "gru4rec", "mingru", "named", "one", "projected", "several", "shop", "usual"]
    assert exported == layouts
    manifests = {name: Bundle.read(tmp_path / "audited" / name).manifest for name in exported}
    assert all(manifest.name == name for name, manifest in manifests.items())
    assert {name for name, manifest in manifests.items() if manifest.start == "zero"} == {"gru4rec"}
    # these files are different layouts of the same weights
    same = ("usual", "several", "named", "one", "awd", "graph")
    assert len({manifests[name].files["weights.safetensors"] for name in same}) == 1
