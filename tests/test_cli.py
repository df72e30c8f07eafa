"""Tests of the command `wane`: its help, the modules that it imports, and its messages for a subcommand that cannot
run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from wane import cli
from wane.arguments import printable

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("arguments", "status"), [(["--help"], 0), ([], 2)])
def test_wane_lists_its_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int) -> None:
    assert cli.main(arguments) == status
    printed = capsys.readouterr()
    lines = [line.split(maxsplit=1) for line in (printed.err if status else printed.out).splitlines()]
    assert all(lines.count([name, command.help]) == 1 for name, command in cli.COMMANDS.items())


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("sevre", "did you mean `wane serve`?"),
        ("exprot", "did you mean `wane export`?"),
        ("xyzzy", "`wane --help` lists the commands"),
    ],
)
def test_the_error_for_an_unknown_command_has_advice(
    capsys: pytest.CaptureFixture[str], typed: str, advice: str
) -> None:
    assert cli.main([typed]) == 2
    assert capsys.readouterr().err == f"error: there is no command {typed!r}; {advice}\n"


@pytest.mark.parametrize("name", ["train", "evaluate", "export", "audit"])
def test_the_error_of_a_command_without_its_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda module: None)
    assert cli.main([name, "--help"]) == 2
    assert (
        capsys.readouterr().err
        == f"error: wane {name} needs torch: in the checkout of Wane, run pip install '.[train]'\n"
    )


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (["--help"], {"wane.service", "wane.training", "fastapi", "onnxruntime", "numpy"}),
        (["key", "--help"], {"wane.training", "fastapi", "onnxruntime", "numpy", "rich"}),
        (["compare", "--help"], {"wane.training", "wane.service.server", "onnxruntime"}),
        (["serve", "--help"], {"wane.training", "torch", "matplotlib"}),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_does_not_import_the_modules_of_other_commands(arguments: list[str], absent: set[str]) -> None:
    program = f"""
import sys
from wane.cli import main
try:
    main({arguments!r})
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert absent & set(ended.stderr.split()) == set()


@pytest.mark.parametrize(("given", "found"), [({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")])
def test_onnxruntime_sends_no_telemetry_unless_the_operator_asks_for_it(given: dict[str, str], found: str) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    program = "import wane.service.runners.onnx, os; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, env=inherited | given, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [found]


def test_the_package_runs_as_a_module_and_has_its_version() -> None:
    command = [sys.executable, "-m", "wane", "--version"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout == f"wane {metadata.version('wane')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--prot", "1"], "there is no option --prot; did you mean --port?"),
        (["serve", "--xyzzy"], "there is no option --xyzzy; `wane serve --help` lists the arguments"),
        (["compare", "--file"], "argument --file: expected one argument; `wane compare --help` lists the arguments"),
        (["serve", "--maximum-queue", "1"], "there is no option --maximum-queue; did you mean --max-queue?"),
        (["compare"], "the following arguments are required: URL; `wane compare --help` lists the arguments"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"


@pytest.mark.parametrize("module", ["wane.cli", "argparse", "wane.service.cli.serve", "wane.service.server"])
def test_an_interrupt_while_a_module_is_imported_prints_nothing(module: str) -> None:
    program = f"""
import sys
from wane.__main__ import main

class Interrupting:
    def find_spec(name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt

assert {module!r} not in sys.modules
sys.meta_path.insert(0, Interrupting)
sys.argv = ["wane", "serve"]
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_message_has_no_characters_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    assert printable("é\t\x1b[2J\x9b\u202e\udcff\nx") == "é\\t\\x1b[2J\\x9b\\u202e\\udcff\nx"
    assert cli.main(["se\x1b[2Jrve"]) == 2
    assert "\x1b" not in "".join(capsys.readouterr())
