"""Who is measured: Wane, its peers, and the two ceilings. A peer is a TOML file in a folder of `benchmarks/peers`.

`peer.toml` is a server that is sent windows, `sessions.toml` one that keeps the state of sessions."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
ENVIRONMENTS = ROOT / "build" / "peers"

LSTM, SHIPPED = "lstm256", "gated-stable"
"""The models that everyone serves."""

WANE = "wane"
STEP_PATH = "/v1/sessions/{session}/tokens"
BARE = "onnxruntime"
HANDLER = "fastapi"
SCAN = "scan"

Kind = Literal["wane", "windows", "sessions", "handler", "onnxruntime", "scan"]
Wire = Literal["tokens", "windows", "oip", "wane"]
Service = Literal["redis", "collector"]
SERVICES: tuple[Service, ...] = get_args(Service)


@dataclass(frozen=True)
class Contender:
    """How one server is started and spoken to.

    command: with `{bin}`, the folder of its virtual environment's programs, `{bundle}`, and `{ports[0]}` to
    `{ports[2]}`, free TCP ports of which the first answers; without one it is no server. path, wire: where a window is
    posted, and in which form (`wire.py`). step_path: where a session's token is posted. package: the distribution whose
    version is told. workers: the processes that hold the model, of servers that have such. environment: may hold the
    address of a service, `{redis}` or `{collector}`. peer: its folder of PEERS; empty where it runs in
    the project's virtual environment. tree: the checkout that the command runs in.
    """

    name: str
    title: str
    kind: Kind
    command: tuple[str, ...] = ()
    path: str = ""
    wire: Wire = "tokens"
    step_path: str = ""
    package: str = ""
    workers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    peer: str = ""
    tree: Path = ROOT

    @property
    def requirements(self) -> Path | None:
        """What its own virtual environment holds; None where it runs in the project's."""
        return PEERS / self.peer / "requirements.txt" if self.peer else None

    @property
    def programs(self) -> Path:
        """The folder of the interpreter that it runs on."""
        return ENVIRONMENTS / self.peer / "bin" if self.peer else Path(sys.executable).parent

    @property
    def services(self) -> list[Service]:
        """What its environment has the address of."""
        return [name for name in SERVICES if any(f"{{{name}}}" in value for value in self.environment.values())]

    def arguments(self, bundle: Path, ports: list[int]) -> list[str]:
        """The command that serves `bundle`."""
        return [part.format(bin=self.programs, bundle=bundle, ports=ports) for part in self.command]

    def variables(self, bundle: Path, ports: list[int], addresses: Mapping[str, str]) -> dict[str, str]:
        """The environment of that command: this one's, without settings of Wane that would leak in.

        addresses: of the services, by name."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        own = {
            name: value.format(ports=ports, workers=self.workers, **addresses)
            for name, value in self.environment.items()
        }
        told = {"BENCH_BUNDLE": str(bundle), "BENCH_PORT": str(ports[0]), "BENCH_WORKERS": str(self.workers)}
        return kept | {"PYTHONPATH": str(self.tree)} | told | own


def read_peer(path: Path) -> Contender:
    """The peer of one TOML file. Raises KeyError or TypeError where the file is not complete."""
    values = {"kind": "windows", **tomllib.loads(path.read_text(encoding="utf-8"))}
    folder = path.parent.name
    name = folder if path.stem == "peer" else f"{folder}-{path.stem}"
    return Contender(name, peer=folder, **{**values, "command": tuple(values["command"])})


def wanes(tree: Path = ROOT, module: str = "wane", name: str = WANE, title: str = "Wane") -> list[Contender]:
    """The server of one checkout, started as `python -m MODULE serve`, with three settings.

    They are: the default ones; sessions in Redis; traces of one request in a hundred sent to a collector.
    """
    plain = Contender(
        name,
        title,
        "wane",
        ("{bin}/python", "-m", module, "serve", "--bundles={bundle}", "--port={ports[0]}", "--log-level=warning"),
        "/v1/predict",
        "wane",
        STEP_PATH,
        tree=tree,
    )
    redis = replace(
        plain,
        name=f"{name}-redis",
        title=f"{title}, sessions in Redis",
        environment={"WANE_STORE": "{redis}"},
    )
    traced = replace(
        plain,
        name=f"{name}-traced",
        title=f"{title}, 1 % of requests traced",
        environment={
            "OTEL_EXPORTER_OTLP_ENDPOINT": "{collector}",
            "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
            "OTEL_TRACES_SAMPLER_ARG": "0.01",
        },
    )
    return [plain, redis, traced]


def contenders() -> dict[str, Contender]:
    """Everyone, by name: Wane, the peers, the trivial handler, the bare loop."""
    peers = [read_peer(path) for path in sorted(PEERS.glob("*/*.toml"))]
    peers.sort(key=lambda peer: ("windows", "sessions", "handler").index(peer.kind))
    others = (
        Contender(BARE, "in one process, no HTTP", "onnxruntime"),
        Contender(SCAN, "65,536 tokens, no HTTP", "scan"),
    )
    return {contender.name: contender for contender in (*wanes(), *peers, *others)}


def peer_names(kind: Kind = "windows") -> list[str]:
    """Those that serve windows as we do, the ones to be better than; or the peers of another kind."""
    return [contender.name for contender in contenders().values() if contender.kind == kind]
