"""Measures the cost of sessions in Redis, with and without stored states. Redis always stores a session's tail, which
is the session's last tokens.

    python -m benchmarks.stores [--models NAME ...] [--seconds S] [--json FILE] [--plot FILE] [--render]

Measures two parts, `served` and `sizes`. Both parts use a redis-server that this benchmark starts. Redis fsyncs its
append-only file at every write in one half of the measurements, and every second in the other half. The parts are:

- served: engines of real models, without HTTP. 64 clients concurrently step one session each, by one token per step.
  Then a second engine, which has none of the sessions' states, takes the sessions over. Reports the steps per second,
  Redis's memory per session, and the bytes written to the append-only file per step. Also reports the latency of a
  session's first step at the second engine, for sessions that are taken over one after another and for many at the same
  time, and the share of sessions for which the two engines predict the same most probable token.
- sizes: the store alone. One token at a time is appended to each of 64 sessions, with a state of a given size. This
  shows from which size on storing a state costs more than storing only the tail.

Policies: `memory` is a store without Redis. `tail` stores no states. `state:N` stores a state every N tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis
from rich.console import Console
from rich.table import Table

from benchmarks.summary import Spread, provenance, rounded, write_json
from tests.service.sessions.stores.redis_server import DURABLE, RedisServer, redis_server
from wane.models.bundle import Bundle
from wane.service.engine.engine import Engine
from wane.service.engine.top1_proof import MarginProof
from wane.service.observability.metrics import Metrics
from wane.service.runners.onnx import OnnxRunner
from wane.service.sessions.stores.factory import make_store
from wane.service.sessions.stores.redis import RedisStore
from wane.service.sessions.stores.store import Commit, SessionRecord, Snapshot, Store, TokenHistory
from wane.service.settings import Settings
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest, StepRequest

BUNDLES = Path("models/bundles")
TEXT = Path("service/cli/sample.txt")
CLIENTS = 64
PAST = 600  # number of tokens of each session before the measurement: more than the tail can have
# number of sessions that the second engine takes over one after another; it takes over the others concurrently
ALONE = 24
POLICIES = ("memory", "tail", "state:64", "state:32", "state:8", "state:1")
FSYNCS = ("always", "everysec")
SIZES = tuple(2**power for power in range(10, 21, 2))  # sizes of a state in bytes
SLICES = 3
Result = dict[str, Any]


class Replica:
    """An engine with its own connection to the store, as a replica has."""

    def __init__(self, bundle: Bundle, policy: str, url: str) -> None:
        kind, _, every = policy.partition(":")
        shared: dict[str, Any] = (
            {} if kind == "memory" else {"store": url, "store_policy": kind, "store_timeout_ms": 10_000}
        )
        tail = max(256, bundle.manifest.max_window)
        settings = Settings(
            session_history_tokens=tail,
            state_checkpoint_interval_tokens=int(every or 32),
            max_batch_size=CLIENTS,
            **shared,
        )
        metrics = Metrics()
        self.store: Store = make_store(settings, tail, metrics)
        self.vocabulary = bundle.vocabulary
        runner = OnnxRunner(bundle, "cpu", threads=1)
        margin = MarginProof(bundle.weights())
        self.engine = Engine(bundle.manifest, bundle.vocabulary, margin, runner, self.store, settings, metrics)

    async def open(self) -> None:
        """Opens the store and the engine."""
        await self.store.open()
        await asyncio.to_thread(self.engine.warm_up)

    async def close(self) -> None:
        """Stops every thread."""
        await self.engine.close()
        await self.store.close()

    async def step(self, client: int, tokens: tuple[int, ...]) -> None:
        """Steps a client's session."""
        deadline = asyncio.get_running_loop().time() + 60
        await self.engine.submit(StepRequest(f"s{client}", tokens, deadline=deadline))

    async def first(self, client: int) -> tuple[int, float | None]:
        """Returns the most probable next token of a client's session, and the answer's error bound."""
        answer = await self.engine.submit(PredictRequest(session=f"s{client}", top_k=1))
        return answer.predictions[0].token_id, answer.error_bound


