"""Measures several models of one server side by side, on the same text or the same events.

- Perplexity: of all tokens in recurrent mode; and of windows of k tokens, at positions that are spread evenly. A
  window's perplexity is the recurrent perplexity, times the exponential of the mean change of the log-probability at
  these positions. So the figures for all k, and the recurrent figure, belong to the same tokens.
- The share of windows whose most probable token is proved, by requests with `prove`.
- The latency of a step and of a window over one connection, and the steps per second of CONNECTIONS sessions, each on
  a connection of its own. The command takes turns between the models, so other load affects all of them. These times
  include the command's own work.
"""

from __future__ import annotations

import json
import math
import statistics
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError
from rich.progress import Progress

from wane.client import Model, Wane
from wane.models.architecture import AnyArchitecture, Architecture, ImportedGraph
from wane.models.weights import weight_shapes
from wane.service.cli.connect import CommandError
from wane.service.cli.load import Load
from wane.service.cli.measure import track

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
WINDOW = 64
WITHIN = 1.01
POSITIONS = 256
CONNECTIONS = 64
ROUNDS = 5
STEPS, WINDOWS_OF_A_ROUND, STEPS_OF_A_CONNECTION = 64, 32, 16
ROWS = 64
"""The number of windows in one request of the Open Inference Protocol."""
MOST_SCORED = 32_768
"""The largest number of tokens in one request for log-probabilities. Each part of a longer sequence starts from the
zero state."""

ARCHITECTURE: TypeAdapter[Architecture] = TypeAdapter(AnyArchitecture)

