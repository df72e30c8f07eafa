"""Every setting of the server, in one frozen object: from `WANE_...` variables and from the command line.

The command line overrides the environment, and the environment overrides the defaults. An unknown `WANE_...` variable
is fatal: otherwise a misspelt limit would silently keep its default. Units are in the names.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, ValidationInfo, field_validator

PREFIX = "WANE_"
IN_MEMORY = "memory"
STATE_CHECKPOINT_INTERVAL_TOKENS = 32
SECRET = re.compile("(?<=//)[^/]*(?=@)|(?<=password=)[^&']*")  # the user and the password in an address
NOT_AN_OPTION = frozenset({"api_keys"})  # other users of the machine can read the command line
POLICIES = ("auto", "tail", "state")
# Variables of the client and of the tests, with the same prefix.
FOREIGN = frozenset({"WANE_API_KEY", "WANE_DATA", "WANE_REQUIRE_STACK"})

UNITS = {"_us": "microseconds", "_ms": "milliseconds", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}

SHIPPED = Path(__file__).parents[1] / "models" / "bundles"
"""The folder of the bundles that the package ships."""


class SettingsError(Exception):
    """A setting is unknown or out of range. The message names it, and the process ends."""


class Settings(BaseModel):
    """The operator's settings. A field's name is its option on the command line and, in capitals, its variable."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one")
    api_keys: SecretStr | None = Field(
        default=None,
        description="accepted keys, as NAME:KEY or NAME:KEY:SCOPE with commas between; scopes are use, metrics, admin",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="a file with the hashes of keys, which is read again when it changes: see docs/security.md. "
        "Without any keys, every client may send requests",
    )
    trusted_proxies: str | None = Field(
        default=None,
        description="addresses and networks of proxies, with commas between, whose x-forwarded-for header "
        "names the client in the log; not set: the log names the connection's peer",
    )
    bundles: Path = Field(default=SHIPPED, description="a folder of bundles, or one bundle")
    require_all: bool = Field(
        default=False, description="exit if any model cannot be loaded, and not only if the default one cannot"
    )
    model_poll_interval_s: float | None = Field(
        default=None,
        gt=0,
        description="time between two checks of the folder for new versions to load; none: they are loaded on request",
    )
    default_model: str = Field(
        default="gated-stable",
        description="model that answers requests without a model name; if not set and absent, the first by name",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where models run; auto uses cuda if it is available; cuda never falls back to cpu"
    )
    threads: int = Field(default=1, ge=1, le=256, description="threads of one model's runner (onnxruntime intra-op)")
    inline_batch_max_us: int = Field(
        default=1000,
        ge=0,
        description="the event loop itself runs a batch of one-token steps that is expected to take no longer than "
        "this; the runner's thread runs the others",
    )
    max_batch_size: int = Field(default=64, ge=1, le=4096, description="requests that one run may answer")
    max_queue: int = Field(
        default=1024,
        ge=1,
        description="requests that may wait for one model's runner; the server answers more with 429",
    )
    max_batch_inputs: int = Field(default=256, ge=1, description="inputs that one batched request may hold")
    max_input_tokens: int = Field(default=65536, ge=1, description="longest input")
    max_scored_tokens: int = Field(
        default=262_144,
        ge=1,
        description="longest input of a scoring request; also the limit of the sum of one batch's inputs",
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="longest request body")
    receive_budget_bytes: int = Field(
        default=256 * 2**20,
        ge=1,
        description="memory for bodies and WebSocket messages that are being received or not yet answered; connections "
        "with at most 4096 bytes are not counted; the server answers more with 429; raised to twice max_body_bytes",
    )
    max_window: int | None = Field(
        default=None, ge=1, description="largest k that a request may ask for; never over a model's own limit"
    )
    max_generated_tokens: int = Field(default=4096, ge=1, description="most tokens that one request may generate")
    top_k_limit: int = Field(default=100, ge=1, description="most predictions that one answer may list")
    session_history_tokens: int = Field(
        default=256, ge=1, description="latest tokens kept of a session; raised to the largest maximum window loaded"
    )
    state_budget_bytes: int = Field(default=256 * 2**20, ge=1, description="memory for resident states, for each model")
    state_ttl_s: float | None = Field(
        default=None,
        gt=0,
        description="idle time after which a state is dropped, to be rebuilt when needed; none: when its session ends",
    )
    session_ttl_s: float = Field(default=3600, gt=0, description="idle time after which a session ends")
    session_budget_bytes: int = Field(
        default=2**30,
        ge=1,
        description="memory for sessions besides their states: about 300 bytes each, and 2 for each token of a history "
        "(4 if the vocabulary has over 65536 tokens); once it is used up, the server answers new sessions with 429",
    )
    store: str = Field(
        default=IN_MEMORY,
        repr=False,
        pattern=rf"^({IN_MEMORY}|(redis|rediss)(\+cluster)?://.+|unix://.+)$",
        description="where sessions are kept: memory, or a Redis that replicas share, as redis://host:6379/0, "
        "rediss:// with TLS, unix:// for a socket; redis+cluster:// and rediss+cluster:// for a node of a cluster",
    )
    session_file: Path | None = Field(
        default=None,
        description="file to which the server writes sessions in memory after it has drained, and from which it reads "
        "them when it starts",
    )
    store_password_file: Path | None = Field(
        default=None, description="a file with the password for Redis, used if the address has none"
    )
    store_namespace: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._~-]{1,64}$",
        description="part of every key in Redis: servers of other namespaces have other sessions",
    )
    store_timeout_ms: int = Field(
        default=1000, ge=1, description="time that Redis has to answer; after that it counts as unreachable"
    )
    store_failure_mode: Literal["reject", "degrade"] = Field(
        default="reject",
        description="while Redis is unreachable: reject answers requests to sessions with 503; degrade continues "
        "sessions from where this server last saw them, answers say durable: false, and Redis wins once it is back",
    )
    store_policy: str = Field(
        default="auto",
        description="what Redis keeps of a session besides its history: nothing (tail) or a state from time to time "
        "(state); auto keeps states of models that are not certified. For single models: auto,NAME=state,NAME=tail",
    )
    state_checkpoint_interval_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens between two states that the shared store keeps of a session, at most "
        "session_history_tokens; none: 32 or session_history_tokens, whichever is less",
    )
    request_timeout_ms: int = Field(default=30_000, ge=1, description="default and longest deadline of a request")
    max_connections: int = Field(default=8192, ge=1, description="open connections; the server answers more with 503")
    max_header_bytes: int = Field(
        default=64 * 2**10, ge=1024, description="longest head of a request: its first line and its headers"
    )
    header_timeout_s: float = Field(default=10, gt=0, description="time that the head of a request may take to arrive")
    body_timeout_s: float = Field(default=20, gt=0, description="time that the body of a request may take to arrive")
    send_timeout_s: float = Field(
        default=30, gt=0, description="time after which the server disconnects a client that reads nothing, on Linux"
    )
    stream_idle_s: float = Field(
        default=600, gt=0, description="time without a message after which the server closes a WebSocket"
    )
    shutdown_delay_ms: int = Field(
        default=0,
        ge=0,
        description="time for which a stopping server still takes requests although /readyz already answers 503; if it "
        "is longer than a load balancer takes to notice, no request is refused",
    )
    drain_timeout_ms: int = Field(
        default=10_000, ge=0, description="time that requests in flight have to end when the server stops"
    )
    shadow_rate: float = Field(
        default=0,
        ge=0,
        le=1,
        description="share of predictions and steps that the other mode answers too, while the runner is idle, to "
        "measure agreement",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="lowest level that is logged"
    )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one option for each field. An option that is not given is absent from the namespace."""
        group = parser.add_argument_group("settings", "each may also be given as a WANE_... variable")
        for name, field in cls.model_fields.items():
            if name in NOT_AN_OPTION:
                continue
            unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), None)
            default = "none" if field.default is None else field.default
            about = [unit] if unit else []
            about += [f"default {default}", PREFIX + name.upper()]
            text = f"{field.description} ({'; '.join(about)})".replace("%", "%%")
            kind: dict[str, Any] = {"metavar": (unit or name.rsplit("_", 1)[-1]).upper()}
            if field.annotation is bool:
                kind = {"action": "store_const", "const": "true"}
            group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=text, **kind)

    @classmethod
    def read(cls, environment: Mapping[str, str], options: argparse.Namespace | None = None) -> Self:
        """Returns the settings of `environment`, overridden by the parsed `options`, which may contain other names too.

        Raises SettingsError naming the variable or option at fault.
        """
        values: dict[str, str] = {}
        sources: dict[str, str] = {}
        for variable, value in environment.items():
            if not variable.startswith(PREFIX) or variable in FOREIGN:
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in cls.model_fields or variable != PREFIX + name.upper():
                raise SettingsError(f"{variable} is not a setting; `wane serve --help` lists them all")
            values[name] = value
            sources[name] = variable
        for name, value in vars(options).items() if options is not None else ():
            if name in cls.model_fields:
                values[name] = value
                sources[name] = f"--{name.replace('_', '-')}"
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            value = "..." if name in NOT_AN_OPTION else SECRET.sub("...", repr(first["input"]))
            raise SettingsError(f"{sources[name]} is {value}: {first['msg']}") from None

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, value: str | None) -> str | None:
        try:
            for one in () if value is None else value.split(","):
                ip_network(one.strip())
        except ValueError as error:
            raise ValueError(f"{error}: it must be an address, or a network such as 10.0.0.0/8") from None
        return value

    @field_validator("store_policy")
    @classmethod
    def _names_policies(cls, value: str) -> str:
        general, *single = value.split(",")
        if general not in POLICIES:
            raise ValueError(f"it must begin with one of {', '.join(POLICIES)}")
        for one in single:
            model, _, policy = one.partition("=")
            if not model or policy not in POLICIES:
                raise ValueError(f"{one!r} is not NAME=POLICY; policies are {', '.join(POLICIES)}")
        return value

    @field_validator("session_file")
    @classmethod
    def _is_for_memory(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("store", IN_MEMORY) != IN_MEMORY:
            raise ValueError("it is for sessions in memory, but the store is not memory")
        return value

    @field_validator("state_checkpoint_interval_tokens")
    @classmethod
    def _is_within_a_tail(cls, value: int | None, info: ValidationInfo) -> int | None:
        tail = int(info.data.get("session_history_tokens", value or 1))
        if value is not None and value > tail:
            raise ValueError(
                f"it must be at most session_history_tokens, which is {tail}: a history reaches back to the last state"
            )
        return value

    def states_every(self, model: str, *, certified: bool) -> int | None:
        """Returns after how many tokens the shared store gets a new state of a session of `model`; None: never."""
        general, *single = self.store_policy.split(",")
        policy = dict(one.split("=") for one in single).get(model, general)
        if policy == "auto":
            policy = "tail" if certified else "state"
        if policy != "state" or self.store == IN_MEMORY:
            return None
        return self.state_checkpoint_interval_tokens or min(
            STATE_CHECKPOINT_INTERVAL_TOKENS, self.session_history_tokens
        )

    @property
    def default_model_is_chosen(self) -> bool:
        """Whether the operator set the default model: then its absence is fatal."""
        return "default_model" in self.model_fields_set