async def serve(bundle: Bundle, policy: str, server: RedisServer, text: str, seconds: float) -> list[Result]:
    """Measures the part `served` for one model and one policy, with each fsync setting."""
    redis = Redis.from_url(server.url)
    await redis.flushall()
    tokens = np.array(bundle.vocabulary.encode(text), np.int64)
    pasts = [tuple(np.resize(np.roll(tokens, -37 * client), PAST).tolist()) for client in range(CLIENTS)]
    one = Replica(bundle, policy, server.url)
    await one.open()
    for client, past in enumerate(pasts):
        await one.engine.create_session(f"s{client}")
        await one.step(client, past)
    results = []
    for fsync in FSYNCS if policy != "memory" else ("",):
        if fsync:
            await redis.config_set("appendfsync", fsync)
        written = (await redis.info("persistence"))["aof_current_size"]
        rates, steps = await rate(lambda client: one.step(client, pasts[client][:1]), seconds)
        size = (await redis.info("persistence"))["aof_current_size"]
        result: Result = {
            "model": bundle.manifest.name,
            "policy": policy,
            "fsync": fsync,
            "steps_per_s": Spread.of(rates),
        }
        if policy != "memory":
            keys = await redis.keys("*")
            result["session_bytes"] = sum([await redis.memory_usage(key, samples=0) for key in keys]) / CLIENTS
            result["file_bytes_per_step"] = (size - written) / steps
            result |= await take_over(one, Replica(bundle, policy, server.url), pasts)
        results.append(result)
    await one.close()
    await redis.aclose()
    return results


async def rate(step: Callable[[int], Awaitable[object]], seconds: float) -> tuple[list[float], int]:
    """Runs the clients in a closed loop. The time `seconds` is divided into SLICES equal slices. Returns the steps per
    second of each slice, and the number of steps."""
    rates, total = [], 0
    for _ in range(SLICES):
        begun = time.perf_counter()
        end = begun + seconds / SLICES
        done = 0

        async def client(number: int, end: float = end) -> int:
            count = 0
            while time.perf_counter() < end:
                await step(number)
                count += 1
            return count

        done = sum(await asyncio.gather(*map(client, range(CLIENTS))))
        rates.append(done / (time.perf_counter() - begun))
        total += done
    return rates, total


async def take_over(one: Replica, other: Replica, pasts: list[tuple[int, ...]]) -> Result:
    """Measures how the engine of `other` continues the sessions of the engine of `one`."""
    await other.open()
    alone = []
    for client in range(ALONE):
        begun = time.perf_counter()
        await other.step(client, pasts[client][1:2])
        alone.append(time.perf_counter() - begun)
        # In this step, the engine of `one` also applies the token that the engine of `other` has appended.
        await one.step(client, pasts[client][2:3])
    begun = time.perf_counter()
    await asyncio.gather(*(other.step(client, pasts[client][1:2]) for client in range(ALONE, CLIENTS)))
    together = time.perf_counter() - begun
    resident = []
    for client in range(ALONE):
        begun = time.perf_counter()
        await other.step(client, pasts[client][3:4])
        resident.append(time.perf_counter() - begun)
    for client in range(ALONE, CLIENTS):
        await one.step(client, pasts[client][2:3])
        await other.step(client, pasts[client][3:4])
    same, bounds = 0, []
    for client in range(CLIENTS):
        (uninterrupted, _), (after, bound) = await one.first(client), await other.first(client)
        same += uninterrupted == after
        bounds.append(bound)
    await other.close()
    told = [bound for bound in bounds if bound is not None]
    return {
        "recovery_ms": 1e3 * statistics.median(alone),
        "resident_ms": 1e3 * statistics.median(resident),
        "recovery_together_ms": 1e3 * together,
        "taken_over_together": CLIENTS - ALONE,
        "top1_same": same / CLIENTS,
        "error_bound": max(told) if len(told) == len(bounds) else None,
    }


