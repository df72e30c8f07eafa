"""Sessions: one request at a time each, what a step is in the light of the last one, resident states, commit.

The store is the truth and the pool a cache: a resident state counts only while the session still begins as it did when
the state was made. One that is behind is brought up by the tokens since; one that the store keeps may stand in for it.
Without either, the next request that needs the state rebuilds it from the tail.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from enum import Enum, auto

from typing_extensions import TypedDict  # pydantic reads no other before Python 3.12

from wane.service.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    PositionConflict,
    SessionExists,
    TokenizerChanged,
    UnknownSession,
)
from wane.service.observability.metrics import Metrics
from wane.service.sessions.lock import SessionLocks
from wane.service.sessions.record import TokenHistory
from wane.service.sessions.stores.codec import due
from wane.service.sessions.stores.store import (
    LastStep,
    SessionRecord,
    Snapshot,
    Store,
    follows,
    of_key,
    of_tokens,
)
from wane.service.state.cache import CachedState, StateCache
from wane.service.state.pool import START
from wane.service.types import ANYBODY, History, Mode, Owner, StepRequest, id_of, name_within

ID_BYTES = 16


class StepKind(Enum):
    """What a step is, compared with the session it is for."""

    NEXT = auto()
    REPLAY = auto()


def last_step(record: SessionRecord, request: StepRequest) -> LastStep:
    """What a step is remembered by once it was appended to the session in `record`."""
    return LastStep(record.position, of_tokens(request.tokens), of_key(request.idempotency_key))


def classify_step(record: SessionRecord, request: StepRequest) -> StepKind:
    """Whether a step comes next, or repeats the last one.

    It repeats the last one if it has the same tokens and starts where that one started, and has the same key if it
    carries one. A step with the last one's key may leave out the position. A step that carries neither position nor
    key always comes next: nothing tells a retry from a wish for the same tokens again.
    Raises IdempotencyKeyReused when the last step's key comes with other tokens or another position, and
    PositionConflict when the step claims to start where the session is not.
    """
    last, start = record.last, request.expected_position
    if last is not None and request.idempotency_key is not None and has_last_key(record, request):
        if start not in (None, last.start):
            raise IdempotencyKeyReused(
                f"the idempotency key is that of the session's last step, which starts at {last.start}, but this step "
                f"starts at {start}",
                record.position,
            )
        if of_tokens(request.tokens) != last.tokens:
            raise IdempotencyKeyReused(
                "the idempotency key is that of the session's last step, which has other tokens", record.position
            )
        return StepKind.REPLAY
    if start is None or start == record.position:
        return StepKind.NEXT
    if last is not None and request.idempotency_key is None and (start, of_tokens(request.tokens)) == last[:2]:
        return StepKind.REPLAY
    raise conflict(record, start)


def has_last_key(record: SessionRecord, request: StepRequest) -> bool:
    """Whether the step carries the key of the session's last step."""
    key = of_key(request.idempotency_key)
    return key is not None and record.last is not None and record.last.key == key


def conflict(record: SessionRecord, start: int | None) -> PositionConflict:
    """The error that says where the session is."""
    asked = "others kept stepping it" if start is None else f"the step starts at {start}"
    return PositionConflict(f"the session is at position {record.position}, but {asked}", record.position)


class SessionsReport(TypedDict):
    """Sessions with and without a state in memory, and how many states were rebuilt."""

    resident: int
    parked: int
    rebuilt: int


