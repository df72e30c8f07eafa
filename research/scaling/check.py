"""Compares the simulation with measurements on two processors. For each measurement, the simulation has the same load
and the same kills of replicas.

There are three measurements. The simulation's costs are not derived from any of them. The first measurement is a closed
loop of 32 connections over three replicas, with the client of `benchmarks.routing`. The second measurement has two
hundred sessions at 250 steps per second, while one replica after another is killed, with the clients of
`tests/stack/test_killed_replicas.py`. The third measurement is the storm of a thousand rebuilds (runs that recompute
lost states) in one engine, from `docs/figures/storm.json`. The command `check` repeats the first two measurements on
the real stack.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import simpy

from benchmarks.bench.connections import BadAnswer
from benchmarks.routing import BUNDLE, CONNECTIONS, SESSIONS_EACH, begin, drive
from benchmarks.storm import PARKED, RATE, RESIDENT, UNDISTURBED_S, FirstCome
from benchmarks.summary import Spread
from deploy.stack.stack import Stack, replicas
from research.scaling.costs import BENCHMARKS, FIGURES, Costs
from research.scaling.fleet import Fleet, Shape
from research.scaling.memory import Found
from research.scaling.record import Record
from research.scaling.replica import Item, Replica
from research.scaling.worker import Cores, Then, after
from tests.stack.harness.load_generator import failures, open_clients, stepping
from wane.service.batching.cost_model import CostModel
from wane.service.batching.scheduler import FairScheduler

FILE = FIGURES / "scaling_check.json"
PORTS = 2  # the number of processors of the measured machine
SEEDS = 5
CLOSED_S = 8.0
CLOSED_ROUNDS = 3
FIRST_TOKENS, SESSIONS, STEP_RATE = 40, 200, 1.25
SETTLING_S, CALM_S, EVERY_S = 4.0, 10.0, 15.0
KILLS = 3
Result = dict[str, Any]


def measured_closed(stack: Stack, seconds: float) -> list[Result]:
    """Measures a closed loop on the real stack. Returns the results of each round."""
    found = []
    for number in range(CLOSED_ROUNDS):
        random = Random(number)
        sessions = [[f"check-{number}-{one}-{own}" for own in range(SESSIONS_EACH)] for one in range(CONNECTIONS)]
        begin(stack.port, [session for own in sessions for session in own], random)
        drive(stack.port, sessions, 1.0, random)
        own_s = time.process_time()
        latencies = np.array(drive(stack.port, sessions, seconds, random))
        p50, p99 = (1e3 * float(value) for value in np.percentile(latencies, (50, 99)))
        own_s = (time.process_time() - own_s) / len(latencies)
        found.append({"steps_per_s": len(latencies) / seconds, "p50_ms": p50, "p99_ms": p99, "client_us": 1e6 * own_s})
    return found


async def measured_kills(stack: Stack) -> Result:
    """Measures the latencies of independent sessions while replicas are killed one after another."""
    clock = asyncio.get_running_loop().time
    record, outages = Record(), []
    async with open_clients(stack.port, [FIRST_TOKENS] * SESSIONS) as clients:
        async with stepping(clients, STEP_RATE):
            await asyncio.sleep(SETTLING_S)
            start_s, own_s, before = clock(), time.process_time(), sum(len(client.timed) for client in clients)
            await asyncio.sleep(CALM_S)
            own_s = (time.process_time() - own_s) / (sum(len(client.timed) for client in clients) - before)
            for number in range(KILLS):
                victim, killed_s = stack.replicas[number % len(stack.replicas)], clock()
                await asyncio.to_thread(victim.kill)
                victim.start()
                await asyncio.to_thread(victim.wait_ready)
                outages.append((killed_s - start_s, clock() - start_s))
                await asyncio.sleep(killed_s + EVERY_S - clock())
        if failed := failures(clients):
            raise BadAnswer(failed[0])
        for client in clients:
            own = sorted(client.answers)[-len(client.timed) :]
            for timed, position in zip(client.timed, own, strict=True):
                rebuilt = client.answers[position]["state"] == "rebuilt"
                record.answer(timed.due_s - start_s, timed.ended_s - start_s, refused=False, rebuilt=rebuilt)
    return {"client_us": 1e6 * own_s, "outages": outages, **told(record, outages)}


def told(record: Record, outages: list[tuple[float, float]]) -> Result:
    """Summarises the steps before, during and after the outages."""
    after_s = [(end, begun + EVERY_S) for begun, end in outages]
    due, taken, rebuilt = record.arrays()

    def of(spans: list[tuple[float, float]]) -> Result:
        chosen = np.zeros(len(due), bool)
        for begun, end in spans:
            chosen |= (due >= begun) & (due < end)
        p50, p99, most = (1e3 * float(value) for value in np.percentile(taken[chosen], (50, 99, 100)))
        share = {"steps": int(chosen.sum()), "rebuilt": int(rebuilt[chosen].sum())}
        return {"p50_ms": p50, "p99_ms": p99, "longest_ms": most, **share}

    return {"calm": of([(0.0, CALM_S)]), "outages_": of(outages), "after": of(after_s)}


def simulated_closed(costs: Costs, client_us: float, seconds: float, seed: int) -> Result:
    """Simulates the closed loop that `measured_closed` measures."""
    own = replace(costs, client_s=1e-6 * client_us)
    shape = Shape(sessions=CONNECTIONS * SESSIONS_EACH, closed=CONNECTIONS, cores=PORTS, client=True, tokens=100)
    fleet = Fleet(own, shape, seed)
    fleet.run(seconds)
    found = fleet.record.between(0.5, seconds)
    return {name: found[name] for name in ("steps_per_s", "p50_ms", "p99_ms")}


def simulated_kills(costs: Costs, client_us: float, seed: int) -> Result:
    """Simulates the kills that `measured_kills` measures. The measured times of the kills are inputs. The durations of
    the restarts are simulated."""
    own = replace(costs, client_s=1e-6 * client_us)
    tokens = FIRST_TOKENS + round(STEP_RATE * (SETTLING_S + CALM_S + KILLS * EVERY_S) / 2)
    shape = Shape(sessions=SESSIONS, rate=STEP_RATE, cores=PORTS, client=True, tokens=tokens)
    fleet = Fleet(own, shape, seed)
    came_back: list[float] = []
    fleet.on_return = came_back.append
    kills = [SETTLING_S + CALM_S + number * EVERY_S for number in range(KILLS)]
    fleet.run(
        kills[-1] + EVERY_S,
        [(at, lambda number=number: fleet.kill(number + 1)) for number, at in enumerate(kills)],  # type: ignore[misc]
    )
    record = fleet.record
    record.due_s = [due - SETTLING_S for due in record.due_s]
    outages = [(at - SETTLING_S, end - SETTLING_S) for at, end in zip(kills, came_back, strict=True)]
    return {"outages": outages, **told(record, outages)}


class _Parked:
    """The states of all sessions, as at the start of the storm. Sessions with a number below `RESIDENT` have a state in
    memory. The state of every other session is rebuilt at its next step."""

    def __init__(self) -> None:
        self._seen: set[int] = set(range(RESIDENT))

    def use(self, session: int) -> Found:
        found = Found.RESIDENT if session in self._seen else Found.REMEMBERED
        self._seen.add(session)
        return found

    def drop(self, session: int) -> None:
        self._seen.discard(session)

    @property
    def resident(self) -> int:
        return len(self._seen)


def simulated_storm(costs: Costs, engine_step_s: float, way: str, within_s: float, tail: int, seed: int) -> Result:
    """Simulates `benchmarks.storm`: one engine without HTTP and without Redis. way: the measured case ("undisturbed",
    "fair" or "first come"). within_s: the seconds within which the sessions without a state in memory send one step
    each. tail: the number of last tokens that the service keeps of each session."""
    env, random = simpy.Environment(), np.random.default_rng(seed)
    own = replace(costs, loop_step_s=engine_step_s, loop_batch_s=0.0, loop_rebuilt_s=0.0, max_queue=16 * PARKED)
    queue: Callable[[int, CostModel], FairScheduler[Item]] = FairScheduler
    if way == "first come":
        queue = lambda most, _: FirstCome(most)  # type: ignore[return-value,assignment]  # noqa: E731

    def memory(_: int, then: Then) -> None:
        after(env, 0.0, then)

    replica = Replica(env, own, _Parked(), memory, held=tail, queue=queue, cores=Cores(env, PORTS))
    record = Record()
    ended: list[float] = []

    def step(session: int) -> None:
        due = env.now

        def answered(refused: bool, rebuilt: bool) -> None:
            if session < RESIDENT:
                record.answer(due, env.now, refused, rebuilt)
            else:
                ended.append(env.now)

        replica.step(session, answered)

    def steady() -> simpy.events.ProcessGenerator:
        number = 0
        while len(ended) < PARKED if way != "undisturbed" else env.now < UNDISTURBED_S:
            step(number % RESIDENT)
            number += 1
            yield env.timeout(1 / RATE)

    def parked() -> simpy.events.ProcessGenerator:
        for number in range(PARKED):
            step(RESIDENT + number)
            yield env.timeout(within_s / PARKED * float(random.uniform(0.5, 1.5)))

    env.process(steady())
    if way != "undisturbed":
        env.process(parked())
    env.run()
    end = max(ended) if ended else UNDISTURBED_S
    found = record.between(0.0, end)
    return {"p50_ms": found["p50_ms"], "p99_ms": found["p99_ms"], "storm_s": max(ended) if ended else None}


def measure(seconds: float = CLOSED_S) -> Result:
    """Measures the closed loop and the kills on the real stack."""
    every = {"WANE_BUNDLES": str(BUNDLE), "WANE_LOG_LEVEL": "warning"}
    variables = dict.fromkeys(replicas(), every)
    with tempfile.TemporaryDirectory() as folder, Stack(Path(folder), variables=variables) as stack:
        return {"closed": measured_closed(stack, seconds), "kills": asyncio.run(measured_kills(stack))}


def simulate(costs: Costs, measured: Result) -> Result:
    """Simulates the measured loads and the storm, with several seeds."""
    closed_us = statistics.median(one["client_us"] for one in measured["closed"])
    kills_us = measured["kills"]["client_us"]
    storm = json.loads((BENCHMARKS / "storm.json").read_text(encoding="utf-8"))
    bench = json.loads((BENCHMARKS / "bench.json").read_text(encoding="utf-8"))
    engine_step_s = 1 / bench["figures"]["gated-stable"]["onnxruntime"]["engine-64"]["rate"]["median"]
    ways = {
        way: [
            simulated_storm(costs, engine_step_s, way, storm["within_s"], storm["tail"], seed) for seed in range(SEEDS)
        ]
        for way in storm["ways"]
    }
    closed = [simulated_closed(costs, closed_us, CLOSED_S, seed) for seed in range(SEEDS)]
    kills = [simulated_kills(costs, kills_us, seed) for seed in range(SEEDS)]
    return {
        "seeds": SEEDS,
        "closed": spreads(closed, "steps_per_s", "p50_ms", "p99_ms"),
        "kills": {
            "back_s": Spread.of(away_s(one) for one in kills).model_dump(),
            "rebuilt": Spread.of(rebuilt_by_kills(one) for one in kills).model_dump(),
            **{span: spreads([one[span] for one in kills], "p50_ms", "p99_ms") for span in SPANS},
        },
        "storm": {
            way: spreads(runs, *(name for name, value in runs[0].items() if value is not None))
            for way, runs in ways.items()
        },
    }


def spreads(runs: Sequence[Result], *names: str) -> Result:
    """Returns, for each result in `names`, its spread (see `Spread`) over the runs of the simulation."""
    return {name: Spread.of(one[name] for one in runs).model_dump() for name in names}


def away_s(kills: Result) -> float:
    """Returns the mean duration, in seconds, of a killed replica's outage."""
    return float(statistics.mean(end - begun for begun, end in kills["outages"]))