async def sizes(server: RedisServer, seconds: float) -> list[Result]:
    """Measures the part `sizes`. Each step stores a state of one of the SIZES, or no state (size 0)."""
    redis = Redis.from_url(server.url)
    results = []
    for fsync in FSYNCS:
        for size in (0, *SIZES):
            await redis.flushall()
            await redis.config_set("appendfsync", fsync)
            settings = Settings(store=server.url, store_timeout_ms=10_000)
            store = make_store(settings, 512, Metrics())
            assert isinstance(store, RedisStore)
            await store.open()
            results.append({"fsync": fsync, "state_bytes": size, **await append(store, size, seconds)})
            await store.close()
    await redis.flushall()
    await redis.aclose()
    return results


async def append(store: RedisStore, size: int, seconds: float) -> Result:
    """Measures the appends per second, and the latency of reading a session, in milliseconds. All tails are full."""
    state = np.random.default_rng(0).bytes(size)
    tail = TokenHistory.start(0, 2048).append(range(512), 512, 512)
    for client in range(CLIENTS):
        await store.create(SessionRecord(f"s{client}", "m", "1", Mode.AUTO, 600, tail))

    async def step(client: int) -> None:
        record = store.get_cached(f"s{client}")
        assert record is not None
        snapshot = Snapshot(record.position + 1, 0, b"maker", state) if size else None
        (after,) = await store.append_many([Commit(record, (7,), snapshot=snapshot)])
        assert isinstance(after, SessionRecord)

    rates, _ = await rate(step, seconds)
    reads = []
    for client in range(CLIENTS):
        begun = time.perf_counter()
        await store.get(f"s{client}")
        reads.append(time.perf_counter() - begun)
    return {"steps_per_s": Spread.of(rates), "read_ms": 1e3 * statistics.median(reads)}


def show(document: Result) -> None:
    """Prints the tables."""
    table = Table(title=f"{CLIENTS} sessions, engine without HTTP; rates: medians of {SLICES} slices (least to most)")
    columns = (
        "model",
        "policy",
        "fsync",
        "steps/s",
        "bytes per session",
        "file bytes per step",
        "first step ms",
        "resident ms",
    )
    for column in (*columns, f"{CLIENTS - ALONE} at once ms", "top-1 same", "bound"):
        table.add_column(column, justify="right")
    for one in document["served"]:
        cells = [one["model"], one["policy"], one["fsync"], f"{Spread(**one['steps_per_s']):,.0f}"]
        if "recovery_ms" in one:
            bound = one["error_bound"]
            in_file = one["file_bytes_per_step"]
            cells += [f"{one['session_bytes']:,.0f}", "" if in_file is None else f"{in_file:,.0f}"]
            cells += [f"{one[name]:.1f}" for name in ("recovery_ms", "resident_ms")]
            cells += [f"{one['recovery_together_ms']:.0f}", f"{one['top1_same']:.1%}"]
            cells += ["none" if bound is None else f"{bound:.2g}"]
        table.add_row(*cells)
    Console(width=170).print(table)
    table = Table(title="The store alone. Every append stores a state (0 bytes: no state)")
    for column in ("fsync", "state bytes", "appends/s", "read ms"):
        table.add_column(column, justify="right")
    for one in document["sizes"]:
        row = [one["fsync"], f"{one['state_bytes']:,}", f"{Spread(**one['steps_per_s']):,.0f}", f"{one['read_ms']:.2f}"]
        table.add_row(*row)
    Console(width=120).print(table)


