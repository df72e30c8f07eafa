"""Runs the samples of a completion request concurrently, and builds OpenAI's choices from the generated tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import TypeVar

from wane.models.vocabulary import Vocabulary
from wane.service.api.schemas.completions import ChoiceDocument, LogprobsDocument
from wane.service.engine.generate import TextPieces
from wane.service.engine.stream import Stream
from wane.service.types.answer import Prediction
from wane.service.types.text import Finish, FinishReason, GeneratedToken, Score

T = TypeVar("T")

Generation = Stream[GeneratedToken | Finish]

AHEAD = 4
"""The queue between a request's generations and its client holds at most this many tokens for each sample."""


class Choice:
    """Builds one of OpenAI's choices in parts. Each part is a `ChoiceDocument` with the next piece of the choice's
    text."""

    def __init__(self, index: int, vocabulary: Vocabulary, *, has_logprobs: bool, prompt: str | None) -> None:
        """`index` is the choice's index in the answer. `prompt` is the text of the prompt if the choice begins with the
        prompt, and None otherwise."""
        self.index = index
        self.tokens = 0
        """The number of tokens that have been generated for this choice."""
        self._vocabulary = vocabulary
        self._pieces = TextPieces(vocabulary)
        self._offset = 0
        self._has_logprobs = has_logprobs
        self._between = ""  # the text between the prompt and the first generated token
        if prompt is not None:
            self._offset = len(prompt) + len(self._pieces.separator)
            self._between = self._pieces.separator

    def echoed(self, prompt: str, score: Score | None) -> ChoiceDocument:
        """Returns the part with the prompt. `score` has the log-probabilities of the prompt's tokens and the most
        probable tokens at each position. `score` is None if the choice has no log-probabilities."""
        logprobs: LogprobsDocument | None = None
        if score is not None:
            pieces, offset = TextPieces(self._vocabulary), 0
            logprobs = LogprobsDocument([], [], [], [])
            for token, logprob, places in zip(score.tokens, score.logprobs, score.predictions or (), strict=True):
                assert token is not None, "the score of a prompt has a skipped event: this is a bug"
                self._add(logprobs, token, logprob, places or (), offset)
                offset += len(pieces.push(token))
        return ChoiceDocument(self.index, prompt, logprobs, None)

    def added(self, item: GeneratedToken) -> ChoiceDocument | None:
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
        return ChoiceDocument(self.index, text, logprobs, None)

    def ended(self, finish: Finish | None) -> ChoiceDocument:
        """Returns the last part, which has the finish reason. `finish` is None if no tokens are generated."""
        stopped = finish is not None and finish.finish_reason is FinishReason.STOP
        return ChoiceDocument(self.index, "", None, "stop" if stopped else "length")

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


def joined(parts: Sequence[ChoiceDocument]) -> ChoiceDocument:
    """Returns the choice that consists of these parts."""
    logprobs: LogprobsDocument | None = None
    for part in parts:
        if part.logprobs is not None:
            logprobs = logprobs or LogprobsDocument([], [], [], [])
            logprobs.tokens += part.logprobs.tokens
            logprobs.token_logprobs += part.logprobs.token_logprobs
            logprobs.top_logprobs += part.logprobs.top_logprobs
            logprobs.text_offset += part.logprobs.text_offset
    text = "".join([part.text for part in parts])
    return ChoiceDocument(parts[0].index, text, logprobs, parts[-1].finish_reason)


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


async def started(calls: Sequence[Callable[[], Awaitable[Generation]]]) -> list[Generation]:
    """Starts the generations concurrently, and returns them when each has its first token. If a generation fails,
    closes the others and raises the error."""
    begun: list[Generation] = []

    async def start(call: Callable[[], Awaitable[Generation]]) -> Generation:
        begun.append(await call())
        return begun[-1]

    try:
        return await together([lambda call=call: start(call) for call in calls])  # type: ignore[misc]
    except BaseException:
        for generation in begun:
            await generation.aclose()
        raise


async def merged(streams: Sequence[Generation]) -> AsyncGenerator[tuple[int, GeneratedToken | Finish], None]:
    """Yields the items of all streams in the order of their arrival, each with the index of its stream. Closes the
    streams at the end. The caller must close the generator."""
    queue: asyncio.Queue[tuple[int, GeneratedToken | Finish | BaseException]] = asyncio.Queue(AHEAD * len(streams))

    async def read(number: int, stream: Generation) -> None:
        try:
            async for item in stream:
                await queue.put((number, item))
        except Exception as error:
            await queue.put((number, error))

    tasks = [asyncio.ensure_future(read(number, stream)) for number, stream in enumerate(streams)]
    left = len(streams)
    try:
        while left:
            item: GeneratedToken | Finish | BaseException | None
            number, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= isinstance(item, Finish)
            yield number, item
    finally:
        item = None
        try:
            await _cancelled(tasks)
        finally:
            while not queue.empty():  # the traceback of an error in the queue holds the queue
                queue.get_nowait()
            for stream in streams:
                await stream.aclose()


async def _cancelled(tasks: Sequence[asyncio.Future[T]]) -> None:
    """Cancels the tasks, and waits until they have ended."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
