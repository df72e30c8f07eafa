"""Creates, reads, steps and deletes sessions, and keeps their resident states up to date.

The store is authoritative, and the state pool is a cache. A resident state is valid as long as the session still begins
with the tokens from which the state was computed. If the state was computed without the session's latest tokens, the
model runs over these tokens to bring the state up to date. A snapshot from the store may replace a missing state. If
there is no state and no snapshot, the next request that needs the state rebuilds it from the stored tokens.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated

from wane.models.manifest import Manifest
from wane.service.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    Overloaded,
    PositionConflict,
    SessionExists,
    TokenizerChanged,
    UnknownSession,
)
from wane.service.observability.metrics import Metrics
from wane.service.runners.runner import NORMS
from wane.service.sessions.lock import SessionLocks
from wane.service.sessions.stores.codec import model_fingerprint, read_snapshot, write_snapshot
from wane.service.sessions.stores.store import (
    Appended,
    Commit,
    DamagedSession,
    SessionRecord,
    Snapshot,
    Store,
    TokenHistory,
    follows,
    of_key,
    of_tokens,
)
from wane.service.settings import Settings
from wane.service.state.pool import START, CachedState, StatePool
from wane.service.types.common import Mode, Result, says
from wane.service.types.request import ANYBODY, History, Owner, StepRequest, id_of, name_within

ID_BYTES = 16


def is_replay(record: SessionRecord, request: StepRequest) -> bool:
    """Returns whether a step is a replay of the session's last step, whose answer is then given again.

    It is a replay if it has the same tokens and starting position as the last step. If the step has an idempotency key,
    the key must be the same too. A step with the last step's key may omit the position. A step without position and key
    is always new, because a retry cannot be distinguished from a request to append the same tokens again.

    Raises IdempotencyKeyReused if the step has the last step's key, but other tokens or another position. Raises
    PositionConflict if the step does not start at the session's position.
    """
    last, start, key = record.last, request.expected_position, request.idempotency_key
    if last is not None and key is not None and last.key == of_key(key):
        if start not in (None, last.start):
            raise IdempotencyKeyReused(
                f"the session's last step has the same idempotency key and starts at {last.start}, but this step "
                f"starts at {start}",
                record.position,
            )
        if of_tokens(request.tokens) != last.tokens:
            raise IdempotencyKeyReused(
                "the session's last step has the same idempotency key, but other tokens", record.position
            )
        return True
    if start is None or start == record.position:
        return False
    if last is not None and key is None and (start, of_tokens(request.tokens)) == last[:2]:
        return True
    raise conflict(record, start)


def unknown(session: str) -> UnknownSession:
    return UnknownSession(f"there is no session {id_of(session)!r}: it was never created, was deleted, or has expired")


def conflict(record: SessionRecord, start: int | None) -> PositionConflict:
    """Returns a PositionConflict that contains the session's position."""
    asked = "other clients kept changing the session" if start is None else f"the step starts at {start}"
    return PositionConflict(f"the session is at position {record.position}, but {asked}", record.position)


class SessionsReport(Result):
    """The sessions of one version of a model."""

    resident: Annotated[int, says("the number of sessions with a state in memory")]
    parked: Annotated[int, says("the number of sessions without one")]
    rebuilt: Annotated[int, says("the number of states that were rebuilt from stored tokens or loaded from a snapshot")]


