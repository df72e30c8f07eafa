"""Sends the same bytes to two servers. One uses Wane's protocol classes, and the other uses uvicorn's own.

    python -m tests.service.net.http_fuzz --cases 20000

Compares the responses, whether the connection stays open, and the requests that reach the engine. `RULES` and
`CORRECTIONS` list the intended differences.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from typing import cast

import uvicorn
from uvicorn.server import ServerState

from tests.service.conftest import never
from tests.service.fake_engine import FakeRegistry
from tests.service.net.http_cases import Case, make_case
from wane.service.app import create_app
from wane.service.observability.metrics import Metrics
from wane.service.registry.registry import ModelRegistry
from wane.service.server import protocols
from wane.service.settings import Settings

# `max_body_bytes` is larger than the body of every case, so Wane reads every body to its end.
LIMITS = {"max_body_bytes": 2048, "max_header_bytes": 4096}
QUIET_TURNS = 40  # a client waits at least this many event loop iterations for another byte
CLOSED_S = 10.0  # the longest time, in seconds, that the server may need to clean up a closed connection


# The servers.


class EngineDelay:
    """Replaces the event for which the fake engine waits. The wait ends after `turns` event loop iterations."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def wait(self) -> None:
        for _ in range(self._turns):
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class Seen:
    """The bytes that a client received, whether the server closed the connection, and the requests that reached the
    engine."""

    received: bytes
    closed: bool
    asked: tuple[str, ...]


class Endpoint:
    """A server with a fake engine and without a listening socket. `converse` makes the connections."""

    def __init__(self, *, plain_uvicorn: bool) -> None:
        settings, metrics = Settings.model_validate(LIMITS), Metrics()
        self.registry = FakeRegistry()
        app = create_app(settings, cast(ModelRegistry, self.registry), metrics, on_load_failure=never)
        named = protocols(settings, metrics, app.dispatcher, plain_uvicorn=plain_uvicorn)
        self.config = uvicorn.Config(app, log_config=None, lifespan="off", server_header=False, **named)
        self.config.load()
        self.state = ServerState()

    def protocol(self) -> asyncio.Protocol:
        make = cast(Callable[..., asyncio.Protocol], self.config.http_protocol_class)
        return make(config=self.config, server_state=self.state, app_state={})

    async def converse(self, case: Case, quiet_s: float = 0.0) -> Seen:
        """Carries out the client's actions of a case on a new connection. Ignores the responses if the client resets
        the connection."""
        engine = self.registry.engine
        engine.asked.clear()
        engine.wait = cast(asyncio.Event, EngineDelay(case.wait_turns)) if case.wait_turns else None
        here, there = socket.socketpair()
        here.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(self.protocol, there)
        client = Client(here, quiet_s)
        for stage in case.stages:
            for part in stage:
                await client.send(part, case.turns)
            if case.leaves != "resets":
                await client.read_until_quiet()
        if case.leaves == "half-closes":
            with suppress(OSError):
                here.shutdown(socket.SHUT_WR)
            await client.read_until_quiet()
        seen = Seen(bytes(client.received), client.closed, tuple(without_deadline(one) for one in engine.asked))
        here.close()
        await self.until_closed()
        return Seen(b"", True, ()) if case.leaves == "resets" else seen

    async def until_closed(self) -> None:
        """Waits until the server has cleaned up the connection."""
        async with asyncio.timeout(CLOSED_S):
            while self.state.connections or self.state.tasks:  # noqa: ASYNC110
                await asyncio.sleep(0)


def without_deadline(asked: object) -> str:
    return re.sub(r"deadline=[^,)]*", "deadline=...", repr(asked))


