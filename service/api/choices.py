"""Runs the samples of a completion request concurrently, and builds OpenAI's choices from the generated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

from msgspec.structs import astuple

from wane.models.vocabulary import Vocabulary
from wane.service.api.schemas.completions import ChoiceDocument, LogprobsDocument
from wane.service.engine.engine import Engine
from wane.service.engine.generate import TextPieces
from wane.service.engine.stream import Stream
from wane.service.types.answer import Prediction
from wane.service.types.request import GenerateRequest
from wane.service.types.text import Finish, FinishReason, GeneratedToken, Score

T = TypeVar("T")

Generation = Stream[GeneratedToken | Finish]

AHEAD = 4
"""The queue between a request's generations and its client holds at most this many tokens for each sample."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a request. `text` and `score` are None unless the answer repeats the prompt (`echo`). `score` is
    also None if no log-probabilities are requested."""

    tokens: Sequence[int]
    text: str | None = None
    score: Score | None = None


class Choice:
    """Builds one of OpenAI's choices in parts. Each part is a `ChoiceDocument` with the next piece of the choice's
    text."""

    def __init__(
        self,
        index: int,
        vocabulary: Vocabulary,
        prompt: Prompt,
        generation: Generation | None,
        *,
        has_logprobs: bool,
    ) -> None:
        """`index` is the choice's index in the answer. `generation` is None if no tokens are generated."""
        self.tokens = 0
        """The number of tokens that have been generated for this choice."""
        self.finish: Finish | None = None
        """The end of the generation, once it has ended."""
        self._index = index
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._generation = generation
        self._pieces = TextPieces(vocabulary)
        self._has_logprobs = has_logprobs
        self._between = "" if prompt.text is None else self._pieces.separator  # between the prompt and the next token
        self._offset = len(prompt.text or "") + len(self._between)

    async def whole(self) -> ChoiceDocument:
        """Returns the choice when its generation has ended."""
        async with aclosing(self.parts()) as stream:
            parts = [part async for part in stream]
        parts_of_logprobs = [astuple(part.logprobs) for part in parts if part.logprobs is not None]
        logprobs: LogprobsDocument | None = None
        if parts_of_logprobs:
            logprobs = LogprobsDocument(
                *[list(chain.from_iterable(lists)) for lists in zip(*parts_of_logprobs, strict=True)]
            )
        return ChoiceDocument(self._index, "".join([part.text for part in parts]), logprobs, parts[-1].finish_reason)

    async def parts(self) -> AsyncGenerator[ChoiceDocument, None]:
        """Yields the parts of the choice as soon as its tokens are generated. The last part has the finish reason. The
        caller must close the generator."""
        if self._prompt.text is not None:
            yield ChoiceDocument(self._index, self._prompt.text, self._scored(self._prompt.score), None)
        if self._generation is not None:
            async for item in self._generation:
                if isinstance(item, Finish):
                    self.finish = item
                elif (part := self._added(item)) is not None:
                    yield part
        stopped = self.finish is not None and self.finish.finish_reason is FinishReason.STOP
        yield ChoiceDocument(self._index, "", None, "stop" if stopped else "length")

    def _scored(self, score: Score | None) -> LogprobsDocument | None:
        """Returns the log-probabilities of the prompt's tokens, and the most probable tokens at each position. Returns
        None if the choice has no log-probabilities."""
        if score is None:
            return None
        pieces, offset, logprobs = TextPieces(self._vocabulary), 0, LogprobsDocument([], [], [], [])
        for token, logprob, places in zip(score.tokens, score.logprobs, score.predictions or (), strict=True):
            assert token is not None, "the score of a prompt has a skipped event: this is a bug"
            self._add(logprobs, token, logprob, places or (), offset)
            offset += len(pieces.push(token))
        return logprobs

    def _added(self, item: GeneratedToken) -> ChoiceDocument | None:
        """Returns the part for a generated token, or None if the part would be empty."""
        self.tokens += 1
        logprobs: LogprobsDocument | None = None
        if self._has_logprobs:
            logprobs = LogprobsDocument([], [], [], [])
            self._add(logprobs, item.token_id, item.logprob, item.predictions or (), self._offset)
            self._offset += len(self._pieces.push(item.token_id))
        text = item.text
        if text:
            text, self._between = self._between + text, ""
        elif logprobs is None:
            return None
        return ChoiceDocument(self._index, text, logprobs, None)

    def _add(
        self, logprobs: LogprobsDocument, token: int, logprob: float | None, places: Sequence[Prediction], offset: int
    ) -> None:
        """Adds a token to `logprobs`. `logprob` is None if the model has no prediction of the token."""
        name = self._name(token)
        top: dict[str, float] | None = None
        if logprob is not None:
            top = {self._name(place.token_id): place.logprob for place in places} | {name: logprob}
        logprobs.tokens.append(name)
        logprobs.token_logprobs.append(logprob)
        logprobs.top_logprobs.append(top)
        logprobs.text_offset.append(offset)

    def _name(self, token: int) -> str:
        """Returns a token's text. If the token alone is not valid UTF-8, returns its bytes in OpenAI's notation, such
        as `bytes:\\xe2\\x80`."""
        partial = self._vocabulary.partials[token]
        if partial is None:
            return self._vocabulary.texts[token]
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in partial)


async def together(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """Runs the calls concurrently, and returns their results in the order of `calls`. If a call fails, cancels the
    other calls and raises the error."""
    if len(calls) == 1:
        return [await calls[0]()]
    tasks: list[asyncio.Future[T]] = []
    try:
        for call in calls:
            tasks.append(asyncio.ensure_future(call()))
            await asyncio.sleep(0)  # lets the event loop run other work between the beginnings of many calls
        return list(await asyncio.gather(*tasks))
    except BaseException:
        await _cancelled(tasks)
        raise
    finally:
        tasks.clear()  # they hold the error, whose traceback holds this frame


async def started(engine: Engine, wanted: Sequence[GenerateRequest], held: AsyncExitStack) -> list[Generation]:
    """Starts generations concurrently, and returns them when each has its first token. `held` closes them, also those
    that have begun before another failed."""

    async def start(request: GenerateRequest) -> Generation:
        generation = await engine.generate(request)
        held.push_async_callback(generation.aclose)
        return generation

    return await together([partial(start, request) for request in wanted])


async def merged(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Yields the items of all streams in the order of their arrival. Closes the streams at the end. The caller must
    close the generator."""
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue(AHEAD * len(streams))

    async def read(stream: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put(item)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.ensure_future(read(stream)) for stream in streams]
    left = len(streams)
    item: T | BaseException | None
    try:
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        item = None
        try:
            await _cancelled(tasks)
        finally:
            while not queue.empty():  # the traceback of an error in the queue holds the queue
                queue.get_nowait()


async def _cancelled(tasks: Sequence[asyncio.Future[T]]) -> None:
    """Cancels the tasks, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