Place = tuple[int, int]
"""The index of a sequence, and the number of its tokens before a predicted token."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median, the smallest and the largest of the figures of all rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class ModelFigures:
    """The figures of one model.

    - tokens: the number of tokens in `perplexity`. perplexity: per token, in recurrent mode.
    - positions: the number of positions at which windows were measured. by_k: the perplexity of windows of k tokens.
    - smallest_k: the smallest k from which on the perplexity is at most WITHIN times the recurrent perplexity; None if
      there is none.
    - proved: the share of windows whose most probable token is proved; None if no sequence is longer than the window.
    - weights: the number of its weights; None if its layers are unknown, such as those of an imported graph. reach: the
      number of earlier tokens on which an answer depends; None if its memory fades or its layers are unknown.
    - state_bytes: the size of a session's state; None if it is unknown.
    - window: the number of tokens in the windows of `window_ms` and `proved`.
    - step_ms, window_ms: the median round trip of one step and of one window, over one connection.
    - tokens_per_s: the steps per second of CONNECTIONS sessions.
    """

    tokens: int
    perplexity: float
    positions: int
    by_k: dict[int, float]
    smallest_k: int | None
    proved: float | None
    model: str
    model_version: str
    family: str
    weights: int | None
    reach: int | None
    state_bytes: int | None
    window: int
    step_ms: Spread
    window_ms: Spread
    tokens_per_s: Spread


class Compared:
    """One model, with the sequences on which it is measured."""

    def __init__(
        self, client: Wane, load: Load, card: Model, sequences: list[list[int]], window: int | None, positions: int
    ) -> None:
        """`window` is the number of tokens in the timed and proved windows; None for WINDOW, or for the model's largest
        window if that is smaller. `positions`: see `ModelFigures`. Raises CommandError."""
        self.card, self.sequences, self.positions = card, sequences, positions
        self.window = min(WINDOW, card.max_window) if window is None else window
        if self.window > card.max_window:
            raise CommandError(
                f"--window is {window}, but model {card.id} has windows of at most {card.max_window} tokens"
            )
        self.sizes = sorted({*(k for k in WINDOWS if k <= card.max_window), card.k})
        self._client, self._load = client, load
        self._sessions = [f"compare-{uuid.uuid4().hex}" for _ in range(1 + CONNECTIONS)]
        self._taken = [0] * len(self._sessions)
        (answers,), _ = load.drive([[load.request("GET", f"/v1/models/{card.id}")]])
        fields: dict[str, Any] = json.loads(answers[0].body)["parameters"]
        fields.pop("hidden")
        self.architecture: Architecture | None = None
        with suppress(ValidationError):  # a newer server may have layers that this version of Wane lacks
            self.architecture = ARCHITECTURE.validate_python(fields)
        longest = max(map(len, sequences))
        self._proved = spread_over(self._places(self.window + 1), positions)
        self._stream = max(sequences, key=len) * (1 + (self.window + ROUNDS) // longest)

    def _places(self, least: int) -> list[Place]:
        """Returns the places with at least so many tokens before them."""
        return [(index, end) for index, tokens in enumerate(self.sequences) for end in range(least, len(tokens))]

    def measure(self, progress: Progress) -> Callable[..., ModelFigures]:
        """Measures perplexities and the share proved. Returns a function that makes the figures from `step_ms`,
        `window_ms` and `tokens_per_s`. Raises WaneError, CommandError."""
        model = self.card.id
        parts = [
            (index, tokens[begin : begin + MOST_SCORED])
            for index, tokens in enumerate(self.sequences)
            for begin in range(0, len(tokens), MOST_SCORED)
        ]
        scores = track(
            progress,
            ((index, self._client.score(part, model=model)) for index, part in parts),
            len(parts),
            f"{model}: perplexity",
        )
        scored: list[list[float | None]] = [[] for _ in self.sequences]
        for index, score in scores:
            scored[index] += score.logprobs
        cache = max(score.cache_tokens or 0 for _, score in scores)
        known = [value for values in scored for value in values if value is not None]
        if not known:
            raise CommandError(f"model {model} predicts none of the tokens: each sequence has one token only")
        perplexity = math.exp(-statistics.fmean(known))
        places = spread_over(self._places(1), self.positions)
        recurrent = np.array([scored[index][end] for index, end in places], np.float64)
        by_k: dict[int, float] = {}
        for k in self.sizes if places else ():
            rows = range(0, len(places), ROWS)
            windows = (self._windows(places[first : first + ROWS], k, cache) for first in rows)
            logprobs = track(progress, windows, len(rows), f"{model}: windows of {k}")
            by_k[k] = perplexity * math.exp(float(np.mean(recurrent - np.concatenate(logprobs))))
        proofs = track(
            progress, (self._is_proved(place, cache) for place in self._proved), len(self._proved), f"{model}: proofs"
        )
        layered = None if isinstance(self.architecture, ImportedGraph) else self.architecture
        states = None if self.architecture is None else self.architecture.state_tensors()
        return partial(
            ModelFigures,
            tokens=len(known),
            perplexity=perplexity,
            positions=len(places),
            by_k=by_k,
            smallest_k=smallest_k(by_k, perplexity),
            proved=statistics.fmean(proofs) if proofs else None,
            model=model,
            model_version=self.card.model_version,
            family=self.card.family,
            weights=None if layered is None else sum(map(math.prod, weight_shapes(layered).values())),
            reach=None if layered is None or layered.fading else layered.reach,
            state_bytes=None if states is None else sum(4 * math.prod(tensor.shape) for tensor in states),
            window=self.window,
        )

    def _windows(self, places: Sequence[Place], k: int, cache: int) -> NDArray[np.float64]:
        """Returns the log-probability of the token at each place, after a window of the k tokens before it."""
        needed = max(k, cache) + 1  # with k tokens or fewer, the window would have the start token
        rows = [self.sequences[index][max(0, end - needed) : end] for index, end in places]
        longest = max(map(len, rows))
        padded = [token for row in rows for token in row + [0] * (longest - len(row))]
        request = {
            "inputs": [
                {"name": "tokens", "datatype": "INT64", "shape": [len(rows), longest], "data": padded},
                {"name": "lengths", "datatype": "INT64", "shape": [len(rows)], "data": [len(row) for row in rows]},
            ],
            "outputs": [{"name": "logits", "parameters": {"binary_data": True}}],
            "parameters": {"mode": "window", "window": k},
        }
        (answers,), _ = self._load.drive([[self._load.request("POST", f"/v2/models/{self.card.id}/infer", request)]])
        size = self.card.vocabulary.size
        values = np.frombuffer(answers[0].body[-4 * len(rows) * size :], "<f4").reshape(len(rows), size)
        logits = values.astype(np.float64)
        largest = logits.max(axis=1)
        total: NDArray[np.float64] = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
        targets = [self.sequences[index][end] for index, end in places]
        return np.asarray(logits[np.arange(len(rows)), targets] - total, np.float64)

    def _is_proved(self, place: Place, cache: int) -> bool:
        index, end = place
        needed = max(self.window, cache)
        part = self.sequences[index][max(0, end - needed) : end]
        answer = self._client.predict(
            part, model=self.card.id, mode="window", window=self.window, prove=True, top_k=1, truncated=end > needed
        )
        return answer.top1_proved

    def turn(self) -> tuple[float, float, float]:
        """Returns the median ms of a step and of a window over one connection, and the steps per second over
        CONNECTIONS connections."""
        (steps,), _ = self._load.drive([self._steps(0, STEPS)])
        window = [
            self._stream[begin : begin + self.window + 1]
            for begin in np.linspace(0, len(self._stream) - self.window - 1, WINDOWS_OF_A_ROUND, dtype=int)
        ]
        body = {"model": self.card.id, "mode": "window", "window": self.window}
        sent = [self._load.request("POST", "/v1/predict", {**body, "tokens": tokens}) for tokens in window]
        (windows,), _ = self._load.drive([sent])
        many = [self._steps(1 + index, STEPS_OF_A_CONNECTION) for index in range(CONNECTIONS)]
        _, seconds = self._load.drive(many)
        step_ms, window_ms = (statistics.median(answer.ms for answer in answers) for answers in (steps, windows))
        return step_ms, window_ms, CONNECTIONS * STEPS_OF_A_CONNECTION / seconds

    def _steps(self, session: int, count: int) -> list[bytes]:
        first = self._taken[session]
        self._taken[session] += count
        path = f"/v1/sessions/{self._sessions[session]}/tokens"
        return [
            self._load.request(
                "POST",
                path,
                {
                    "tokens": [self._stream[(position + 7 * session) % len(self._stream)]],
                    "expected_position": position,
                    "mode": "recurrent",
                    **({} if position else {"create": True, "model": self.card.id}),
                },
            )
            for position in range(first, first + count)
        ]

    def close(self) -> None:
        """Deletes the sessions. A session that cannot be deleted expires."""
        made = [name for name, taken in zip(self._sessions, self._taken, strict=True) if taken]
        with suppress(CommandError):
            self._load.drive([[self._load.request("DELETE", f"/v1/sessions/{name}")] for name in made])


def spread_over(places: Sequence[Place], count: int) -> list[Place]:
    """Returns `count` of the places, or all if there are fewer, spread evenly."""
    chosen = np.linspace(0, len(places) - 1, min(count, len(places)), dtype=int)
    return [places[index] for index in chosen]


def smallest_k(by_k: dict[int, float], perplexity: float) -> int | None:
    """Returns the smallest k from which on every perplexity is at most WITHIN times `perplexity`."""
    smallest = None
    for k, of_windows in sorted(by_k.items(), reverse=True):
        if of_windows > perplexity * WITHIN:
            break
        smallest = k
    return smallest


def measure_models(models: Sequence[Compared], progress: Progress) -> list[ModelFigures]:
    """Measures the models. Raises WaneError, CommandError."""
    make_figures = [model.measure(progress) for model in models]
    try:
        turns = [model.turn for model in models] * (ROUNDS + 1)  # the first round is a warm-up
        times = track(progress, (turn() for turn in turns), len(turns), "Latency")
    finally:
        for model in models:
            model.close()
    figures = []
    for index, make in enumerate(make_figures):
        step, window, rate = map(Spread.of, zip(*times[index + len(models) :: len(models)], strict=True))
        figures.append(make(step_ms=step, window_ms=window, tokens_per_s=rate))
    return figures
