"""The server's settings, in one frozen object. The settings are read from `WANE_...` variables and from the command
line.

The command line overrides the environment, and the environment overrides the defaults. An unknown `WANE_...` variable
is an error, because a misspelt limit would otherwise silently keep its default. The name of a setting ends in the
setting's unit.
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
SECRET = re.compile("(?<=//)[^/]*(?=@)|(?<=password=)[^&']*")  # matches the user name and the password in an address
# settings without a command-line option, because other users of the machine can read the command line
NOT_AN_OPTION = frozenset({"api_keys"})
POLICIES = ("auto", "tail", "state")
# Variables with the prefix WANE_ that the client and the tests use.
FOREIGN = frozenset({"WANE_API_KEY", "WANE_DATA", "WANE_REQUIRE_STACK", "WANE_URL"})

UNITS = {"_us": "microseconds", "_ms": "milliseconds", "_s": "seconds", "_bytes": "bytes", "_tokens": "tokens"}

SHIPPED = Path(__file__).parents[1] / "models" / "bundles"
"""The folder of the bundles that the package ships."""


class SettingsError(Exception):
    """A setting is unknown or out of range. The message names the setting. The server process exits after this
    error."""


class Settings(BaseModel):
    """The operator's settings. Each field has a command-line option and a `WANE_...` variable with the field's name.
    The field's docstring describes it in `wane serve --help` and in docs/settings.md."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    host: str = "127.0.0.1"
    """address to listen on"""
    port: int = Field(default=8000, ge=0, le=65535)
    """TCP port to listen on; 0 selects a free port"""
    workers: int | Literal["auto"] = Field(default=1, ge=1, le=256)
    """number of processes that serve the port together, each on about one core; auto: one for each core"""
    api_keys: SecretStr | None = None
    """accepted API keys, as comma-separated NAME:KEY or NAME:KEY:SCOPE; scopes are use, metrics and admin"""
    api_keys_file: Path | None = None
    """a file with the hashes of API keys; the server reads it again when it changes; see docs/security.md. Without any
    keys, the server accepts requests from every client"""
    trusted_proxies: str | None = None
    """comma-separated addresses and networks of proxies; for a connection from one of them, the log names the client in
    the header x-forwarded-for; for every other connection, the log names the connection's peer"""
    cors_origins: str | None = Field(default=None, pattern=r"^(\*|https?://[^/,\s*]+(,https?://[^/,\s*]+)*)$")
    """comma-separated origins of browser pages that may call the server, such as https://shop.example; * allows the
    pages of every origin; none: browsers let only the server's own pages read answers"""
    console: Literal["on", "off"] = "on"
    """off: there is no console, the page at / for trying the models in a browser"""
    bundles: Path = SHIPPED
    """a folder of bundles, each in NAME or in NAME/VERSION, or the path of one bundle"""
    require_all: bool = False
    """exit if any model fails to load; without it, exit only if the default model fails to load"""
    model_poll_interval_s: float | None = Field(default=None, gt=0)
    """time between two checks of the bundles' folder for new versions, which are then loaded; none: new versions are
    loaded only on request"""
    default_model: str = "gated-stable-64"
    """the model for requests without a model name; if this setting is not set: the only model, or gated-stable-64 if
    there are several models, or the first model by name if gated-stable-64 is not one of them"""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """the device that runs the models; auto uses cuda if it is available; cuda never falls back to cpu"""
    threads: int = Field(default=1, ge=1, le=256)
    """intra-op threads of onnxruntime for each model's runner"""
    inline_batch_max_us: int = Field(default=1000, ge=0)
    """a batch of one-token steps runs on the event loop if its expected duration is at most this value, and a single
    step if it is at most three times this value; every other batch runs on the runner's thread"""
    max_batch_size: int = Field(default=64, ge=1, le=4096)
    """largest number of requests in one batch"""
    max_queue: int = Field(default=1024, ge=1)
    """largest number of requests in the queue of one model's runner; the server answers further requests with 429"""
    max_batch_inputs: int = Field(default=256, ge=1)
    """largest number of inputs in one batched request"""
    max_input_tokens: int = Field(default=65536, ge=1)
    """longest input of a request that does not score"""
    max_scored_tokens: int = Field(default=262_144, ge=1)
    """longest input of a scoring request; also the largest total length of the inputs of one batched request"""
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)
    """longest request body"""
    max_answer_bytes: int = Field(default=128 * 2**20, ge=2**20)
    """largest answer of an inference; the logits and log-probabilities that it asks for are counted before it runs"""
    receive_budget_bytes: int = Field(default=256 * 2**20, ge=1)
    """memory for bodies and WebSocket messages that are being received or are not answered yet; the bytes of a
    connection with at most 4096 such bytes are not counted; when the memory is used up, the server answers further
    bodies with 429; a value below twice max_body_bytes counts as twice max_body_bytes"""
    max_window: int | None = Field(default=None, ge=1)
    """largest window in tokens that a request may ask for; a model's own limit applies if it is smaller"""
    max_generated_tokens: int = Field(default=4096, ge=1)
    """largest number of tokens that one request may generate for each sample"""
    max_filter_events: int = Field(default=10_000, ge=1)
    """largest number of events in the list `exclude` or `candidates` of a request"""
    top_k_limit: int = Field(default=100, ge=1)
    """largest number of predictions in one answer"""
    session_history_tokens: int = Field(default=256, ge=1)
    """number of latest tokens that are kept of a session; if a loaded model needs more tokens for its largest window or
    its cache, that larger number is used"""
    state_budget_bytes: int = Field(default=256 * 2**20, ge=1)
    """memory of each model for its sessions' resident states"""
    prefix_states: Literal["on", "off"] = "on"
    """on: the states that prompts of at least 64 tokens leave are kept within state_budget_bytes, and a later prompt of
    the same API key that begins with the same tokens runs only the tokens after them"""
    state_ttl_s: float | None = Field(default=None, gt=0)
    """idle time after which a session's state is evicted; the next step recomputes the state; none: the value of
    session_ttl_s"""
    session_ttl_s: float = Field(default=3600, gt=0)
    """idle time after which a session expires"""
    session_budget_bytes: int = Field(default=2**30, ge=1)
    """memory for sessions without their states: about 300 bytes for each session, and 2 bytes for each token of its
    history (4 bytes if the vocabulary has over 65536 tokens), where a session whose state is resident counts with
    session_history_tokens; when it is used up, the server answers new sessions with 429"""
    store: str = Field(
        default=IN_MEMORY, repr=False, pattern=rf"^({IN_MEMORY}|(redis|rediss)(\+cluster)?://.+|unix://.+)$"
    )
    """the session store: memory, or the address of a Redis that replicas share, such as redis://host:6379/0, rediss://
    with TLS, unix:// for a socket; for a cluster, redis+cluster:// or rediss+cluster:// with one of its nodes"""
    session_file: Path | None = None
    """file to which the server writes the sessions in memory after it has drained, and from which it reads them at
    startup"""
    store_password_file: Path | None = None
    """a file with the password for Redis; used if the address has no password"""
    store_namespace: str = Field(default="default", pattern=r"^[A-Za-z0-9._~-]{1,64}$")
    """part of every key in Redis; servers with different namespaces do not share sessions"""
    store_timeout_ms: int = Field(default=1000, ge=1)
    """timeout of a Redis command; after a timeout, Redis counts as unreachable, and requests to sessions are answered
    with 503 until Redis answers again"""
    store_policy: str = "auto"
    """what Redis stores of a session in addition to its history: with tail nothing, with state a state at intervals;
    auto means state for models that are not certified, and tail for all others. For single models:
    auto,NAME=state,NAME=tail"""
    state_checkpoint_interval_tokens: int | None = Field(default=None, ge=1)
    """number of tokens between two states of a session in Redis, at most session_history_tokens; none: the smaller of
    32 and session_history_tokens"""
    request_timeout_ms: int = Field(default=30_000, ge=1)
    """default and maximum timeout of a request"""
    max_connections: int = Field(default=8192, ge=1)
    """largest number of open connections; the server answers requests on further connections with 503"""
    max_header_bytes: int = Field(default=64 * 2**10, ge=1024)
    """largest size of the head of a request: its first line and its headers"""
    header_timeout_s: float = Field(default=10, gt=0)
    """timeout for receiving the head of a request"""
    body_timeout_s: float = Field(default=20, gt=0)
    """timeout for receiving the body of a request"""
    send_timeout_s: float = Field(default=30, gt=0)
    """time after which the server disconnects a client that does not read its response, on Linux"""
    stream_idle_s: float = Field(default=600, gt=0)
    """idle time after which the server closes a WebSocket"""
    shutdown_delay_ms: int = Field(default=0, ge=0)
    """time for which a stopping server still accepts requests, while /readyz already answers 503; no request is
    rejected if the load balancer notices the 503 within this time"""
    load_timeout_s: float = Field(default=600, gt=0)
    """time after which the server gives up reading a bundle, because its disk does not answer"""
    drain_timeout_ms: int = Field(default=10_000, ge=0)
    """timeout for requests in flight when the server stops"""
    shadow_rate: float = Field(default=0, ge=0, le=1)
    """share of predictions and steps that the server repeats in the other mode, while it is idle, to measure the
    agreement of the recurrent mode and the window mode"""
    live_accuracy: int = Field(default=0, ge=0, le=1000)
    """K: the number of tokens of each answer to a step that the server keeps, to look up the session's next token among
    them; /v1/report and /metrics then have recall@K and MRR@K of the answers; 0: none"""
    check_invariants: bool = False
    """for debugging: check every second whether the counts and indexes of the states in memory agree, and abort the
    process if they do not"""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """lowest level of logged messages"""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds one option for each field. An option that was not given is absent from the parsed namespace."""
        group = parser.add_argument_group("settings", "each setting is an option and a WANE_... variable")
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
        """Returns the settings of `environment`, overridden by the parsed `options`. Ignores options that are not
        settings.

        The message of SettingsError names the invalid variable or option.
        """
        values: dict[str, str] = {}
        for variable, value in environment.items():
            if not variable.startswith(PREFIX) or variable in FOREIGN:
                continue
            name = variable.removeprefix(PREFIX).lower()
            if name not in cls.model_fields or variable != PREFIX + name.upper():
                raise SettingsError(f"{variable} is not a setting; `wane serve --help` lists all settings")
            values[name] = value
        chosen = {} if options is None else {k: v for k, v in vars(options).items() if k in cls.model_fields}
        try:
            return cls.model_validate(values | chosen)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            source = f"--{name.replace('_', '-')}" if name in chosen else PREFIX + name.upper()
            value = "..." if name in NOT_AN_OPTION else SECRET.sub("...", repr(first["input"]))
            raise SettingsError(f"{source} is {value}: {first['msg']}") from None

    @field_validator("trusted_proxies")
    @classmethod
    def _are_addresses(cls, value: str | None) -> str | None:
        try:
            for network in () if value is None else value.split(","):
                ip_network(network.strip())
        except ValueError as error:
            raise ValueError(f"{error}: it must be an address, or a network such as 10.0.0.0/8") from None
        return value

    @field_validator("store_policy")
    @classmethod
    def _names_policies(cls, value: str) -> str:
        general, *single = value.split(",")
        if general not in POLICIES:
            raise ValueError(f"it must begin with one of {', '.join(POLICIES)}")
        for pair in single:
            model, _, policy = pair.partition("=")
            if not model or policy not in POLICIES:
                raise ValueError(f"{pair!r} is not NAME=POLICY; policies are {', '.join(POLICIES)}")
        return value

    @field_validator("session_file")
    @classmethod
    def _is_for_memory(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("store", IN_MEMORY) != IN_MEMORY:
            raise ValueError("it is only for sessions in memory, but the value of the setting 'store' is not 'memory'")
        return value

    @field_validator("state_checkpoint_interval_tokens")
    @classmethod
    def _is_within_a_tail(cls, value: int | None, info: ValidationInfo) -> int | None:
        tail = int(info.data.get("session_history_tokens", value or 1))
        if value is not None and value > tail:
            raise ValueError(
                f"it must be at most session_history_tokens, which is {tail}, because a session's history must "
                "reach back to the last stored state"
            )
        return value

    def states_every(self, model: str, *, certified: bool) -> int | None:
        """Returns the number of tokens between two stored states of one session of `model` in the shared store. Returns
        None if the store holds no states."""
        general, *single = self.store_policy.split(",")
        policy = dict(pair.split("=") for pair in single).get(model, general)
        if policy == "auto":
            policy = "tail" if certified else "state"
        if policy != "state" or self.store == IN_MEMORY:
            return None
        return self.state_checkpoint_interval_tokens or min(
            STATE_CHECKPOINT_INTERVAL_TOKENS, self.session_history_tokens
        )
