"""Sends commands to Redis in pipelines, and tracks whether Redis is reachable.

The commits of a batch of steps are one script. The commands of one iteration of the event loop are sent together, as
one pipeline, which takes one round trip. While MOST_TRIPS round trips are in flight, commands wait for the next round
trip. A pipeline is not a transaction: each command is atomic by itself. In a cluster, each command is sent to the node
of its key.

While Redis is unreachable, every command fails immediately, without waiting for a timeout.
"""

from __future__ import annotations

import asyncio
import builtins
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from hiredis import pack_command
from redis.asyncio import Redis, RedisCluster
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    BusyLoadingError,
    ClusterError,
    ConnectionError,  # noqa: A004  (of redis)
    MasterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,  # noqa: A004  (of redis)
)

from wane.service.errors import Overloaded, Unavailable
from wane.service.observability.metrics import Metrics
from wane.service.sessions.stores.store import StoreError
from wane.service.settings import Settings

logger = logging.getLogger("wane.store")

MOST_TRIPS = 2  # largest number of round trips in flight
PROBE_EVERY_S = 0.25
CLUSTER = "+cluster"  # the end of the scheme of an address of a node of a cluster
KIND = "redis"
Argument = bytes | str | int
Row = tuple[Sequence[str], Sequence[Argument]]
"""The keys and the arguments of one change of a script that makes many."""
AWAY = (
    ConnectionError,
    TimeoutError,
    BusyLoadingError,
    ReadOnlyError,
    MasterDownError,
    ClusterError,
    RedisClusterException,
    OSError,
)
"""Errors that show that Redis, or the node of a command's key, is unavailable."""
FAILED = (RedisError, RedisClusterException, OSError)
"""Errors of a round trip. redis-py's RedisClusterException is no RedisError."""


_pack: Callable[[tuple[Argument, ...]], bytes] = pack_command  # type: ignore[assignment]  # hiredis types one argument


_SOURCES: dict[str, str] = {}


def script(name: str) -> str:
    """Returns the digest by which Redis calls a Lua script in this file's folder. The source is sent if Redis does not
    know the digest."""
    source = Path(__file__).with_name(f"{name}.lua").read_text(encoding="utf-8")
    digest = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    _SOURCES[digest] = source
    return digest


@dataclass(slots=True, eq=False)
class _Call:
    command: tuple[Argument, ...]
    reply: asyncio.Future[Any]
    again: bool = False  # the command was sent twice, and may have run twice