class Sessions:
    """Manages the sessions of one model version. Other processes may share the store."""

    def __init__(
        self,
        store: Store,
        state_cache: StatePool,
        metrics: Metrics,
        settings: Settings,
        manifest: Manifest,
        vocabulary: str,
        empty: TokenHistory,
        bits: bytes,
        clock: Callable[[], float],
    ) -> None:
        """`vocabulary` identifies the tokenizer. `empty`: the history of a sequence without tokens. `bits`: see
        `model_fingerprint`. `clock` returns seconds."""
        self._store = store
        self._state_cache = state_cache
        self._model = model = manifest.name
        self._version = manifest.version
        self._vocabulary = vocabulary
        store.vocabulary_sizes[vocabulary] = manifest.vocabulary.size
        self._state_ttl_s = settings.state_ttl_s or settings.session_ttl_s
        self._empty = empty
        self.model_fingerprint = model_fingerprint(manifest, bits)
        # the number of tokens between two snapshots in the store, or None if it has no snapshots
        self._checkpoint_interval_tokens = settings.states_every(model, certified=manifest.certificate.certified)
        self._clock = clock
        self.locks = SessionLocks()
        self.rebuilt = 0
        self._rebuilt_metric = metrics.state_rebuilds.labels(model)
        self.state_replays = metrics.state_replays.labels(model)
        self._conflicts = metrics.step_conflicts.labels(model)

    async def create(
        self, asked_id: str | None, mode: Mode | None, owner: Owner = ANYBODY, history: History | None = None
    ) -> tuple[SessionRecord, bool]:
        """Creates a session at position 0 or after `history`. Returns the session and True.

        Its id is `asked_id`, or 128 random bits if that is None. If a session with this id exists, and is equal to the
        one that this request would create, returns the existing session and False. Raises SessionExists, Overloaded,
        QuotaExceeded, and InvalidRequest if the id is invalid.
        """
        session = name_within(owner.name, secrets.token_urlsafe(ID_BYTES) if asked_id is None else asked_id)
        new, snapshot = self._new(session, mode), None
        if history is not None:
            position, snapshot = history.position, read_snapshot(history.snapshot or b"")
            tail = self._empty.ending(history.tokens, position, self._store.session_history_tokens)
            stored_snapshot = None if self._checkpoint_interval_tokens is None else snapshot
            new = new._replace(position=position, tail=tail, snapshot=stored_snapshot)
        while (created := await self._store.create(new, owner.sessions)) is None:
            stored = await self._store.get(session)
            if stored is None:  # the session expired or was deleted in the meantime
                continue
            difference = _difference(stored, new)
            if difference is not None:
                raise SessionExists(f"session {id_of(session)!r} already exists, and it {difference}")
            await self._store.touch(session)
            return stored._replace(idle_s=0.0), False
        self._state_cache.drop(session)  # an earlier session with this id may have left its state
        if snapshot is not None:
            with suppress(Overloaded):
                self.restore(created._replace(snapshot=snapshot))
        return created._replace(idle_s=0.0), True

    async def fork(
        self, session: str, asked_id: str | None, position: int | None, owner: Owner
    ) -> tuple[SessionRecord, bool]:
        """Like `create`, for a session with the history of another session up to `position`, and with its mode: see
        `history`. The caller holds the lock of the other session."""
        record, history = await self.history(session, position)
        await self.touch(session)
        with self._state_cache.hold(self._state_cache.slot_of(session) or START):  # not evicted for its copy
            return await self.create(asked_id, record.mode, owner, history)

    async def history(self, session: str, position: int | None) -> tuple[SessionRecord, History]:
        """Returns a session, and its history up to `position`, by default all, with its state, in memory or else in the
        store, if that has read no later token.

        Raises UnknownSession. Raises InvalidRequest, with the possible positions, if the stored tokens do not reach
        back to `position`."""
        record = await self.read(session)
        position = record.position if position is None else position
        _check_reach(record, position, "forked at")
        ids = record.tail.without_last(record.position - position).ids()
        snapshot, cached = self.kept(record), self.cached(record, behind=True)
        if cached is not None and 0 < cached.position <= position:
            packed = self._state_cache.pack(cached.slot)
            snapshot = Snapshot(cached.position, cached.dropped_tokens, self.model_fingerprint, packed)
        state = b""
        if snapshot is not None and snapshot.position <= position:
            state = write_snapshot(snapshot)
        return record, History(array("q", ids[max(len(ids) - position, 0) :].tobytes()), position, state)

    def _new(self, session: str, mode: Mode | None = None) -> SessionRecord:
        """Returns a new session at position 0, without adding it to the store."""
        return SessionRecord(
            session, self._model, self._version, mode or Mode.AUTO, 0, self._empty, vocabulary=self._vocabulary
        )

    async def read(self, session: str) -> SessionRecord:
        """Reads the session from the store. Raises UnknownSession."""
        return self._known(session, await self._store.get(session))

    def _known(self, session: str, record: SessionRecord | None) -> SessionRecord:
        if record is None or record.model != self._model:
            self._state_cache.drop(session)
            raise unknown(session)
        if record.vocabulary != self._vocabulary:
            raise TokenizerChanged(id_of(session), self._model, self._version)
        return record

    async def touch(self, session: str) -> None:
        """Resets the session's idle time."""
        await self._store.touch(session)

    def look(self, session: str, expected_position: int | None, key: str | None) -> SessionRecord | None:
        """Returns the session as this process last saw it. The commit then checks whether the session is still the
        same. Returns None if the session must be read from the store (`check_out`): because this process does not know
        the session, because the step may be a replay or a conflict, or because the store may have a snapshot that
        replaces a missing state. `expected_position` and `key` are those of the step.
        """
        record = self._store.get_cached(session, to_step=True)
        if (
            record is None
            or record.model != self._model
            or record.vocabulary != self._vocabulary
            or expected_position not in (None, record.position)
        ):
            return None
        last = record.last
        if key is not None and (expected_position is None or (last is not None and last.key == of_key(key))):
            return None
        # If the state is not resident, the store may have a snapshot, so the session must be read from the store.
        has_snapshots = self._checkpoint_interval_tokens is not None
        return None if has_snapshots and self.cached(record, behind=True, use=False) is None else record

    async def check_out(self, request: StepRequest) -> tuple[SessionRecord, Owner | None, bool]:
        """Reads the session from the store. Returns the session, the owner for whom the step creates it, and whether
        the step is a replay. If the session does not exist and the step may create it, returns a session at position 0
        that is not in the store yet. Otherwise there is no such owner. Raises UnknownSession, PositionConflict."""
        stored = await self._store.get(request.session)
        if stored is None and request.creator is not None and not request.expected_position:
            return self._new(request.session), request.creator, False
        record = self._known(request.session, stored)
        return record, None, is_replay(record, request)

    def cached(self, record: SessionRecord, *, behind: bool = False, use: bool = True) -> CachedState | None:
        """Returns the resident state of the session in `record`, or None.

        If `behind` is true, the state may be at an earlier position, provided that `record` holds all later tokens. If
        `use` is true, the state becomes the most recently used, or is dropped if it is valid neither for `record` nor
        for a session that has appended to `record`. If `use` is false, no state is dropped: the caller may not hold the
        session's lock, so that a step or a rewind may have changed the session after `record` was read. A session
        without tokens always has a state: all such sessions share one.
        """
        if record.position == 0:
            return CachedState(START, record.revision, 0, 0)
        session = record.session
        cached = self._state_cache.find(session, self._clock()) if use else self._state_cache.peek(session)
        if cached is None or (cached.revision == record.revision and cached.position == record.position):
            return cached
        if follows(record.revision, cached.revision) and _reaches(record, cached.position):
            return cached if behind else None
        if use and not follows(cached.revision, record.revision):
            self._state_cache.drop(session)
        return None

    def norms(self, cached: CachedState) -> list[float] | None:
        """Returns the LayerNorms after the last token of a resident state (see `Row`). Returns None if the graphs do
        not output them."""
        norms = self._state_cache.memory.read([cached.slot]).get(NORMS)
        return None if norms is None else norms[0].tolist()

    def kept(self, record: SessionRecord) -> Snapshot | None:
        """Returns the store's snapshot of the session. Returns None if there is no snapshot, if it was made with other
        weights or graphs, if its size is wrong, or if `record` does not hold all tokens after the snapshot's
        position."""
        snapshot = record.snapshot
        if (
            snapshot is None
            or snapshot.model_fingerprint != self.model_fingerprint
            or not _reaches(record, snapshot.position)
        ):
            return None
        return snapshot if len(snapshot.state) == self._state_cache.slot_bytes else None

    def restore(self, record: SessionRecord) -> CachedState | None:
        """Loads the store's snapshot of a session into the state cache, and returns the state; None if there is no
        usable snapshot.

        Raises Overloaded if requests use every slot.
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
        """Makes the state in `slot` the session's resident state. The state has not read the session's first
        `dropped_tokens` tokens."""
        self._state_cache.put(
            record.session, CachedState(slot, record.revision, dropped_tokens, record.position), self._clock()
        )

    def count_rebuilt(self) -> None:
        """Counts a state that was rebuilt from stored tokens or loaded from a snapshot."""
        self.rebuilt += 1
        self._rebuilt_metric.inc()

    async def commit(self, commit: Commit) -> SessionRecord | None:
        """Commits one step: see `commit_many`. Returns None, without appending, if another writer changed the
        session."""
        (committed,) = await self.commit_many([commit])
        if isinstance(committed, Exception):
            raise committed
        return committed

    async def commit_many(self, commits: Sequence[Commit]) -> list[Appended]:
        """Commits the steps of a batch, each of another session. Appends a step's tokens if the session is still at the
        revision of its `record` (compare-and-append). The state in `slot` then becomes the session's resident state. A
        step with a `creator` creates the session with the step's tokens in one operation, without a snapshot. Without
        tokens, it does not become the session's last step. All sessions are created at the same time, after the other
        steps are appended.

        Returns, for each step, the session after it, or the store's error, or None, without effect, if another writer
        changed the session. In the last two cases the earlier resident state stays in the cache. The next read of the
        session's revision decides whether that state is still valid.
        """
        appends = [self._with_snapshot(commit) for commit in commits if commit.creator is None]
        appended: list[Appended] = await self._store.append_many(appends) if appends else []
        if len(appends) < len(commits):
            firsts = [self._create_stepped(commit, commit.creator) for commit in commits if commit.creator is not None]
            created, rest = iter(await asyncio.gather(*firsts)), iter(appended)
            appended = [next(rest if commit.creator is None else created) for commit in commits]
        for commit, committed in zip(commits, appended, strict=True):
            if committed is None:
                self._conflicts.inc()
            elif isinstance(committed, SessionRecord):
                if commit.slot is None:
                    self._state_cache.drop(committed.session)
                else:
                    self.keep(committed, commit.slot, commit.dropped_tokens)
        return appended

    async def _create_stepped(self, commit: Commit, creator: Owner) -> Appended:
        """Creates the session with the tokens of its first step. Returns None if the session exists."""
        record, tokens = commit.record, commit.tokens
        tail = record.tail.append(tokens, len(tokens), self._store.session_history_tokens)
        stepped = record._replace(position=len(tokens), tail=tail, last=commit.step if tokens else None)
        try:
            created = await self._store.create(stepped, creator.sessions)
        except Exception as error:
            return error
        if created is not None:
            self._state_cache.drop(record.session)  # an earlier session with this id may have left its state
        return created

    def _with_snapshot(self, commit: Commit) -> Commit:
        """Returns the commit with its state as a snapshot, if the step reaches a checkpoint."""
        before, every = commit.record.position, self._checkpoint_interval_tokens
        if every is None or commit.slot is None or commit.position // every == before // every:
            return commit
        state = self._state_cache.pack(commit.slot)
        return commit._replace(snapshot=Snapshot(commit.position, commit.dropped_tokens, self.model_fingerprint, state))

    async def rewind(self, session: str, position: int) -> SessionRecord:
        """Rewinds the session to `position`. The next step rebuilds the state. Changes nothing if the session is
        already at `position`.

        Raises UnknownSession. Raises InvalidRequest, with the possible positions, if the stored tokens do not reach
        back to `position`.
        """
        while True:
            record = await self.read(session)
            _check_reach(record, position, "rewound to")
            if position == record.position:  # the session keeps its state and its last step
                await self._store.touch(session)
                return record._replace(idle_s=0.0)
            rewound = await self._store.rewind(session, record.revision, position)
            if rewound is not None:
                self._state_cache.drop(session)
                return rewound

    async def delete(self, session: str) -> None:
        """Deletes a session, even if another tokenizer encoded its tokens, or if it cannot be read. Raises
        UnknownSession."""
        with suppress(TokenizerChanged, DamagedSession):
            await self.read(session)
        self._state_cache.drop(session)
        if not await self._store.delete(session):
            raise UnknownSession(f"there is no session {id_of(session)!r}")

    async def counts(self) -> SessionsReport:
        """Drops expired sessions and the states that were idle for longer than `state_ttl_s`. Returns the number of
        remaining sessions with a resident state, the number of those without one, and the number of rebuilt states."""
        self._state_cache.drop_idle(self._clock() - self._state_ttl_s)
        count, cached = await self._store.count(self._model), len(self._state_cache)
        return SessionsReport(cached, max(count - cached, 0), self.rebuilt)


def _difference(stored: SessionRecord, record: SessionRecord) -> str | None:
    """Returns how the session `stored` differs from the new session `record`, or None if they are equal. A
    session that has made a step is not equal."""
    if stored.last is not None:
        return "has made a step"
    if (stored.model, stored.vocabulary) != (record.model, record.vocabulary):
        return "has another model or tokenizer"
    if stored.mode != record.mode:
        return f"has the mode {stored.mode}, not {record.mode}"
    if stored.position != record.position:
        return f"is at position {stored.position}, not {record.position}"
    return None if stored.tail == record.tail else "has another history"


def _check_reach(record: SessionRecord, position: int, can_be: str) -> None:
    """Raises InvalidRequest unless the stored tokens reach back to `position`. `can_be`: what is done there."""
    first, last = record.earliest, record.position
    if not first <= position <= last:
        reach = f"position {last} only" if first == last else f"positions {first} to {last}"
        raise InvalidRequest(f"position is {position}, but the session can be {can_be} {reach}", "position")


def _reaches(record: SessionRecord, position: int) -> bool:
    """Returns whether the record holds all tokens after `position`."""
    return 0 < position <= record.position and record.position - position <= len(record.tail)
