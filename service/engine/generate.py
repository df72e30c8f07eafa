"""Generates one continuation, token by token.

`TextStream` decodes the tokens incrementally and finds stop strings.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from wane.models.vocabulary import Vocabulary
from wane.service.batching.ticket import Ticket
from wane.service.engine.answer import AnswerBuilder
from wane.service.engine.backlog import Share
from wane.service.engine.bounds import bound, largest
from wane.service.engine.forward import Forward, RunResult, tail
from wane.service.engine.logits import Sampler, log_softmax, most_probable
from wane.service.types.answer import Prediction
from wane.service.types.common import Mode, StateSource
from wane.service.types.request import GenerateRequest, id_of
from wane.service.types.text import Finish, FinishReason, GeneratedToken

NOTHING_TO_CONTINUE = (
    "there is nothing to continue: the model starts from the zero state, and predicts nothing before the first event"
)


class TextPieces:
    """Turns tokens into pieces of text. The concatenation of the pieces equals `Vocabulary.decode` of all tokens.

    A piece is empty while a UTF-8 character is incomplete.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.separator = {"bpe": "", "words": " ", "events": "\n"}[vocabulary.kind]
        """The text that `push` inserts between the texts of two tokens."""
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_first = True

    def push(self, token: int, *, final: bool = False) -> str:
        """Returns the text that a token adds. If `final`, an incomplete UTF-8 character is returned as U+FFFD."""
        vocabulary = self._vocabulary
        if vocabulary.kind == "bpe":
            raw = b"\n" if token == vocabulary.eos_id else vocabulary.token_bytes(token)
            return self._decoder.decode(raw, final)
        before, self._is_first = "" if self._is_first else self.separator, False
        return before + vocabulary.decode([token])


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
        self._pieces = TextPieces(vocabulary)
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
        self._withheld += self._pieces.push(token, final=final)
        places = [at for stop in self._stop if (at := self._withheld.find(stop)) >= 0]
        if places:
            self.stopped = True
            return self._give(min(places))
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


@dataclass(slots=True)
class Prompt:
    """The sequence that a generation continues.

    `position` is the number of the sequence's tokens. `known` is the number of latest tokens that the state after the
    prompt has read. In mode window, a window may have fewer tokens. `history` holds the sequence's last tokens without
    the start token: all of them, or at least as many as the model's cache can hold. If the request has no session and
    sets `truncated`, `position` is one more than the number of its tokens. `cached`: see `Finish.cached_tokens`.
    """

    history: Sequence[int]
    position: int
    known: int
    state: StateSource = StateSource.FULL
    session: str | None = None
    cached: int = 0


class RecurrentSource:
    """The source of mode recurrent. Runs one step for each token, and writes every state to `slot`. `read` is the slot
    of the state after the prompt, if that state is not in `slot`. The state in `read` does not change. `owner`: see
    `Forward.prompt`."""

    window = None

    def __init__(
        self,
        forward: Forward,
        input_ids: NDArray[np.int64],
        start: Prompt,
        slot: int,
        ticket: Ticket,
        read: int | None = None,
        owner: str | None = None,
    ) -> None:
        self.start = start
        self._owner = owner
        self._fed: list[int] = []  # the tokens after the prompt that `slot` has read
        self._is_changing = False
        self._forward = forward
        self._input_ids = input_ids
        self._slot = slot
        self.read = slot if read is None else read
        self._ticket = ticket

    async def begin(self) -> tuple[RecurrentSource, RunResult]:
        """See `Begin`."""
        result, cached = await self._forward.prompt(self._input_ids, self._owner, self._ticket, write=self._slot)
        self.start.cached = max(cached - (len(self._input_ids) - len(self.start.history)), 0)
        return self, result

    async def feed(self, token: int) -> RunResult:
        self._is_changing = True
        read, self.read = self.read, self._slot
        result = await self._forward.append(np.array([token], np.int64), self._ticket, read=read, write=self._slot)
        self._fed.append(token)
        self._is_changing = False
        return result

    def keep(self) -> None:
        """Keeps the state after the generated tokens for prompts that begin with them. Must be called last."""
        if self._fed and not self._is_changing:
            self._forward.keep(np.append(self._input_ids, self._fed), self._owner, self._slot)


