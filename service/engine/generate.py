"""Generates one continuation, token by token.

`TextStream` decodes the tokens incrementally and finds stop strings.
"""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from wane.models.cache_mixture import CacheMixture
from wane.models.manifest import Manifest
from wane.models.vocabulary import Vocabulary
from wane.service.aio.deadline import until
from wane.service.batching.ticket import Ticket
from wane.service.engine.backlog import Share
from wane.service.engine.bounds import bound, largest
from wane.service.engine.forward import Forward, RunResult, tail
from wane.service.engine.logits import Sampler
from wane.service.types import Finish, FinishReason, GeneratedToken, GenerateRequest, Identity, Mode, StateSource


class TextStream:
    """Decodes generated tokens into text, which is returned as soon as later tokens cannot change it.

    `TextStream` withholds the bytes of an incomplete UTF-8 character, and a suffix that may be the beginning of a stop
    string. The text never contains a stop string or anything after it. A sequence of events also stops at its `<eos>`.
    In text, `<eos>` is only a line break.

    `tokens` holds every pushed token, including the token that stopped the text.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._withheld = ""
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """The text that has been returned so far."""
        return "".join(self._text)

    def push(self, token: int, *, final: bool = False) -> str:
        """Adds one token. Returns the new text that later tokens cannot change. If `final`, returns all withheld
        text."""
        assert not self.stopped, "a token was pushed after the stop: this is a bug"
        self.tokens.append(token)
        if self._vocabulary.kind == "events" and token == self._vocabulary.eos_id:
            self.stopped = True
            return self._give(len(self._withheld))
        self._withheld += self._piece(token, final)
        found = [at for stop in self._stop if (at := self._withheld.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._give(min(found))
        return self._give(len(self._withheld) - (0 if final else self._open()))

    def _give(self, length: int) -> str:
        """Returns the first `length` withheld characters, and no longer withholds them."""
        certain, self._withheld = self._withheld[:length], self._withheld[length:]
        self._text.append(certain)
        return certain

    def _open(self) -> int:
        """Returns the length of the longest suffix of the withheld text that is a proper prefix of a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._withheld)), 0, -1):
            if any(stop.startswith(self._withheld[-length:]) for stop in self._stop):
                return length
        return 0

    def _piece(self, token: int, final: bool) -> str:
        """Returns the text that a token adds. The concatenated pieces are equal to `Vocabulary.decode` of all
        tokens."""
        vocabulary = self._vocabulary
        if vocabulary.kind == "bpe":
            raw = b"\n" if token == vocabulary.eos_id else vocabulary.token_bytes(token)
            return self._decoder.decode(raw, final)
        separator = "\n" if vocabulary.kind == "events" else " "
        return (separator if len(self.tokens) > 1 else "") + vocabulary.decode([token])


class Source(Protocol):
    """Computes the next-token distributions of a generation. `window` is the window's number of tokens in mode window;
    None in mode recurrent."""

    @property
    def window(self) -> int | None: ...

    async def prompt(self) -> RunResult:
        """Runs the prompt. Returns the result with the first next-token distribution."""
        ...

    async def feed(self, token: int) -> RunResult:
        """Runs a generated token."""
        ...


class RecurrentSource:
    """The source of mode recurrent. Runs one step for each token, and keeps the state in one slot."""

    window = None

    def __init__(self, forward: Forward, input_ids: NDArray[np.int64], slot: int, ticket: Ticket) -> None:
        self._forward = forward
        self._input_ids = input_ids
        self._slot = slot
        self._ticket = ticket

    async def prompt(self) -> RunResult:
        return await self._forward.full(self._input_ids, self._ticket, write=self._slot)

    async def feed(self, token: int) -> RunResult:
        tokens = np.array([token], np.int64)
        return await self._forward.append(tokens, self._ticket, read=self._slot, write=self._slot)


class WindowSource:
    """The source of mode window. Runs the last k tokens again for each generated token.

    `position` is the position after `input_ids`. For a truncated sequence it is one more than the number of tokens.
    """

    def __init__(self, forward: Forward, input_ids: NDArray[np.int64], position: int, k: int, ticket: Ticket) -> None:
        self.window = k
        self._forward = forward
        self._position = position
        self._context_ids = tail(input_ids, position, k)
        self._ticket = ticket

    async def prompt(self) -> RunResult:
        return await self._forward.window(self._context_ids, self._ticket)

    async def feed(self, token: int) -> RunResult:
        self._position += 1
        self._context_ids = tail(np.append(self._context_ids, token), self._position, self.window)
        return await self._forward.window(self._context_ids, self._ticket)


async def generate(
    request: GenerateRequest,
    identity: Identity,
    manifest: Manifest,
    vocabulary: Vocabulary,
    source: Source,
    ticket: Ticket,
    share: Share,
    cache: CacheMixture | None,
) -> AsyncGenerator[GeneratedToken | Finish, None]:
    """Yields each token when it is drawn, then a `Finish`. Reports progress to `share`. `cache`: see
    `RunResult.mix`."""
    sampler = Sampler(request.temperature, request.top_k, request.top_p, request.seed)
    stream = TextStream(vocabulary, request.stop)
    bounds: list[float | None] = []
    with until(request.deadline):
        result = await source.prompt()
    while True:
        position = len(request.tokens) + len(stream.tokens)
        known = position if source.window is None else min(source.window, position)
        result = result.mix(cache, [*request.tokens, *stream.tokens], position + request.truncated)
        found = bound(manifest.certificate, known, position + request.truncated, result.radius)
        found = result.bound(found)
        bounds.append(None if found is None else found.variation)
        token, logprob = sampler.draw(result.logits)
        is_last = len(stream.tokens) + 1 == request.max_tokens
        partial = vocabulary.partial_bytes(token)
        yield GeneratedToken(
            token_id=token,
            token=vocabulary.token(token),
            text=stream.push(token, final=is_last),
            logprob=logprob,
            bytes=None if partial is None else tuple(partial),
        )
        share.progress(len(stream.tokens) / request.max_tokens)
        if is_last or stream.stopped:
            break
        with until(request.deadline):
            result = await source.feed(token)
    yield Finish(
        *identity,
        text=stream.text,
        tokens=tuple(stream.tokens),
        finish_reason=FinishReason.STOP if stream.stopped else FinishReason.LENGTH,
        mode=Mode.RECURRENT if source.window is None else Mode.WINDOW,
        window=source.window,
        state=StateSource.FULL if source.window is None else StateSource.WINDOW,
        error_bound=largest(bounds),
        latency=ticket.latency(),
        cache_tokens=None if result.mixed is None else result.mixed.tokens,
    )
