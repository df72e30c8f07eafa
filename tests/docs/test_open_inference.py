"""Tests that the program on the page about the Open Inference Protocol runs, and that the page names every input,
output, parameter and extension."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.transcript import FENCE
from tests.service.live_server import LiveServer, live_server
from wane.service.api.routes.inference import EXTENSIONS
from wane.service.api.schemas.inference import InferParameters
from wane.service.api.tensors import INPUTS, OUTPUTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "open_inference.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(WANE_BUNDLES=str(ROOT / "models" / "bundles" / "gated-stable-64")) as server:
        yield server


def test_the_program_of_the_page_runs(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = [block["body"] for block in FENCE.finditer(PAGE) if block["info"] == "python"]
    address = server.url.removeprefix("http://")
    names: dict[str, object] = {}
    exec(compile(program.replace("127.0.0.1:8000", address), "open_inference.md", "exec"), names)
    assert capsys.readouterr().out.splitlines()[-1] == "[3]"
    close = getattr(names["client"], "close", None)
    assert callable(close)
    close()


def test_the_page_names_every_input_output_parameter_and_extension() -> None:
    names = {*INPUTS, *OUTPUTS, *EXTENSIONS, *InferParameters.__struct_fields__}
    assert {name for name in names if f"`{name}`" not in PAGE} == set()