class WindowSource:
    """The source of mode window. For each generated token, runs the last k tokens of the sequence. The last token of
    `input_ids` is the last token of the prompt `start`."""

    def __init__(self, forward: Forward, input_ids: NDArray[np.int64], start: Prompt, k: int, ticket: Ticket) -> None:
        self.window = k
        self.start = start
        self._forward = forward
        self._position = start.position
        self._context_ids = tail(input_ids, start.position, k)
        self._ticket = ticket

    async def begin(self) -> tuple[WindowSource, RunResult]:
        """See `Begin`."""
        return self, await self._forward.window(self._context_ids, self._ticket)

    async def feed(self, token: int) -> RunResult:
        self._position += 1
        self._context_ids = tail(np.append(self._context_ids, token), self._position, self.window)
        return await self._forward.window(self._context_ids, self._ticket)


Source = RecurrentSource | WindowSource
"""Computes the next-token distributions of a generation. `window` is the window's number of tokens in mode window; None
in mode recurrent. `start` describes the prompt. `feed` runs a generated token, and returns the result with the next
distribution."""

Begin = Callable[[], Awaitable[tuple[Source, RunResult]]]
"""Runs a prompt. Returns the source of the next distributions, and the result with the first one."""


async def generate(
    request: GenerateRequest, builder: AnswerBuilder, begin: Begin, ticket: Ticket, share: Share
) -> AsyncGenerator[GeneratedToken | Finish, None]:
    """Yields each token when it is drawn, then a `Finish`. Reports progress to `share`."""
    vocabulary, cache = builder.vocabulary, builder.cache if request.cache else None
    never_drawn = vocabulary.never_drawn(include_unknown=request.include_unknown)
    sampler = Sampler(request, vocabulary.size, never_drawn)
    stream = TextStream(vocabulary, request.stop)
    bounds: list[float | None] = []
    source, result = await begin()
    start = source.start
    recent = deque(start.history, maxlen=0 if cache is None else cache.length)

    def draw(result: RunResult, position: int) -> tuple[RunResult, int, float, tuple[Prediction, ...] | None]:
        mixed = result.mix(cache, list(recent), position)
        logprobs = log_softmax(mixed.logits)
        token, places = sampler.draw(logprobs), None
        if request.top_logprobs is not None:
            places = most_probable(logprobs, request.top_logprobs, token, vocabulary, never_drawn)
        return mixed, token, float(logprobs[token]), places

    while True:
        position, known = start.position + len(stream.tokens), start.known + len(stream.tokens)
        if source.window is not None:
            known = min(source.window, known)
        result, token, logprob, places = await builder.turns.run(vocabulary.size, partial(draw, result, position))
        answer_bound = bound(builder.certificate, known, position, result.row.radius, result.row.norms)
        answer_bound = result.bound(answer_bound)
        bounds.append(None if answer_bound is None else answer_bound.variation)
        recent.append(token)
        is_last = len(stream.tokens) + 1 == request.max_tokens
        yield GeneratedToken(
            token_id=token,
            token=vocabulary.token(token),
            text=stream.push(token, final=is_last),
            logprob=logprob,
            bytes=vocabulary.partials[token],
            predictions=places,
        )
        share.progress(len(stream.tokens) / request.max_tokens)
        if is_last or stream.stopped:
            break
        result = await source.feed(token)
    yield Finish(
        *builder.identity,
        text=stream.text,
        tokens=tuple(stream.tokens),
        finish_reason=FinishReason.STOP if stream.stopped else FinishReason.LENGTH,
        mode=Mode.RECURRENT if source.window is None else Mode.WINDOW,
        window=source.window,
        state=start.state if source.window is None else StateSource.WINDOW,
        error_bound=largest(bounds),
        latency=ticket.latency(),
        cache_tokens=None if result.mixed is None else result.mixed.tokens,
        session=None if start.session is None else id_of(start.session),
        position=None if start.session is None else start.position,
        unknown=request.unknown_names or None,
        cached_tokens=start.cached,
    )