def rebuilt_by_kills(kills: Result) -> float:
    """Returns the number of states that were rebuilt from the first kill on."""
    return float(sum(kills[span]["rebuilt"] for span in ("outages_", "after")))


def rows(real: Result, model: Result) -> list[list[str]]:
    """Returns table rows of measured figures, simulated figures (medians over the seeds) and their differences."""
    made = []
    for what, unit, measured, simulated in pairs(real, model):
        off = 100 * (simulated.median / measured - 1) if measured else float("nan")
        made.append([what, f"{measured:,.1f} {unit}", f"{simulated:,.1f} {unit}", f"{off:+.0f} %"])
    return made


def pairs(real: Result, model: Result) -> list[tuple[str, str, float, Spread]]:
    """Returns each compared figure: its name, its unit, the measured value and the simulated one."""
    made: list[tuple[str, str, float, Spread]] = []

    def row(what: str, unit: str, measured: float, simulated: Result) -> None:
        made.append((what, unit, measured, Spread(**simulated)))

    for key, unit in (("steps_per_s", "steps/s"), ("p50_ms", "ms"), ("p99_ms", "ms")):
        middle = statistics.median(one[key] for one in real["closed"])
        row(f"closed loop, 32 connections: {NAMES[key]}", unit, middle, model["closed"][key])
    row("outage of a killed replica", "s", away_s(real["kills"]), model["kills"]["back_s"])
    for span, named in SPANS.items():
        for key in ("p50_ms", "p99_ms"):
            row(f"250 steps/s, {named}: {NAMES[key]}", "ms", real["kills"][span][key], model["kills"][span][key])
    row("states rebuilt after three kills", "", rebuilt_by_kills(real["kills"]), model["kills"]["rebuilt"])
    storm = json.loads((BENCHMARKS / "storm.json").read_text(encoding="utf-8"))["ways"]
    for way, simulated in model["storm"].items():
        for key, spread in simulated.items():
            unit = key.rpartition("_")[2]
            row(f"1,000 rebuilds, {way}: {NAMES[key]}", unit, storm[way][key]["median"], spread)
    return made


NAMES = {"steps_per_s": "rate", "p50_ms": "p50", "p99_ms": "p99", "storm_s": "all rebuilt after"}
SPANS = {"calm": "before", "outages_": "during an outage", "after": "after an outage"}