class Client:
    """The client's end of a connection. The client stops waiting when no byte has arrived for QUIET_TURNS event loop
    iterations and for `quiet_s` seconds."""

    def __init__(self, connection: socket.socket, quiet_s: float) -> None:
        self.connection = connection
        self.quiet_s = quiet_s
        self.received = bytearray()
        self.closed = False

    async def send(self, data: bytes, turns: int) -> None:
        """Sends the data, and reads for `turns` event loop iterations."""
        with suppress(ConnectionError):
            self.connection.send(data)
        for _ in range(turns):
            await asyncio.sleep(0)
            self.read()

    def read(self) -> bool:
        """Reads the bytes that are available. Returns whether it has read any."""
        try:
            some = self.connection.recv(1 << 16)
        except BlockingIOError:
            return False
        except ConnectionError:
            some = b""
        self.closed = not some
        self.received += some
        return bool(some)

    async def read_until_quiet(self) -> None:
        """Reads until the connection is closed, or until no byte has arrived for QUIET_TURNS event loop iterations and
        for `quiet_s` seconds."""
        loop = asyncio.get_running_loop()
        silent_turns, since_s = 0, loop.time()
        while not self.closed and (silent_turns < QUIET_TURNS or loop.time() - since_s < self.quiet_s):
            await asyncio.sleep(0.001 if silent_turns > QUIET_TURNS else 0)
            silent_turns += 1
            if self.read():
                silent_turns, since_s = 0, loop.time()


# Parsing of responses.

Header = tuple[bytes, bytes]
CLOSE: Header = (b"connection", b"close")
SWITCHING = 101
SHORT_BYTES = 125  # the longest payload, in bytes, whose length fits in the second byte of a frame
CONTROL = 0x08  # the bit of a frame's first byte that is set in control frames
UNSTEADY = frozenset({b"date", b"server"})


@dataclass(frozen=True, slots=True)
class Response:
    """A response without the headers that differ for every request. For the response to a WebSocket handshake, `body`
    has the frames of the WebSocket."""

    status: int
    headers: tuple[Header, ...]
    body: bytes

    def without(self, header: Header) -> Response:
        """Returns the response without this header."""
        return replace(self, headers=tuple(one for one in self.headers if one != header))


def responses(received: bytes) -> list[Response]:
    """Returns the responses in these bytes, in order. Fails if the bytes are not a sequence of complete responses."""
    received = re.sub(rb"[0-9a-f]{32}", b"I" * 32, received)  # random ids, such as the request id
    found = []
    while received:
        head, end, rest = received.partition(b"\r\n\r\n")
        first, *lines = head.split(b"\r\n")
        assert end and re.match(rb"HTTP/1\.1 \d{3} ", first), received
        fields = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
        status, headers = int(first[9:12]), dict(fields)
        if status == SWITCHING:
            body, received = data_first(rest), b""
        elif rest.startswith(b"HTTP/1.1 ") or status < SWITCHING:  # a response to HEAD has a content-length but no body
            body, received = b"", rest
        elif headers.get(b"transfer-encoding") == b"chunked":
            body, received = dechunked(rest)
        else:
            size = int(headers.get(b"content-length", b"0"))
            body, received = rest[:size], rest[size:]
        kept = sorted((name, value) for name, value in fields if name not in UNSTEADY)
        found.append(Response(status, tuple(kept), body))
    return found


def dechunked(data: bytes) -> tuple[bytes, bytes]:
    """Returns a decoded chunked body, and the bytes after the body."""
    body, size = b"", -1
    while size:
        line, end, data = data.partition(b"\r\n")
        if not end:
            return body + b"(cut off)", b""
        size = int(line, 16)
        body, data = body + data[:size], data[size + 2 :]
    return body, data


def data_first(frames: bytes) -> bytes:
    """Returns a WebSocket's frames with all data frames before all control frames. A server may send a control frame
    between any two data frames, so the comparison ignores the positions of control frames."""
    data, control = b"", b""
    while len(frames) > 1:
        length, begin = frames[1], 2
        if length > SHORT_BYTES:
            begin += 2
            length = int.from_bytes(frames[2:begin])
        size = begin + length
        if frames[0] & CONTROL:
            control += frames[:size]
        else:
            data += frames[:size]
        frames = frames[size:]
    return data + control + frames


# Comparison.


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of both servers for one case."""

    ours: Seen
    theirs: Seen

    @property
    def is_same(self) -> bool:
        """Whether the two results are equal."""
        if (self.ours.closed, self.ours.asked) != (self.theirs.closed, self.theirs.asked):
            return False
        return self.ours.received == self.theirs.received or responses(self.ours.received) == responses(
            self.theirs.received
        )

    def starts_alike(self, count: int) -> bool:
        """Whether the first `count` responses of both servers are equal, and the list of one server's engine requests
        is a prefix of the other server's list."""
        ours, theirs = responses(self.ours.received)[:count], responses(self.theirs.received)[:count]
        return ours == theirs and is_prefix(*sorted((self.ours.asked, self.theirs.asked), key=len))