class Sessions:
    """The sessions of one model version, on a store that others may share."""

    def __init__(
        self,
        store: Store,
        state_cache: StateCache,
        metrics: Metrics,
        *,
        model: str,
        version: str,
        vocabulary: str,
        state_ttl_s: float,
        empty: TokenHistory,
        model_fingerprint: bytes = b"",
        state_checkpoint_interval_tokens: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`vocabulary` tells whose token ids these are. `state_ttl_s`: idle time after which a state is no longer kept.
        `empty`: the tail of a sequence without tokens. `state_checkpoint_interval_tokens`: the store is given the
        state once in that many tokens; `model_fingerprint` tells the weights and graphs that it is of.
        `clock` in seconds, as the store's."""
        self._store = store
        self._state_cache = state_cache
        self._model = model
        self._version = version
        self._vocabulary = vocabulary
        self._state_ttl_s = state_ttl_s
        self._empty = empty
        self.model_fingerprint = model_fingerprint
        self._checkpoint_interval_tokens = state_checkpoint_interval_tokens
        self._clock = clock
        self.locks = SessionLocks()
        self.rebuilt = 0
        self._rebuilt_metric = metrics.state_rebuilds.labels(model)
        self._state_replays = metrics.state_replays.labels(model)
        self._conflicts = metrics.step_conflicts.labels(model)

    async def create(
        self, given: str | None, mode: Mode | None, owner: Owner = ANYBODY, history: History | None = None
    ) -> tuple[SessionRecord, bool]:
        """A new session, of 128 random bits for an id if none is given, at position 0 or behind `history`; and True.

        A session of that id that is still as this request makes it is the answer, too: then with False.
        Raises SessionExists, InvalidRequest for a bad id, Overloaded, QuotaExceeded.
        """
        session = name_within(owner.name, secrets.token_urlsafe(ID_BYTES) if given is None else given)
        position, tail = 0, self._empty
        if history is not None:
            position = history.position
            tail = tail.ending(history.tokens, position, self._store.session_history_tokens)
        record = SessionRecord(
            session, self._model, self._version, mode or Mode.AUTO, position, tail, vocabulary=self._vocabulary
        )
        while not await self._store.create(record, owner.sessions):
            there = await self._store.get(session)
            if there is None:  # it has ended meanwhile
                continue
            if not _is_as_created(there, record):
                raise SessionExists(f"session {given!r} exists already with other options or after a step")
            await self._store.touch(session)
            return there._replace(idle_s=0.0), False
        self._state_cache.drop(session)  # of an earlier session of that id, which may have been at the same revision
        return (self._store.get_cached(session) or record)._replace(idle_s=0.0), True

    async def read(self, session: str) -> SessionRecord:
        """The session as the store has it. Raises UnknownSession."""
        return self._known(session, await self._store.get(session))

    def _known(self, session: str, record: SessionRecord | None) -> SessionRecord:
        if record is None or record.model != self._model:
            self._state_cache.drop(session)
            raise UnknownSession(f"there is no session {id_of(session)!r}: it never was, was deleted, or has expired")
        if record.vocabulary != self._vocabulary:
            raise TokenizerChanged(id_of(session), self._model, self._version)
        return record

    async def touch(self, session: str) -> None:
        """The session was used."""
        await self._store.touch(session)

    def look(self, request: StepRequest) -> SessionRecord | None:
        """The session as it was last seen here, where the step comes next in that, and the state to go on from is here;
        the commit's comparison tells whether it is still so. None where the store must be asked: see `check_out`.

        Raises PositionConflict.
        """
        record = self._store.get_cached(request.session, to_step=True)
        if record is None or record.model != self._model or not self._comes_next(record, request):
            return None
        return record

    async def check_out(self, request: StepRequest) -> tuple[SessionRecord, StepKind]:
        """The session as the store has it, and what the step is to it. Raises UnknownSession, PositionConflict."""
        record = await self.read(request.session)
        return record, classify_step(record, request)

    def _comes_next(self, record: SessionRecord, request: StepRequest) -> bool:
        if record.vocabulary != self._vocabulary or request.expected_position not in (None, record.position):
            return False
        if request.idempotency_key is not None and (request.expected_position is None or has_last_key(record, request)):
            return False
        if self._checkpoint_interval_tokens is None or record.snapshot is not None:
            return True
        return self.cached(record, behind=True, use=False) is not None  # else the store has one to start from

    def cached(self, record: SessionRecord, *, behind: bool = False, use: bool = True) -> CachedState | None:
        """The state of the session as it is in `record`, or, with `behind`, one of an earlier position, which lacks
        tokens that the tail holds. A state that the session does not go on from is dropped.

        `use` makes it the most recently used. A sequence without tokens is always resident: its state is
        the same for all.
        """
        if record.position == 0:
            return CachedState(START, record.revision, 0, 0)
        session = record.session
        cached = self._state_cache.find(session, self._clock()) if use else self._state_cache.peek(session)
        if cached is None or (cached.revision == record.revision and cached.position == record.position):
            return cached
        if not (follows(record.revision, cached.revision) and _reaches(record, cached.position)):
            self._state_cache.drop(session)
            return None
        return cached if behind else None

    def kept(self, record: SessionRecord) -> Snapshot | None:
        """The state that the store keeps along with the tail, if it is this model's and the tail goes on from it."""
        snapshot = record.snapshot
        if (
            snapshot is None
            or snapshot.model_fingerprint != self.model_fingerprint
            or not _reaches(record, snapshot.position)
        ):
            return None
        return snapshot if len(snapshot.state) == self._state_cache.slot_bytes else None

    def restore(self, record: SessionRecord) -> CachedState | None:
        """Makes the state that the store keeps of a session the resident one, if there is one that is of use.

        Raises Overloaded where every slot is in use by requests.
        """
        snapshot = self.kept(record)
        if snapshot is None:
            return None
        with self._state_cache.lease() as slot:
            self._state_cache.unpack(slot, snapshot.state)
            cached = CachedState(slot, record.revision, snapshot.dropped_tokens, snapshot.position)
            self._state_cache.put(record.session, cached, self._clock())
        return cached

    def keep(self, record: SessionRecord, slot: int, dropped_tokens: int) -> None:
        """Makes a state resident that knows nothing of the first `dropped_tokens` tokens of the session in `record`."""
        self._state_cache.put(
            record.session, CachedState(slot, record.revision, dropped_tokens, record.position), self._clock()
        )

    def count_state_replay(self) -> None:
        """A state was brought up to tokens that were appended elsewhere."""
        self._state_replays.inc()

    def count_rebuilt(self) -> None:
        """A state was rebuilt, from a tail or from one that the store keeps."""
        self.rebuilt += 1
        self._rebuilt_metric.inc()

    async def commit(
        self, record: SessionRecord, request: StepRequest, slot: int | None, dropped_tokens: int
    ) -> SessionRecord | None:
        """Compare-and-append; the state in `slot` becomes the resident one.

        None if the comparison was lost: then nothing was appended. The state that was resident before stays, also when
        the store did not answer: the revision that is read next tells whether the state is still valid.
        """
        step = last_step(record, request)
        snapshot = None if slot is None else self._snapshot(record.position, len(request.tokens), slot, dropped_tokens)
        committed = await self._store.append(record, request.tokens, step, snapshot)
        if committed is None:
            self._conflicts.inc()
        elif slot is None:
            self._state_cache.drop(record.session)
        else:
            self.keep(committed, slot, dropped_tokens)
        return committed

    def _snapshot(self, before: int, appended: int, slot: int, dropped_tokens: int) -> Snapshot | None:
        """The state in `slot`, if it is one that the store is to keep."""
        position = before + appended
        if self._checkpoint_interval_tokens is None or not due(before, position, self._checkpoint_interval_tokens):
            return None
        return Snapshot(position, dropped_tokens, self.model_fingerprint, self._state_cache.pack(slot))

    async def rewind(self, session: str, position: int) -> SessionRecord:
        """Cuts the tail back; the state is rebuilt by the next step. To where the session is, it changes nothing.

        Raises UnknownSession, and InvalidRequest naming the positions that the tail holds.
        """
        while True:
            record = await self.read(session)
            if not record.earliest <= position <= record.position:
                first, last = record.earliest, record.position
                reach = f"position {last} only" if first == last else f"positions {first} to {last}"
                raise InvalidRequest(f"position is {position}, but the session can be rewound to {reach}", "position")
            if position == record.position:  # nothing to forget: the state and the last step stay as they are
                await self._store.touch(session)
                return record._replace(idle_s=0.0)
            rewound = await self._store.rewind(session, record.revision, position)
            if rewound is not None:
                self._state_cache.drop(session)
                return rewound

    async def delete(self, session: str) -> None:
        """Ends a session. Raises UnknownSession."""
        await self.read(session)
        self._state_cache.drop(session)
        if not await self._store.delete(session):
            raise UnknownSession(f"there is no session {id_of(session)!r}")

    async def expire(self) -> int:
        """Forgets states that were idle for too long, and sessions that are over; the number of those that are left."""
        self._state_cache.drop_idle(self._clock() - self._state_ttl_s)
        return await self._store.count(self._model)

    async def counts(self) -> SessionsReport:
        """How many sessions have their state here, how many do not, and how often a state was rebuilt."""
        count = await self.expire()
        cached = len(self._state_cache)
        return {"resident": cached, "parked": max(count - cached, 0), "rebuilt": self.rebuilt}


def _is_as_created(there: SessionRecord, record: SessionRecord) -> bool:
    """Whether a session is as `record` has it, which is that of a session without a step."""
    kept = there.model, there.vocabulary, there.mode, there.position, there.tail
    return there.last is None and kept == (record.model, record.vocabulary, record.mode, record.position, record.tail)


def _reaches(record: SessionRecord, position: int) -> bool:
    """Whether the tail holds all tokens after `position`."""
    return 0 < position <= record.position and record.position - position <= len(record.tail)