def plot(document: Result, path: Path) -> None:
    """Plots the rate of steps, the latency of a session's first step at the second engine, and the rate of appends."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = list(dict.fromkeys(one["model"] for one in document["served"]))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    width = 0.8 / len(models)
    policies = list(dict.fromkeys(one["policy"] for one in document["served"]))
    for index, model in enumerate(models):
        of_model = {
            one["policy"]: one
            for one in document["served"]
            if one["model"] == model and one["fsync"] in ("", document["fsync_of_plot"])
        }
        x = np.arange(len(policies)) + (index - (len(models) - 1) / 2) * width
        axes[0].bar(x, [of_model[name]["steps_per_s"]["median"] for name in policies], width, label=model)
        axes[1].bar(x[1:], [of_model[name]["recovery_ms"] for name in policies[1:]], width, label=model)
    for axis, shown in ((axes[0], 0), (axes[1], 1)):  # without a store, another replica has nothing to begin from
        axis.set_xticks(np.arange(len(policies))[shown:], policies[shown:])
        axis.legend()
    axes[0].set(title=f"steps a second, {CLIENTS} sessions (fsync {document['fsync_of_plot']})")
    axes[1].set(title="first step at a replica without the session's state, ms")
    for fsync in FSYNCS:
        of_fsync = [one for one in document["sizes"] if one["fsync"] == fsync]
        rates = [one["steps_per_s"]["median"] for one in of_fsync]
        axes[2].plot([one["state_bytes"] for one in of_fsync[1:]], rates[1:], marker="o", label=f"state, fsync {fsync}")
        axes[2].axhline(rates[0], linestyle="--", color=axes[2].lines[-1].get_color(), label=f"tail, fsync {fsync}")
    axes[2].set(
        xscale="log",
        yscale="log",
        xlabel="bytes of a state",
        title="appends per second, with or without a state",
    )
    axes[2].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


async def measure(models: list[str], text: str, seconds: float) -> Result:
    """Measures both parts. The sessions' tokens are those of `text`."""
    # Redis is told not to rewrite the append-only file, so that the file's growth equals the number of bytes written.
    options = (*DURABLE, "--auto-aof-rewrite-percentage", "0")
    with tempfile.TemporaryDirectory() as folder, redis_server(Path(folder), options) as server:
        served = []
        for model in models:
            bundle = Bundle.read(BUNDLES / model)
            for policy in POLICIES:
                print(f"{model} {policy}", file=sys.stderr, flush=True)
                served += await serve(bundle, policy, server, text, seconds)
        async with Redis.from_url(server.url) as redis:
            version = (await redis.info("server"))["redis_version"]
        origin = provenance("benchmarks.stores", "onnxruntime", bundles=["gated-stable", "lstm"])
        return {
            **origin,
            "versions": origin["versions"] | {"redis": version},
            "state_bytes": {model: state_bytes(model) for model in models},
            "fsync_of_plot": FSYNCS[1],
            "served": served,
            "sizes": await sizes(server, seconds),
        }


def state_bytes(model: str) -> int:
    """Returns the size in bytes of a stored state. The output layer's input is stored as a part of the state."""
    manifest = Bundle.read(BUNDLES / model).manifest
    return 4 * (sum(int(np.prod(tensor.shape)) for tensor in manifest.state) + manifest.architecture.hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["gated-stable", "lstm"])
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement of a rate")
    parser.add_argument("--json", type=Path, default=Path("docs/figures/stores.json"))
    parser.add_argument("--plot", type=Path, default=Path("docs/figures/stores.png"))
    parser.add_argument("--render", action="store_true", help="show the figures in the JSON file; measure nothing")
    arguments = parser.parse_args()
    if not arguments.render:
        document = rounded(asyncio.run(measure(arguments.models, TEXT.read_text(encoding="utf-8"), arguments.seconds)))
        write_json(arguments.json, document)
    document = json.loads(arguments.json.read_text(encoding="utf-8"))
    show(document)
    plot(document, arguments.plot)


if __name__ == "__main__":
    main()