def is_prefix(short: Sequence[object], long: Sequence[object]) -> bool:
    return list(short) == list(long[: len(short)])


def malformed(both: Compared) -> bool:
    """Whether a malformed request explains the difference. uvicorn answers a malformed request without delay, and drops
    the unanswered requests before it. Wane answers the earlier requests first, and then refuses the malformed request
    with a reason. Wane answers nothing after a request that closes the connection."""
    ours, theirs = responses(both.ours.received), responses(both.theirs.received)
    return (
        bool(ours and theirs)
        and both.ours.closed
        and both.theirs.closed
        and theirs[-1].body == b"Invalid HTTP request received."
        and (ours[-1].body.startswith(b"malformed HTTP request: ") or CLOSE in ours[-1].headers)
        and len(theirs) <= len(ours) + 1
        and both.starts_alike(len(theirs) - 1)
    )


def last_by(status: int | None, body: bytes = b"") -> Callable[[Compared], bool]:
    """Returns a rule with three conditions. Wane's last response closes the connection. It has this status, unless
    `status` is None, and its body begins with `body`. Both servers send the same responses before the last response."""

    def applies(both: Compared) -> bool:
        ours = responses(both.ours.received)
        return (
            bool(ours)
            and both.ours.closed
            and CLOSE in ours[-1].headers
            and ours[-1].status == (status or ours[-1].status)
            and ours[-1].body.startswith(body)
            and both.starts_alike(len(ours) - 1)
        )

    return applies


def unread_body(both: Compared) -> bool:
    """Whether an unread chunked body explains the difference. Wane closes the connection if it answers a request before
    the request's chunked body has ended. uvicorn reads the rest of the body without a limit."""
    ours, theirs = responses(both.ours.received), responses(both.theirs.received)
    at = len(ours) - 1
    return last_by(None)(both) and len(theirs) > at and ours[at].without(CLOSE) == theirs[at]


def not_utf8(both: Compared) -> bool:
    """Whether a text that is not UTF-8 explains the difference. After such a text, Wane closes the WebSocket with a
    reason and waits for the client's close frame. uvicorn fails without a reason if it has already received the
    client's close frame."""
    ours, theirs = responses(both.ours.received), responses(both.theirs.received)
    if not ours or len(ours) != len(theirs) or ours[:-1] != theirs[:-1] or ours[-1].status != SWITCHING:
        return False
    reason = b"a text message is not valid UTF-8"
    long, short = b"\x88\x23\x03\xef" + reason, b"\x88\x02\x03\xef"
    replied = re.fullmatch(re.escape(theirs[-1].body) + rb"\x88\x02..", ours[-1].body, re.DOTALL)
    return ours[-1].body.replace(long, short) == theirs[-1].body or (replied is not None and both.theirs.closed)


def read_ahead(both: Compared) -> bool:
    """Whether Wane's reading ahead explains the difference. Wane reads the next messages of a WebSocket while it
    computes an answer. uvicorn does not. So Wane may read a frame that ends the WebSocket while messages before the
    frame are unanswered. It then ends the WebSocket without answering them."""
    ours, theirs = responses(both.ours.received), responses(both.theirs.received)
    if not ours or len(ours) != len(theirs) or ours[:-1] != theirs[:-1] or ours[-1].status != SWITCHING:
        return False
    answered, close, reason = ours[-1].body.rpartition(b"\x88")
    return (
        both.ours.closed
        and both.theirs.closed
        and bool(close)
        and theirs[-1].body.startswith(answered)
        and theirs[-1].body.endswith(close + reason)
    )


RULES: dict[str, Callable[[Compared], bool]] = {
    "malformed": malformed,
    "a head over max_header_bytes": last_by(431),
    "CONNECT with a body": last_by(400, b"malformed HTTP request: CONNECT takes no body"),
    "answered before its chunked body ended": unread_body,
    "text that is not UTF-8": not_utf8,
    "WebSocket ended before all answers": read_ahead,
}
"""The rules of intended differences, by name. A rule returns whether the results of both servers differ as intended."""

