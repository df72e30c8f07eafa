"""The contenders: Wane, its peers, and two upper bounds: HTTP alone (HANDLER, a trivial handler) and the model alone
(BARE, a loop without HTTP). SCAN runs one long sequence through the model without HTTP.

A TOML file in a folder of `benchmarks/peers` describes each peer and the trivial handler. `sessions.toml` describes a
server that keeps the states of sessions. `peer.toml` describes a server that does not.
"""

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
"""The names of the two models with which the contenders are measured."""

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
    """The command and the protocol of one contender.

    command: the command that starts the server; empty if the contender is not a server. `{bin}` stands for the `bin`
        folder of the contender's virtual environment, `{bundle}` for the bundle's folder, and `{ports[0]}` to
        `{ports[2]}` for free TCP ports. The server receives requests on the first port.
    path: the path of a window request.
    wire: the format of a window request (see `wire.py`).
    step_path: the path of a session's step.
    package: the distribution whose version is reported.
    workers: the number of model processes, for a server that runs the model in separate processes.
    environment: environment variables of the command. `{redis}` and `{collector}` in a value stand for the addresses
        of these services.
    peer: the contender's folder in PEERS; empty if the contender runs in the project's virtual environment.
    tree: the checkout in which the command runs.
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
        """The requirements file of the contender's virtual environment. None if the contender runs in the project's own
        virtual environment."""
        return PEERS / self.peer / "requirements.txt" if self.peer else None

    @property
    def programs(self) -> Path:
        """The folder that contains the contender's Python interpreter."""
        return ENVIRONMENTS / self.peer / "bin" if self.peer else Path(sys.executable).parent

    @property
    def services(self) -> list[Service]:
        """The services (Redis, the collector) that the contender needs. Their addresses are in the contender's
        environment variables."""
        return [name for name in SERVICES if any(f"{{{name}}}" in value for value in self.environment.values())]

    def arguments(self, bundle: Path, ports: list[int]) -> list[str]:
        """Returns the command that serves `bundle`."""
        return [part.format(bin=self.programs, bundle=bundle, ports=ports) for part in self.command]

    def variables(self, bundle: Path, ports: list[int], addresses: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment variables of the command: the variables of this process except `WANE_*`, and the
        contender's own variables.

        addresses: the address of each service, by the service's name.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith("WANE_")}
        own = {
            name: value.format(ports=ports, workers=self.workers, **addresses)
            for name, value in self.environment.items()
        }
        told = {"BENCH_BUNDLE": str(bundle), "BENCH_PORT": str(ports[0]), "BENCH_WORKERS": str(self.workers)}
        return kept | {"PYTHONPATH": str(self.tree)} | told | own


def read_peer(path: Path) -> Contender:
    """Reads a peer from its TOML file. Raises KeyError or TypeError if the file is incomplete."""
    values = {"kind": "windows", **tomllib.loads(path.read_text(encoding="utf-8"))}
    folder = path.parent.name
    name = folder if path.stem == "peer" else f"{folder}-{path.stem}"
    return Contender(name, peer=folder, **{**values, "command": tuple(values["command"])})


def wanes(tree: Path = ROOT, module: str = "wane", name: str = WANE, title: str = "Wane") -> list[Contender]:
    """Returns three configurations of one checkout's server, which is started as `python -m MODULE serve`.

    The configurations are the default, sessions in Redis, and 1 % of requests traced.
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
    """Returns all contenders by name."""
    peers = [read_peer(path) for path in sorted(PEERS.glob("*/*.toml"))]
    peers.sort(key=lambda peer: ("windows", "sessions", "handler").index(peer.kind))
    others = (
        Contender(BARE, "in one process, no HTTP", "onnxruntime"),
        Contender(SCAN, "65,536 tokens, no HTTP", "scan"),
    )
    return {contender.name: contender for contender in (*wanes(), *peers, *others)}


def peer_names(kind: Kind = "windows") -> list[str]:
    """Returns the names of the peers of one kind."""
    return [contender.name for contender in contenders().values() if contender.kind == kind]
