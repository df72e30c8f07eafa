"""Runs the commands of `docs/events.md`, with fewer sessions and a shorter training than on the page."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, free_port
from tests.docs.transcript import FENCE, bash
from tests.service.sessions.stores.redis_server import program
from tests.stack.harness.command import WAIT_S
from tests.stack.harness.command import Command as Running

pytestmark = [pytest.mark.slow, pytest.mark.stack]

PAGE = ROOT / "docs" / "events.md"
EXPERIMENT = ROOT / "training" / "experiments" / "shop.toml"
PID = re.compile(r"  (wane-1) +127\.0\.0\.1:\d+  pid (\d+)\n")
STEP = re.compile(r"(\d+): (\S+), version (\d+) recommends (.+)\n")


class Page:
    """The commands of the page, with the page's folders replaced by folders of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        blocks = [block for block in FENCE.finditer(PAGE.read_text("utf-8")) if block["info"].split()[:1] == ["bash"]]
        self._commands = [block["body"].strip() for block in blocks]
        quick = EXPERIMENT.read_text(encoding="utf-8")
        for key, value in (("steps", 40), ("evaluate_every", 20), ("checkpoint_every", 20)):
            quick = re.sub(rf"^{key} = \d+$", f"{key} = {value}", quick, flags=re.MULTILINE)
        (folder / "shop.toml").write_text(quick, encoding="utf-8")
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        self.environment |= {"NO_COLOR": "1", "COLUMNS": "200", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

    def __len__(self) -> int:
        return len(self._commands)

    def command(self, start: str, more: str = "") -> list[str]:
        """Removes the page's first remaining command that contains `start`. Returns this command with the options
        `more`, as the argument list of a process."""
        index = next(index for index, command in enumerate(self._commands) if start in command)
        command = self._commands.pop(index)
        for old, new in (
            ("training/experiments/shop.toml", f"{self.folder}/shop.toml"),
            ("build/stack", f"{self.folder}/stack"),
            ("runs/shop", f"{self.folder}/shop"),
            ("127.0.0.1:8000", f"127.0.0.1:{self.port}"),
        ):
            command = command.replace(old, new)
        command = re.sub(r"^scripts/stack", f"{sys.executable} -m deploy.stack", command)
        command = re.sub(r"(^| )wane ", rf"\1{sys.executable} -m wane ", command)
        command = re.sub(r"(^| )python ", rf"\1{sys.executable} ", command)
        return ["bash", "-c", f"{'' if '=' in command.split()[0] else 'exec '}{command} {more}"]

    def run(self, start: str, more: str = "") -> str:
        """Runs a command (see `command`) to its end. Asserts that the command succeeds, and returns its output."""
        ended = bash(self.command(start, more)[-1], ROOT, self.environment)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    @contextmanager
    def running(self, start: str, more: str = "") -> Iterator[Running]:
        """Runs a command (see `command`) while the `with` block runs, then interrupts the command."""
        running = Running(*self.command(start, more), environment=self.environment)
        try:
            yield running
        finally:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGINT)
                running.process.wait(WAIT_S)
            running.end()


@pytest.fixture
def page(tmp_path: Path) -> Page:
    for needed in ("redis-server", "haproxy", "prometheus"):
        program(needed)
    return Page(tmp_path)


def test_a_model_of_clicks_is_trained_served_replaced_and_survives_a_killed_replica(page: Page) -> None:
    assert len(page) == 14
    assert "best possible" in page.run("clickstream.py", "--sessions 2000")
    page.run("wane train")
    table = page.run("wane evaluate", "--positions 200")
    for word in ("recall", "MRR", "NDCG", "recurrent", "window 8"):
        assert word in table
    page.run("wane export")
    live = page.command("shop_client.py", "--pause 0.1 --sessions 2000")
    with page.running("wane serve", f"--port {page.port}") as server:
        server.until_said('"message":"ready"')
        answer = json.loads(page.run("curl"))
        listed = [one["token"] for one in answer["predictions"]]
        assert len(listed) == 5 and not {"aisle-3/4", "popular/0", "<eos>", "<unk>"} & set(listed)
        step = json.loads(page.run("curl"))
        assert (step["position"], step["created"]) == (1, True) and len(step["predictions"]) == 5
        compared = page.run("wane compare", "--window 4")
        assert "Compared 64 events of" in compared and "Left out" not in compared
        client = Running(*live, environment=page.environment)
        try:
            client.until_said("version 1 recommends")
            page.run("--version 2")
            *_, last, first = client.until_said("version 2 recommends")
            before, after = STEP.fullmatch(last), STEP.fullmatch(first)
            assert before is not None and after is not None
            assert int(after[1]) in (int(before[1]) + 1, 1)
            page.run("wane rollback")
            client.until_said("version 1 recommends")
        finally:
            client.end()
    with page.running("scripts/stack", options(page)) as stack:
        pid = next(int(match[2]) for line in stack.until_said("ready at") if (match := PID.fullmatch(line)))
        client = Running(*page.command("WANE_API_KEY"), environment=page.environment)
        try:
            client.until(STEP.fullmatch)
            kill = page.command("kill -9 PID")
            subprocess.run([*kill[:-1], kill[-1].replace("PID", str(pid)).replace("exec ", "")], check=True)
            stack.until_said("wane-1 ended and was restarted")
            client.until(STEP.fullmatch)
            assert client.process.wait(WAIT_S) == 0
        finally:
            client.end()
    assert not len(page), "the test did not run every command of the page"


def options(page: Page) -> str:
    """Returns the options for the ports and the folder of the stack."""
    return (
        f"--port {page.port} --operations-port {free_port()} --prometheus-port {free_port()} "
        f"--folder {page.folder}/stack"
    )
