"""The heart of one model version: admit, check out, submit, choose, commit. It owns the return leg."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from models.manifest import Manifest
from models.vocabulary import Vocabulary
from service.engine.types import (
    Answer,
    CompareRequest,
    Comparison,
    Finish,
    GeneratedToken,
    GenerateRequest,
    Mode,
    PredictRequest,
    Score,
    ScoreRequest,
    SessionView,
    StepRequest,
)
from service.errors import WaneError


class Engine:
    """Answers for one version of one model. Every method belongs to the event loop's thread."""

    manifest: Manifest
    vocabulary: Vocabulary
    device: str  # "cpu" or "cuda"
    name: str
    version: str

    async def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`; long texts are encoded off the event loop. Raises TooLarge over the limit."""
        raise NotImplementedError

    async def predict(self, request: PredictRequest) -> Answer:
        """Predicts what follows the tokens, or a session's state (nothing is appended).

        Raises InvalidRequest, TooLarge, UnknownSession, Overloaded, Unavailable, DeadlineExceeded.
        """
        raise NotImplementedError

    async def predict_many(self, requests: Sequence[PredictRequest]) -> list[Answer | WaneError]:
        """Many predictions side by side; each has its own answer or its own error, in order."""
        raise NotImplementedError

    async def step(self, request: StepRequest) -> Answer:
        """Appends tokens to a session and predicts what follows; `position` and `replayed` are set.

        A caller that is cancelled (or whose deadline passes) before the step enters a batch leaves no trace;
        after that the step commits, and asking again replays it.
        Raises InvalidRequest, TooLarge, UnknownSession, PositionConflict, Overloaded, Unavailable,
        DeadlineExceeded.
        """
        raise NotImplementedError

    async def score(self, request: ScoreRequest) -> Score:
        """One log-probability for each given token."""
        raise NotImplementedError

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GeneratedToken | Finish]:
        """Checks the request and runs its prompt, then returns the tokens as they come, a `Finish` last.

        To be awaited: what is wrong with a request is raised here, before the first byte of a stream.
        The iterator has `aclose()`, to be called (contextlib.aclosing) however the iteration ends.
        """
        raise NotImplementedError

    async def compare(self, request: CompareRequest) -> Comparison:
        """Measures recurrent against every window asked for."""
        raise NotImplementedError

    async def create_session(self, session: str | None = None, mode: Mode | None = None) -> SessionView:
        """Starts a session, under its owner's id or a fresh one.

        Raises SessionExists, InvalidRequest, Overloaded.
        """
        raise NotImplementedError

    async def get_session(self, session: str) -> SessionView:
        """Looks at a session without touching its idle time. Raises UnknownSession."""
        raise NotImplementedError

    async def delete_session(self, session: str) -> None:
        """Ends a session. Raises UnknownSession."""
        raise NotImplementedError

    async def rewind(self, session: str, position: int) -> SessionView:
        """Cuts the session's tail back to `position`.

        Raises UnknownSession, and InvalidRequest naming the positions that the tail holds.
        """
        raise NotImplementedError

    async def report(self) -> dict[str, object]:
        """This model's part of /v1/report: name, version, modes, agreement, sessions."""
        raise NotImplementedError

    async def drain(self) -> None:
        """Takes no new work (Unavailable), and waits for what was admitted."""
        raise NotImplementedError

    async def close(self) -> None:
        """Drains, then ends the runner's thread."""
        raise NotImplementedError
