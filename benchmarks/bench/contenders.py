"""Who is measured: Wane, its peers, and the two ceilings. A peer is a folder of `benchmarks/peers` with a peer.toml."""

from __future__ import annotations

import os
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
ENVIRONMENTS = ROOT / "build" / "peers"

LSTM, SHIPPED = "lstm256", "gated-stable"
"""The models that everyone serves."""

WANE = "wane"
BARE = "onnxruntime"
HANDLER = "fastapi"
SCAN = "scan"

Wire = Literal["tokens", "windows", "oip", "wane"]


@dataclass(frozen=True)
class Contender:
    """How one server is started and spoken to.

    command: with `{bin}`, the folder of its virtual environment's programs, `{bundle}`, and `{ports[0]}` to
    `{ports[2]}`, free TCP ports of which the first answers; without one it is no server. path, wire: where a window is
    posted, and in which form (`wire.py`). package: the distribution whose version is told. workers: the processes that
    hold the model, of servers that have such.
    """

    name: str
    title: str
    command: tuple[str, ...] = ()
    path: str = ""
    wire: Wire = "tokens"
    package: str = ""
    workers: int = 1
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """What it is made of: a peer's server, settings and requirements."""
        return PEERS / self.name

    @property
    def requirements(self) -> Path | None:
        """What its own virtual environment holds; None where it runs in the project's."""
        path = self.folder / "requirements.txt"
        return path if path.exists() else None

    @property
    def programs(self) -> Path:
        """The folder of the interpreter that it runs on."""
        return ENVIRONMENTS / self.name / "bin" if self.requirements else Path(sys.executable).parent

    def arguments(self, bundle: Path, ports: list[int]) -> list[str]:
        """The command that serves `bundle`."""
        return [part.format(bin=self.programs, bundle=bundle, ports=ports) for part in self.command]

    def variables(self, bundle: Path, ports: list[int]) -> dict[str, str]:
        """The environment of that command: this one's, without settings of Wane that would leak in."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        own = {name: value.format(ports=ports, workers=self.workers) for name, value in self.environment.items()}
        told = {"BENCH_BUNDLE": str(bundle), "BENCH_PORT": str(ports[0]), "BENCH_WORKERS": str(self.workers)}
        return kept | {"PYTHONPATH": str(ROOT)} | told | own


def read_peer(folder: Path) -> Contender:
    """The peer of one folder. Raises KeyError or TypeError where its peer.toml is not complete."""
    values = tomllib.loads((folder / "peer.toml").read_text(encoding="utf-8"))
    return Contender(name=folder.name, **{**values, "command": tuple(values["command"])})


def contenders() -> dict[str, Contender]:
    """Everyone, by name: Wane, the peers, the trivial handler, the bare loop."""
    wane = Contender(
        WANE,
        "Wane",
        ("{bin}/wane", "serve", "--bundles={bundle}", "--port={ports[0]}", "--log-level=warning"),
        "/v1/predict",
        "wane",
    )
    peers = [read_peer(path.parent) for path in sorted(PEERS.glob("*/peer.toml"))]
    peers.sort(key=lambda peer: peer.name == HANDLER)
    others = (Contender(BARE, "in one process, no HTTP"), Contender(SCAN, "65,536 tokens, no HTTP"))
    return {contender.name: contender for contender in (wane, *peers, *others)}


def peer_names() -> list[str]:
    """Those that serve windows as we do: the ones to be better than."""
    return [name for name in contenders() if name not in (WANE, HANDLER, BARE, SCAN)]
