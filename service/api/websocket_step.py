"""Steps of a stream that need one run and nothing else, without a task: a message is begun where it is read, and
answered where its run is over. All others, and all that went wrong, are left to the stream's task."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, NamedTuple

from pydantic_core import from_json

from wane.service.api import encode
from wane.service.api.body import LARGE_BYTES, parse
from wane.service.api.channel import Wire
from wane.service.api.encode import json_bytes
from wane.service.api.schemas.common import StreamBody
from wane.service.engine.engine import late
from wane.service.engine.inline_step import QuickStep
from wane.service.errors import Abandoned
from wane.service.net.timers import Alarm, alarms
from wane.service.registry.swap import Wave
from wane.service.types import Answer, StepRequest

if TYPE_CHECKING:
    from wane.service.api.routes.stream import Stream


class Begun(NamedTuple):
    """What was done for a message before the stream's task took it: it was charged for, and then nothing (None), or
    failed, or made a step that is over. `wave` is the one that it entered, `started_s` by `time.perf_counter`."""

    outcome: QuickStep | Exception | None
    started_s: float
    wave: Wave


class AtOnce:
    """Begins the steps of one stream, one at a time: while there is one, its task is given nothing."""

    def __init__(self, stream: Stream, wire: Wire) -> None:
        self._stream = stream
        self._wire = wire
        self._inbox = wire.inbox
        self._message = ""
        self._started_s = 0.0
        self._wave = Wave()
        self._alarm: Alarm | None = None
        self._quick: QuickStep | None = None
        self._inbox.beginner = self

    def begin(self, message: str) -> bool:
        """Whether the message is taken; else it is the task's."""
        stream = self._stream
        if stream.engine.retired or len(message) > LARGE_BYTES or not self._wire.may_say():
            return False
        started_s = time.perf_counter()
        stream.heard_s = stream.loop.time()
        deadline = stream.heard_s + stream.here.timeout_s
        try:
            token = only_token(message)
            if token is not None:
                step = StepRequest(stream.session, (token,), deadline=deadline)
            else:
                body = parse(message, StreamBody)
                if body.tokens is None:
                    return False
                step = stream.step(body, tuple(body.tokens), deadline)
        except Exception:  # the task will say so
            return False
        wave = stream.catalog.presence.enter()
        try:
            stream.charge()
            quick = stream.engine.begin(step)
        except Exception as error:
            stream.begun = Begun(error, started_s, wave)
            return False
        if quick is None:
            stream.begun = Begun(None, started_s, wave)
            return False
        self._message, self._started_s, self._wave, self._quick = message, started_s, wave, quick
        self._alarm = alarms().at(deadline, self._ring)
        quick.answer.add_done_callback(self._answered)
        return True

    def give_up(self) -> None:
        """The client has left. What is in a batch is carried through, and then told to nobody."""
        quick = self._quick
        if quick is not None and not quick.ticket.entered:
            self._stream.log["error"] = Abandoned.code
            self.leave()
            self._inbox.go_on()

    @property
    def is_busy(self) -> bool:
        """Whether a step is on its way."""
        return self._quick is not None

    def close(self) -> None:
        """There is no task any more."""
        self._inbox.beginner = None
        self.leave()

    def leave(self) -> None:
        """Nobody waits for the step any more, if there is one."""
        quick, self._quick = self._quick, None
        if quick is not None:
            self._at_ease()
            quick.leave()
            self._wave.leave()

    def _answered(self, answer: asyncio.Future[Answer | None]) -> None:
        error = answer.exception()
        quick, stream = self._quick, self._stream
        if quick is None or quick.answer is not answer:
            return
        if error is not None or (given := answer.result()) is None:  # another writer was first: it is tried again
            self._hand_over(quick)
            return
        try:
            stream.engine.count("step", given)
            text = json_bytes(encode.answer(stream.engine, given))
        except Exception as unexpected:
            self._hand_over(unexpected)
            return
        self._quick = None
        self._at_ease()
        if self._wire.say_now(text):
            stream.count(200, self._started_s)
        stream.heard_s = stream.loop.time()
        self._wave.leave()
        self._inbox.go_on()

    def _ring(self) -> None:
        self._alarm = None
        if self._quick is not None:
            self._hand_over(late(self._quick, self._quick.ticket))

    def _hand_over(self, outcome: QuickStep | Exception) -> None:
        """The task has the message, and what became of it."""
        self._quick = None
        self._at_ease()
        self._stream.begun = Begun(outcome, self._started_s, self._wave)
        self._inbox.put_back({"type": "websocket.receive", "text": self._message})
        self._inbox.go_on()

    def _at_ease(self) -> None:
        """No deadline is waited for."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


def only_token(message: str) -> int | None:
    """The token of a message that has one and says nothing else: most are such, and need no model to be read by. None
    of any other, good or bad."""
    try:
        document = from_json(message)
    except ValueError:
        return None
    if type(document) is not dict or len(document) != 1:
        return None
    tokens = document.get("tokens")
    return tokens[0] if type(tokens) is list and len(tokens) == 1 and type(tokens[0]) is int else None
