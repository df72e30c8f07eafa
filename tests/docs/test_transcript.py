"""Tests that the code that runs the documentation's commands accepts correct output and reports wrong output."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.docs.transcript import Command, TranscriptError, compare, parse, run, scripts


def console(*lines: str, info: str = "console") -> str:
    return "\n".join(["Some text.", "", f"```{info}", *lines, "```", "", "More text.", ""])


def check(*lines: str, info: str = "console") -> None:
    run(parse(console(*lines, info=info)), Path.cwd(), os.environ)


def test_a_document_is_parsed_into_commands_with_lines_and_output() -> None:
    document = console("$ echo a \\", "    b", "a b", "$ true", "$ echo c", "c")
    assert parse(document) == [
        Command(4, "echo a \\\n    b", "a b\n"),
        Command(7, "true", ""),
        Command(8, "echo c", "c\n"),
    ]


def test_other_kinds_of_blocks_are_ignored() -> None:
    assert parse(console("$ false", info="bash") + console("$ false", info="") + console("x", info="json")) == []


def test_the_commands_of_bash_blocks_are_grouped_by_block() -> None:
    document = console("echo a \\", "    b", "true", info="bash") + console("$ false") + console("echo c", info="bash")
    assert scripts(document) == [["echo a      b", "true"], ["echo c"]]


def test_a_console_block_without_a_command_is_an_error() -> None:
    with pytest.raises(TranscriptError, match="line 4"):
        parse(console("echo a"))


def test_commands_run_in_order_in_one_folder(tmp_path: Path) -> None:
    run(parse(console("$ echo a > file", "$ cat file", "a")), tmp_path, os.environ)


@pytest.mark.parametrize(
    "lines",
    [
        ("$ printf 'a\\nb\\n'", "a", "b"),
        ("$ printf 'a  \\nb'", "a", "b"),
        ("$ echo out; echo err >&2", "out", "err"),
        ("$ echo one two three", "one ... three"),
        ("$ seq 5", "1", "...", "5"),
        ("$ seq 5", "..."),
        ("$ seq 1", "1", "..."),
        ("$ echo 0.12345", "0.12341"),
        ("$ echo '{\"p\": 1.5e-3}'", '{"p": 0.0015}'),
        ('$ echo \'"total_ms":8.25,"queue_ms": 1e-05}\'', '"total_ms":1.5,"queue_ms": 0.2}'),
        ("$ echo 'took 12.5 ms, 3 ms'", "took 1.25 ms, 40 ms"),
        ("$ echo '(a+b)*c[0]?'", "(a+b)*c[0]?"),
        ("$ true",),
    ],
    ids=lambda lines: lines[0],
)
def test_output_may_differ_only_where_allowed(lines: tuple[str, ...]) -> None:
    check(*lines)


@pytest.mark.parametrize(
    "lines",
    [
        ("$ echo a", "b"),
        ("$ echo a",),
        ("$ true", "a"),
        ("$ seq 3", "1", "3"),
        ("$ echo a; echo b", "a"),
        ("$ echo one two three", "one ... four"),
        ("$ seq 5", "1", "...", "6"),
        ("$ echo 12", "13"),
        ("$ echo 0.125", "0.126"),
        ("$ echo 0.125", "0.125 0.125"),
        ("$ echo '\"total_ms\":fast'", '"total_ms":1.5'),
        ("$ echo '\"total_s\":8.25'", '"total_s":1.5'),
        ("$ false-is-no-such-command",),
    ],
    ids=lambda lines: lines[0],
)
def test_output_must_match_the_document(lines: tuple[str, ...]) -> None:
    with pytest.raises(TranscriptError):
        check(*lines)


def test_a_mismatch_is_reported_with_its_line_and_both_texts() -> None:
    with pytest.raises(TranscriptError, match=r"(?s)line 5: \$ echo b.*says\nc\n.*printed\nb\n"):
        check("$ true", "$ echo b", "c")


def test_a_number_is_compared_next_to_any_text() -> None:
    compare(Command(1, "", "a ... 0.5 ... b\n"), "a 1.25 0.5 0.75 b\n")
    with pytest.raises(TranscriptError, match=r"says 0\.5, the command printed 0\.75"):
        compare(Command(1, "", "a 0.5\n"), "a 0.75\n")


def test_a_background_command_runs_until_the_end_of_the_document(tmp_path: Path) -> None:
    (tmp_path / "server").write_text("trap 'echo stopped > log; exit' TERM\necho started\ncat fifo\n")
    document = console("$ mkfifo fifo") + console("$ bash server", "started", info="console background")
    document += console("$ ls", "fifo", "server") + console("$ echo go > fifo")
    run(parse(document), tmp_path, os.environ)


def test_a_background_command_that_ends_without_its_output_is_an_error() -> None:
    with pytest.raises(TranscriptError, match=r"(?s)says\nready.*printed\nbroken"):
        check("$ echo broken", "ready", info="console background")


def test_addresses_can_be_replaced(tmp_path: Path) -> None:
    commands = parse(console("$ echo http://localhost:8000", "http://localhost:8000"))
    run(commands, tmp_path, os.environ, spell=lambda text: text.replace("8000", "9999"))
