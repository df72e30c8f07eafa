"""Every setting of the server, in one frozen object: from `WANE_...` variables and from the command line.

The command line wins over the environment, the environment over the defaults. A `WANE_...` variable that is
no setting is fatal: a misspelt limit must not silently be the default. Units are in the names.
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
NOT_AN_OPTION = frozenset({"api_keys"})  # others on the machine can read the command line
POLICIES = ("auto", "tail", "state")
# Variables of the client and of the tests, which have the same prefix.
FOREIGN = frozenset({"WANE_API_KEY", "WANE_DATA", "WANE_REQUIRE_STACK"})

UNITS = {"_us": "microseconds", "_ms": "milliseconds", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}

SHIPPED = Path(__file__).parents[1] / "models" / "bundles"
"""The folder of the bundles that the package ships."""


class SettingsError(Exception):
    """A setting that is unknown or out of range; the message names it, and the process ends."""


class Settings(BaseModel):
    """What an operator may choose. Field names are the command line's and, in capitals, the environment's."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port to listen on; 0 takes a free one")
    api_keys: SecretStr | None = Field(
        default=None,
        description="accepted keys, as NAME:KEY or NAME:KEY:SCOPE with commas between; scopes are use, metrics, admin",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="a file of keys, by their hashes, which is read again when it changes: see docs/security.md. "
        "Without any keys everybody may ask",
    )
    trusted_proxies: str | None = Field(
        default=None,
        description="addresses and networks of proxies, with commas between, whose x-forwarded-for header "
        "names the client in the log; not set: the log names the connection's peer",
    )
    bundles: Path = Field(default=SHIPPED, description="a folder of bundles, or one bundle")
    require_all: bool = Field(
        default=False, description="end where any model cannot be loaded, and not only where the default one cannot"
    )
    model_poll_interval_s: float | None = Field(
        default=None,
        gt=0,
        description="how often that folder is looked at for versions to load; none: they are loaded when asked for",
    )
    default_model: str = Field(
        default="gated-stable",
        description="model that answers where none is named; if not set and not there, the first by name",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where models run; cuda never falls back, auto takes cuda where it is there"
    )
    threads: int = Field(
        default=1, ge=1, le=256, description="threads that one model's runner computes with (onnxruntime intra-op)"
    )
    inline_batch_max_us: int = Field(
        default=1000,
        ge=0,
        description="a batch of steps of one token that is expected to take no longer is run by the event loop itself "
        "and not handed to the runner's thread",
    )
    max_batch_size: int = Field(default=64, ge=1, le=4096, description="requests that one run may answer")
    max_queue: int = Field(
        default=1024, ge=1, description="requests that may wait for one model's runner; more are answered 429"
    )
    max_batch_inputs: int = Field(default=256, ge=1, description="inputs that one batched request may hold")
    max_input_tokens: int = Field(default=65536, ge=1, description="longest input")
    max_scored_tokens: int = Field(
        default=262_144,
        ge=1,
        description="longest input that is only scored; the inputs of one batch may have as many tokens in all",
    )
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024, description="longest request body")
    receive_budget_bytes: int = Field(
        default=256 * 2**20,
        ge=1,
        description="memory for bodies and WebSockets' messages that are being received or not yet answered, of all "
        "connections but those with at most 4096 of it; more are answered 429; raised to twice max_body_bytes",
    )
    max_window: int | None = Field(
        default=None, ge=1, description="largest k that may be asked for; never over a model's own limit"
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
        description="idle time after which a state is given up, to be rebuilt; none: when its session ends",
    )
    session_ttl_s: float = Field(default=3600, gt=0, description="idle time after which a session ends")
    session_budget_bytes: int = Field(
        default=2**30,
        ge=1,
        description="memory for sessions besides their states: about 300 each, and 2 for each token of a tail (4 where "
        "a vocabulary has over 65536); where it is used up new sessions are answered 429",
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
        description="where sessions in memory are written when the server has drained, and read when it starts",
    )
    store_password_file: Path | None = Field(
        default=None, description="a file with the password for Redis, where the address has none"
    )
    store_namespace: str = Field(
        default="default",
        pattern=r"^[A-Za-z0-9._~-]{1,64}$",
        description="part of every key in Redis: servers of other namespaces have other sessions",
    )
    store_timeout_ms: int = Field(
        default=1000, ge=1, description="time that Redis has to answer; then it is taken to be away"
    )
    store_failure_mode: Literal["reject", "degrade"] = Field(
        default="reject",
        description="while Redis is away, requests to sessions are refused with 503; or sessions go on where they were "
        "seen last, answers say durable: false, and what Redis has wins when it is back",
    )
    store_policy: str = Field(
        default="auto",
        description="what Redis keeps of a session besides its tail: nothing (tail) or its state now and then (state); "
        "auto keeps states of models that are not certified. For single models: auto,NAME=state,NAME=tail",
    )
    state_checkpoint_interval_tokens: int | None = Field(
        default=None,
        ge=1,
        description="tokens between two states that the shared store keeps of a session, at most "
        "session_history_tokens; none: 32, or those",
    )
    request_timeout_ms: int = Field(
        default=30_000, ge=1, description="deadline of a request that names none, and the longest it may name"
    )
    max_connections: int = Field(default=8192, ge=1, description="connections at a time; more are answered 503")
    max_header_bytes: int = Field(
        default=64 * 2**10, ge=1024, description="longest head of a request: its first line and its headers"
    )
    header_timeout_s: float = Field(default=10, gt=0, description="time that the head of a request has to come in")
    body_timeout_s: float = Field(default=20, gt=0, description="time that the body of a request has to come in")
    send_timeout_s: float = Field(
        default=30, gt=0, description="time after which a client that reads nothing is cut off, on Linux"
    )
    stream_idle_s: float = Field(
        default=600, gt=0, description="time without a message after which a WebSocket is closed"
    )
    shutdown_delay_ms: int = Field(
        default=0,
        ge=0,
        description="time that a server which is to stop goes on taking requests while /readyz is 503 already: longer "
        "than a load balancer takes to see that, no request is refused",
    )
    drain_timeout_ms: int = Field(
        default=10_000, ge=0, description="time that admitted requests have to end when the server stops"
    )
    shadow_rate: float = Field(
        default=0,
        ge=0,
        le=1,
        description="share of predictions and steps that are answered by the other mode too, while the runner is idle, "
        "to measure agreement",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="what is logged")

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """One option for each field; what is not given is left out of the namespace."""
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
        """The settings of `environment`, overridden by parsed `options` (which may hold other things too).

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
            raise ValueError(f"{error}: an address is wanted, or a network such as 10.0.0.0/8") from None
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
                raise ValueError(f"{one!r} is no NAME=POLICY; policies are {', '.join(POLICIES)}")
        return value

    @field_validator("session_file")
    @classmethod
    def _is_for_memory(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("store", IN_MEMORY) != IN_MEMORY:
            raise ValueError("it is for sessions in memory, and the store is another")
        return value

    @field_validator("state_checkpoint_interval_tokens")
    @classmethod
    def _is_within_a_tail(cls, value: int | None, info: ValidationInfo) -> int | None:
        tail = int(info.data.get("session_history_tokens", value or 1))
        if value is not None and value > tail:
            raise ValueError(
                f"it must be at most session_history_tokens, which is {tail}: a tail reaches back to the last state"
            )
        return value

    def states_every(self, model: str, *, certified: bool) -> int | None:
        """In how many tokens the shared store is given a state of a session of `model`; None: never."""
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
        """Whether somebody named the default model: then its absence is fatal."""
        return "default_model" in self.model_fields_set