CORRECTIONS: dict[str, Callable[[Case], Case]] = {
    "CONNECT, or Upgrade to another protocol": Case.without_upgrade,
    "handshake after requests": Case.with_handshake_after_answers,
    "white space after a header": Case.without_space,
}
"""The known errors of uvicorn. Each value changes a case so that the error does not occur. Wane must answer the
original case as uvicorn answers the changed case.

If a request asks for an upgrade to a protocol other than WebSocket, uvicorn drops the request's body and all later
bytes. uvicorn also drops all bytes after a CONNECT request. uvicorn starts a WebSocket before it has answered the
requests that precede the handshake. uvicorn treats the white space after a header's value as a part of the value,
contrary to RFC 9110, 5.5.
"""


def corrections(case: Case) -> Iterator[tuple[str, Case]]:
    """Applies every combination of corrections to the case. Yields the name of the combination and the corrected case,
    unless the case stays the same."""
    for count in range(1, len(CORRECTIONS) + 1):
        for names in combinations(CORRECTIONS, count):
            corrected = case
            for name in names:
                corrected = CORRECTIONS[name](corrected)
            if corrected.sent != case.sent:
                yield " + ".join(names), corrected


@dataclass(frozen=True, slots=True)
class Difference:
    """A case with an unintended difference."""

    number: int
    case: Case
    compared: Compared


class Fuzz:
    """Runs cases on both servers. If the results of a case differ, runs the case again with a client that waits
    `sure_s` seconds for more bytes."""

    def __init__(self, sure_s: float = 0.3) -> None:
        self.sure_s = sure_s
        self.ours = Endpoint(plain_uvicorn=False)
        self.theirs = Endpoint(plain_uvicorn=True)

    async def run(self, seed: int, numbers: Iterable[int]) -> tuple[Counter[str], list[Difference]]:
        """Runs the cases with these numbers. Returns the number of cases for each verdict ("same", or the name of a
        rule or correction), and the unintended differences."""
        counted: Counter[str] = Counter()
        different = []
        for number in numbers:
            case = make_case(seed, number)
            verdict = await self.verdict(case) or await self.verdict(case, self.sure_s)
            if verdict is None:
                different.append(Difference(number, case, await self.play(case, case, self.sure_s)))
            else:
                counted[verdict] += 1
        return counted, different

    async def play(self, case: Case, theirs: Case, quiet_s: float = 0.0) -> Compared:
        """Runs `case` on Wane's protocol classes, and `theirs` on uvicorn's."""
        return Compared(await self.ours.converse(case, quiet_s), await self.theirs.converse(theirs, quiet_s))

    async def verdict(self, case: Case, quiet_s: float = 0.0) -> str | None:
        """Returns "same", or the name of the rule or correction of an intended difference. Returns None for an
        unintended difference."""
        compared = await self.play(case, case, quiet_s)
        if compared.is_same:
            return "same"
        if (rule := intended_rule(compared)) is not None:
            return rule
        for name, corrected in corrections(case):
            compared = await self.play(case, corrected, quiet_s)
            if compared.is_same or intended_rule(compared) is not None:
                return name
        return None


def intended_rule(both: Compared) -> str | None:
    """Returns the name of the first rule that explains the difference, or None."""
    return next((name for name, applies in RULES.items() if applies(both)), None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the cases, and prints the results. Returns 1 if there is an unintended difference."""
    parser = argparse.ArgumentParser(prog="python -m tests.service.net.http_fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)
    counted, different = asyncio.run(run(given.seed, given.cases))
    lines = [f"{count:7} {name}" for name, count in counted.most_common()] + [f"{len(different):7} differences"]
    for one in different:
        lines += ["", f"seed {given.seed}, case {one.number}: {one.case}"]
        lines += [f"  Wane:    {one.compared.ours}", f"  uvicorn: {one.compared.theirs}"]
    print("\n".join(lines))  # noqa: T201
    return bool(different)


async def run(seed: int, cases: int) -> tuple[Counter[str], list[Difference]]:
    """Runs cases on new servers."""
    return await Fuzz().run(seed, range(cases))


if __name__ == "__main__":
    sys.exit(main())
