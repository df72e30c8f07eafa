from __future__ import annotations

import asyncio

import pytest

from wane.service.errors import Overloaded
from wane.service.sessions.lock import MOST_WAITERS, SessionLocks


async def until_settled() -> None:
    """Runs all ready tasks until each waits again."""
    for _ in range(5):
        await asyncio.sleep(0)


class LockHolders:
    """Starts tasks that acquire and hold a session's lock. `inside` lists the tasks that hold a lock. A task releases
    the lock when the test sets the task's event in `go`."""

    def __init__(self) -> None:
        self.locks = SessionLocks()
        self.inside: list[str] = []
        self.go: dict[str, asyncio.Event] = {}

    def start(self, name: str, session: str = "s") -> asyncio.Task[None]:
        self.go[name] = asyncio.Event()
        return asyncio.create_task(self._visit(name, session))

    async def _visit(self, name: str, session: str) -> None:
        async with self.locks.held(session):
            self.inside.append(name)
            await self.go[name].wait()
            self.inside.remove(name)


async def test_waiters_get_the_lock_in_order() -> None:
    holders = LockHolders()
    tasks = [holders.start(name) for name in "abc"]
    for name in "abc":
        await until_settled()
        assert holders.inside == [name]
        holders.go[name].set()
    await asyncio.gather(*tasks)
    assert not holders.locks.waiting


async def test_sessions_do_not_wait_for_each_other() -> None:
    holders = LockHolders()
    tasks = [holders.start(name, session=name) for name in "ab"]
    await until_settled()
    assert holders.inside == ["a", "b"]
    for name in "ab":
        holders.go[name].set()
    await asyncio.gather(*tasks)


async def test_a_cancelled_waiter_is_skipped() -> None:
    holders = LockHolders()
    first, gone, last = (holders.start(name) for name in "abc")
    await until_settled()
    gone.cancel()
    await until_settled()
    holders.go["a"].set()
    await until_settled()
    assert holders.inside == ["c"]
    holders.go["c"].set()
    await asyncio.gather(first, last)
    assert gone.cancelled()
    assert not holders.locks.waiting


async def test_a_waiter_that_is_cancelled_as_it_gets_the_lock_releases_the_lock() -> None:
    holders = LockHolders()
    async with holders.locks.held("s"):
        gone, last = (holders.start(name) for name in "ab")
        await until_settled()
    gone.cancel()  # the lock is already assigned to this task, but the task has not run yet
    await until_settled()
    assert gone.cancelled()
    assert holders.inside == ["b"]
    holders.go["b"].set()
    await last
    assert not holders.locks.waiting


async def test_a_failing_holder_releases_the_lock() -> None:
    locks = SessionLocks()
    with pytest.raises(ZeroDivisionError):
        async with locks.held("s"):
            raise ZeroDivisionError
    assert not locks.waiting
    async with locks.held("s"):
        assert list(locks.waiting) == ["s"]


async def test_the_number_of_waiters_is_limited_and_cancelled_waiters_do_not_count() -> None:
    holders = LockHolders()
    names = [str(index) for index in range(1 + MOST_WAITERS)]
    tasks = [holders.start(name) for name in names]
    await until_settled()
    with pytest.raises(Overloaded, match=f"{MOST_WAITERS} requests are already waiting for session 's'"):
        await holders.start("late")
    tasks[-1].cancel()
    await until_settled()
    tasks[-1] = holders.start("in time")
    for name in (*names, "in time"):
        holders.go[name].set()
    await asyncio.gather(*tasks)
