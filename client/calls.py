"""The calls of a client, as plans (see `retry.py`)."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, Unpack

from .answers import Answer, Comparison, Generated, GeneratedToken, Model, Report, Score
from .errors import Unreachable, error_of
from .options import CompareOptions, GenerateOptions, Input, PredictOptions, ScoreOptions, Timed, checked, sequence
from .retry import DAY_S, Broken, Plan, Read, Reply, Servers

T = TypeVar("T")

BAR = 40


@dataclass(frozen=True, slots=True)
class Progress:
    """How many tokens of a score are done."""

    done: int = 0
    total: int = 1


@dataclass
class Calls:
    """The calls of `Wane` and of `AsyncWane`."""

    servers: Servers
    kinds: dict[str, str] = field(default_factory=dict)  # the kind of each model's vocabulary

    def predict(self, input: Input, **options: Unpack[PredictOptions]) -> Plan[Answer]:  # noqa: A002
        """Predicts what follows a text, token ids, or a list of names of events."""
        body, deadline = self.started(PredictOptions, options)
        return (yield from self.post(Answer, "/v1/predict", {**sequence(input), **body}, deadline))

    def compare(self, input: Input, **options: Unpack[CompareOptions]) -> Plan[tuple[Comparison, ...]]:  # noqa: A002
        """Compares recurrent mode with windows of several sizes. Returns a comparison for each model."""
        body, deadline = self.started(CompareOptions, options)
        body |= sequence(input)
        kind = tuple[Comparison, ...]
        return (yield from self.servers.ask(kind, "POST", "/v1/compare", body, deadline, member="models"))

    def score(self, input: Input, *, progress: bool = False, **options: Unpack[ScoreOptions]) -> Plan[Score]:  # noqa: A002
        """Returns the log-probability of each token. `progress` shows a bar on stderr."""
        body, deadline = self.started(ScoreOptions, options)
        body |= sequence(input)
        if not progress:
            return (yield from self.post(Score, "/v1/score", body, deadline))
        return (yield from self._score(Events(self.servers, "/v1/score", body, deadline)))

    def _score(self, events: Events) -> Plan[Score]:
        """Joins the events of a score, and shows their progress."""
        found: dict[str, Any] = {}
        while True:
            name, content = yield from events.next("progress", "tokens", "finish")
            if name == "progress":
                progress = events.read(Progress, content)
                share = progress.done / max(progress.total, 1)
                bar = "#" * int(BAR * share)
                sys.stderr.write(f"\r[{bar:{BAR}}] {share:4.0%}" + "\n" * (share == 1))
            elif name == "tokens":
                for part, values in events.read(dict[str, Any], content).items():
                    if isinstance(values, list):
                        found.setdefault(part, []).extend(values)
            else:
                whole = events.read(dict[str, Any], content) | found
                yield Read(events.ended(), 0)
                return events.read(Score, json.dumps(whole).encode())

    def generate(self, input: Input, **options: Unpack[GenerateOptions]) -> Plan[Generated]:  # noqa: A002
        """Continues a text, token ids, or a list of names of events."""
        body, deadline = self.started(GenerateOptions, options)
        return (yield from self.post(Generated, "/v1/generate", {**sequence(input), **body}, deadline))

    def generation(self, input: Input, options: GenerateOptions) -> Events:  # noqa: A002
        """Returns the stream of a generation, which starts with its first token."""
        body, deadline = self.started(GenerateOptions, options)
        return Events(self.servers, "/v1/generate", {**sequence(input), **body}, deadline)

    def models(self, **options: Unpack[Timed]) -> Plan[tuple[Model, ...]]:
        """Returns the served models. The default model is the first."""
        _, deadline = self.started(Timed, options)
        models = yield from self.servers.ask(tuple[Model, ...], "GET", "/v1/models", None, deadline, member="data")
        self.kinds = {one.id: one.vocabulary.kind for one in models}
        return models

    def report(self, **options: Unpack[Timed]) -> Plan[Report]:
        """Returns a server's statistics since its start."""
        _, deadline = self.started(Timed, options)
        reply = yield from self.servers.reply("GET", "/v1/report", None, deadline)
        report = self.servers.read(Report, "GET", "/v1/report", reply.content)
        return replace(report, document=json.loads(reply.content))

    def started(self, kind: type, options: Any) -> tuple[dict[str, Any], float]:
        """Checks the options of a call. Returns the fields of its body, and its deadline. Raises ValueError."""
        body = checked(kind, options)
        return body, self.servers.clock() + body.pop("deadline_s", self.servers.deadline_s)

    def post(self, kind: type[T], path: str, body: object, deadline: float) -> Plan[T]:
        return (yield from self.servers.ask(kind, "POST", path, body, deadline))


@dataclass
class Events:
    """The server-sent events of one answer. Lines end in line feeds only: JSON may contain other line breaks."""

    servers: Servers
    path: str
    body: dict[str, Any]
    deadline: float
    reply: Reply | None = None
    buffer: bytes = b""
    begun: bool = False

    def begin(self) -> None:
        """Marks the stream as read. Raises RuntimeError the second time."""
        if self.begun:
            raise RuntimeError("a generation can be iterated over only once")
        self.begun = True

    def next(self, *names: str) -> Plan[tuple[str, bytes]]:
        """Returns the next event that has one of these names, and its JSON. Raises the error of an event `error`."""
        if self.reply is None:
            body = {**self.body, "stream": True}
            self.reply = yield from self.servers.reply("POST", self.path, body, self.deadline, streamed=True)
        while True:
            while b"\n\n" not in self.buffer:
                self.buffer += yield from self._chunk(self.reply)
            text, _, self.buffer = self.buffer.partition(b"\n\n")
            lines = [line.partition(b":") for line in text.split(b"\n")]  # a comment has an empty name
            fields = {field: value.removeprefix(b" ") for field, _, value in lines}
            name, content = fields.get(b"event", b"").decode(errors="replace"), fields.get(b"data", b"")
            if name == "error":
                document = self.read(dict[str, Any], content)
                status = document.get("status")
                raise error_of(f"POST {self.path}", status if type(status) is int else 500, document, "", None)
            if name in names:
                return name, content

    def _chunk(self, reply: Reply) -> Plan[bytes]:
        chunk = yield Read(reply, min(self.deadline - self.servers.clock(), DAY_S))
        if isinstance(chunk, bytes):
            return chunk
        reason = chunk.reason if isinstance(chunk, Broken) else "it ended early"
        raise Unreachable(f"the answer to POST {self.path} was cut off: {reason}")

    def token(self) -> Plan[GeneratedToken | Generated]:
        """Returns the next generated token. After the last, returns the whole generation."""
        name, content = yield from self.next("token", "finish")
        return self.read(GeneratedToken, content) if name == "token" else self.read(Generated, content)

    def ended(self) -> Reply:
        """Returns the reply, which is to be ended."""
        assert self.reply is not None, "an event was read: this is a bug"
        return self.reply

    def read(self, kind: type[T], content: bytes) -> T:
        return self.servers.read(kind, "POST", self.path, content)
