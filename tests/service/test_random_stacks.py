"""Sessions of random stacks of layers, with and without a cache, equal the oracle after steps of one and of several
tokens, rewinds, evictions and a new version with other layers."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from numpy.typing import NDArray

from research.stack_attack import TOKENS, random_stack
from tests.models.bundles import export_words
from tests.models.caches import random_cache
from wane.models.bundle import Bundle
from wane.models.layer_registry import KINDS, Kind
from wane.models.reference import Reference
from wane.models.reference.cache import mixture
from wane.service.engine.engine import Engine
from wane.service.observability.metrics import Metrics
from wane.service.registry import loader
from wane.service.sessions.stores.memory import MemoryStore
from wane.service.settings import Settings
from wane.service.types.answer import Answer
from wane.service.types.common import Mode
from wane.service.types.request import PredictRequest, StepRequest

OPERATIONS, CLOSE = 12, 1e-3
SETTINGS = Settings(session_history_tokens=4096)


def write(folder: Path, version: int, seed: int, kind: Kind) -> Bundle:
    architecture, weights = random_stack(seed, kind)
    random = Random(seed)
    export_words(
        folder,
        architecture,
        weights,
        version=str(version),
        max_window=16,
        cache=random_cache(random, random.randrange(2, 9)) if seed % 2 else None,
        start=random.choice(["token", "zero"]),
        replace=True,
    )
    return loader.read(folder)


def expected(bundle: Bundle, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Returns the distribution after the tokens, by the oracle."""
    reference = Reference(bundle.manifest.architecture, bundle.weights())
    state, logits = reference.zero_state(1), np.zeros((1, TOKENS))
    for token in (*bundle.manifest.start_tokens, *tokens):
        logits, _, state = reference.step(np.array([token]), state)
    network = np.exp(logits[0].astype(np.float64) - logits.max())
    network /= network.sum()
    cache = bundle.manifest.cache
    return network if cache is None else mixture(cache, network, tokens)


def check(answer: Answer, bundle: Bundle, tokens: Sequence[int]) -> None:
    distribution = expected(bundle, tokens)
    allowed = CLOSE + (answer.error_bound or 0)
    for one in answer.predictions:
        assert one.probability == pytest.approx(distribution[one.token_id], abs=allowed), (answer.state, len(tokens))


async def exercise(engine: Engine, bundle: Bundle, sessions: dict[str, list[int]], random: Random) -> None:
    """Sends random operations to the sessions, and compares each answer with the oracle."""
    for _ in range(OPERATIONS):
        session = random.choice([*sessions])
        tokens, kind = sessions[session], random.random()
        if kind < 0.15 and len(tokens) > 1:
            position = random.randrange(1, len(tokens))
            await engine.rewind(session, position)
            del tokens[position:]
        elif kind < 0.25:
            engine.state_cache.drop(session)
        elif kind < 0.35 and tokens:
            answer = await engine.submit(
                PredictRequest(tuple(tokens), mode=Mode.WINDOW, window=random.choice((1, 5, 16)))
            )
            if answer.error_bound is not None:  # otherwise nothing is claimed about a window that left tokens out
                check(answer, bundle, tokens)
        new = [random.randrange(2, TOKENS) for _ in range(1 if random.random() < 0.7 else random.randrange(2, 14))]
        tokens += new
        check(await engine.submit(StepRequest(session, tuple(new))), bundle, tokens)


async def serve(seed: int, kind: Kind) -> None:
    random, sessions = Random(seed), dict[str, list[int]]()
    store = MemoryStore(SETTINGS.session_history_tokens, SETTINGS.session_ttl_s, SETTINGS.session_budget_bytes)
    with tempfile.TemporaryDirectory() as folder:
        for version in (1, 2):
            bundle = write(Path(folder) / "m", version, 2 * seed + version, kind)
            engine = await loader.start(loader.open_graphs(bundle, SETTINGS), store, SETTINGS, Metrics())
            for name in ("a", "b", "c") if version == 1 else ():
                await engine.create_session(name)
                sessions[name] = []
            await exercise(engine, bundle, sessions, random)
            await engine.close()
            engine.discard()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(seed=some.integers(0, 100_000))
def test_sessions_of_random_stacks_with_each_kind_of_layer(kind: Kind, seed: int) -> None:
    asyncio.run(serve(seed, kind))