class RedisPipeline:
    """Sends commands to one Redis server or one Redis cluster."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        """Raises ValueError if the address is invalid, and StoreError if the password file cannot be read."""
        url, timeout_s = settings.store, settings.store_timeout_ms / 1000
        scheme, _, rest = url.partition("://")
        options: dict[str, Any] = {"socket_connect_timeout": timeout_s, "retry": Retry(NoBackoff(), 0)}
        if settings.store_password_file is not None and urlsplit(url).password is None:
            try:
                options["password"] = settings.store_password_file.read_text(encoding="utf-8").strip()
            except OSError as error:
                raise StoreError(f"store_password_file, {error.filename}, cannot be read: {error.strerror}") from error
        self._connect: Callable[..., Redis | RedisCluster] = partial(Redis.from_url, url, **options)
        if scheme.endswith(CLUSTER):
            url = f"{scheme.removesuffix(CLUSTER)}://{rest}"
            self._connect = partial(RedisCluster.from_url, url, socket_timeout=timeout_s, **options)
        self._client = self._connect()
        self._nodes: list[ClusterNode] = []  # the nodes of the cluster, as a probe last found them
        self._timeout_s = timeout_s
        self._idle: list[AbstractConnection] = []  # connections to a server that no round trip uses
        self._queue: list[_Call] = []
        self._senders: set[asyncio.Task[Any]] = set()  # each sends the queued commands until there are none
        self._probing: asyncio.Task[None] | None = None
        self._seconds = metrics.store_roundtrip_seconds.labels(KIND)
        self._commands = metrics.store_roundtrip_commands.labels(KIND)
        self._up = metrics.store_up
        self.reachable = False

    async def open(self) -> None:
        """Checks whether Redis is reachable. If not, starts to probe it."""
        error = await self._greet()
        if error is not None:
            logger.warning("the session store is not reachable yet: %s", error)
            self._probing = asyncio.create_task(self._probe(error))

    async def close(self) -> None:
        """Waits for the round trips in flight. No command may be sent afterwards."""
        if self._probing is not None:
            self._probing.cancel()
        while self._senders:
            await asyncio.wait(self._senders)
        with suppress(*FAILED):
            for connection in self._idle:
                await connection.disconnect()
            await self._client.aclose()

    async def run(self, script: str, keys: Sequence[str], *arguments: Argument) -> Any:
        """Runs a script and returns its reply: see `do`."""
        return await self._ask(("EVALSHA", script, len(keys), *keys, *arguments)).reply

    async def run_many(
        self, script: str, rows: Sequence[Row], *arguments: Argument, done: Collection[Any]
    ) -> list[Any]:
        """Runs a script once with the keys and arguments of all rows after the common `arguments`. In a cluster, runs
        it once for each row, because the rows' keys may be on different nodes. Returns a reply for each row, or the
        row's error: Overloaded if Redis is full; Unavailable if Redis is unreachable, or if the script was sent twice
        and the reply is not in `done`, the replies that show the result of the first run.
        """
        parts = [[row] for row in rows] if isinstance(self._client, RedisCluster) else [rows]
        calls = list[_Call]()
        try:
            for part in parts:
                keys = [key for keys, _ in part for key in keys]
                changes = [argument for _, own in part for argument in own]
                calls.append(self._ask(("EVALSHA", script, len(keys), *keys, *arguments, *changes)))
        except Unavailable as error:
            return [error] * len(rows)
        replies = list[Any]()
        for part, call in zip(parts, calls, strict=True):
            try:
                for reply in await call.reply:
                    if isinstance(reply, Exception):
                        replies.append(self._failure(reply))
                    elif call.again and reply not in done:
                        lost = "the connection to the session store was lost; the store may have made the change"
                        replies.append(Unavailable(lost))
                    else:
                        replies.append(reply)
            except (Unavailable, Overloaded) as error:
                replies += [error] * len(part)
        return replies

    async def do(self, *command: Argument) -> Any:
        """Runs a command and returns its reply. If the connection is lost before the reply, the command is sent again,
        although it may have run. The reply of a DEL that was sent twice is 1. Raises Overloaded if Redis is full, and
        Unavailable if Redis is unreachable."""
        return await self._ask(command).reply

    def tell(self, *command: Argument) -> None:
        """Sends a command without waiting for its reply, if Redis is reachable."""
        if self.reachable:
            call = self._ask(command)
            call.reply.add_done_callback(lambda told: told.cancelled() or told.exception())

    def _ask(self, command: tuple[Argument, ...]) -> _Call:
        if not self.reachable:
            raise away()
        call = _Call(command, asyncio.get_running_loop().create_future())
        self._queue.append(call)
        # A sender begins in the event loop's next iteration, so it sends all commands that are queued until then.
        if len(self._queue) == 1 and len(self._senders) < MOST_TRIPS:
            self._senders.add(asyncio.create_task(self._send_queued()))
        return call

    async def _send_queued(self) -> None:
        try:
            while self._queue:
                calls, self._queue = self._queue, []
                await self._travel(calls)
        finally:
            self._senders.discard(cast(asyncio.Task[Any], asyncio.current_task()))

    async def _travel(self, calls: Sequence[_Call]) -> None:
        """Makes a round trip with these commands."""
        started_s = time.perf_counter()
        self._commands.observe(len(calls))
        try:
            try:
                replies = await self.send([call.command for call in calls])
            except ConnectionError:
                # The commands are sent again, because an idle connection may be closed although Redis is reachable.
                for call in calls:
                    call.again = True
                replies = await self.send([call.command for call in calls])
            replies = await self._with_scripts(calls, replies)
        except FAILED as error:
            self._lose(error)
            replies = [error] * len(calls)
        except Exception as error:
            for call in calls:
                if not call.reply.done():
                    call.reply.set_exception(error)
            return
        self._seconds.observe(time.perf_counter() - started_s)
        for call, reply in zip(calls, replies, strict=True):
            self._settle(call, reply)

    async def send(self, commands: Sequence[tuple[Argument, ...]]) -> list[Any]:
        """Sends commands in one round trip, and returns their replies. A reply may be an error."""
        if isinstance(self._client, RedisCluster):
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies
        # redis-py's pipeline would take a connection from its pool, and set a timer for each write and each reply.
        connection = self._idle.pop() if self._idle else self._client.connection_pool.make_connection()
        replies = []
        try:
            async with asyncio.timeout(self._timeout_s):
                # redis-py packs in Python, which takes 6 us for a step
                await connection.send_packed_command(b"".join([_pack(command) for command in commands]))
                for _ in commands:
                    try:
                        replies.append(await connection.read_response())
                    except ResponseError as error:
                        replies.append(error)
        except BaseException as error:
            # What closed one connection may have closed all, so none of the idle ones is used again.
            lost = [connection, *self._idle] if isinstance(error, ConnectionError | OSError) else [connection]
            self._idle = [idle for idle in self._idle if idle not in lost]
            for each in lost:
                await each.disconnect(nowait=True)
            if isinstance(error, builtins.TimeoutError):
                raise TimeoutError(f"Redis has not answered for {self._timeout_s:g} s") from error
            raise
        self._idle.append(connection)
        return replies

    async def _with_scripts(self, calls: Sequence[_Call], replies: list[Any]) -> list[Any]:
        """Sends the source of scripts that Redis did not know. Returns all replies."""
        unknown = [index for index, reply in enumerate(replies) if isinstance(reply, NoScriptError)]
        if unknown:
            known = [calls[index].command for index in unknown]
            commands = [("EVAL", _SOURCES[str(digest)], *rest) for _, digest, *rest in known]
            for index, reply in zip(unknown, await self.send(commands), strict=True):
                replies[index] = reply
        return replies

    def _settle(self, call: _Call, reply: Any) -> None:
        if call.reply.done():  # the caller was cancelled
            return
        if isinstance(reply, Exception):
            call.reply.set_exception(self._failure(reply))
        elif call.again and call.command[0] == "DEL":
            call.reply.set_result(1)  # the first run may have deleted the keys
        else:
            call.reply.set_result(reply)

    def _failure(self, reply: Exception) -> Unavailable | Overloaded:
        """Returns the error that the caller gets for an error of Redis."""
        failure: Unavailable | Overloaded
        if isinstance(reply, OutOfMemoryError):
            failure = Overloaded("the session store is full")
        elif isinstance(reply, AWAY):
            self._lose(reply)
            failure = away()
        else:
            logger.error("the session store rejected a command", exc_info=reply)
            failure = Unavailable("the session store rejected a command")
        failure.__cause__ = reply
        return failure

    def _lose(self, error: Exception) -> None:
        """Marks Redis as unreachable, fails the queued commands, and starts to probe Redis."""
        if not self.reachable:
            return
        logger.warning("the session store is unreachable: %s", error)
        self.reachable = False
        self._up.set(0)
        waiting, self._queue = self._queue, []
        for call in waiting:
            self._settle(call, error)
        self._probing = asyncio.create_task(self._probe(error))

    async def _probe(self, logged: Exception) -> None:
        """Waits until Redis is reachable, by new connections. The idle ones may lead to an earlier primary that now
        refuses changes. Logs each error whose text differs from that of the last error, at first `logged`."""
        while True:
            await asyncio.sleep(PROBE_EVERY_S)
            idle, self._idle = self._idle, []
            for connection in idle:
                await connection.disconnect(nowait=True)
            error = await self._greet()
            if error is None:
                break
            if str(error) != str(logged):
                logger.warning("the session store is still unreachable: %s", error)
                logged = error
        logger.warning("the session store is reachable")

    async def _greet(self) -> Exception | None:
        """Sends a ping, in a cluster to every primary, and returns its error. If there is none, marks Redis as
        reachable."""
        try:
            if isinstance(self._client, RedisCluster):
                # A new client reads which nodes the cluster has now. An old one would keep the connections of others.
                await self._client.aclose()
                self._client = cluster = cast(RedisCluster, self._connect(startup_nodes=self._nodes))
                await cluster.initialize()
                self._nodes = cluster.get_nodes()
                for node in cluster.get_primaries():
                    await node.execute_command("PING")
            else:
                (reply,) = await self.send([("PING",)])
                if isinstance(reply, Exception):
                    return reply
        except FAILED as error:
            return error
        self.reachable = True
        self._up.set(1)
        return None


def away() -> Unavailable:
    return Unavailable("the session store cannot be reached")
