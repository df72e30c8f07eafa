"""What a request costs: how many rows it runs, how many tokens it reads, how many tokens its answer lists, and how
many bytes its answer has.

Every body has its cost here. `decode` computes it before any work, refuses a body whose cost is over a limit, and
charges the API key for its rows. The number of tokens of a text is known only when it is tokenised, so a route that
lists tokens of texts then checks the cost again. So does an inference with outputs as wide as the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from starlette.requests import HTTPConnection

from wane.service.api.exchange import context
from wane.service.api.schemas.completions import MAX_TOKENS, CompletionBody
from wane.service.api.schemas.inference import InferBody
from wane.service.api.schemas.models import IndexBody, LoadBody, UnloadBody
from wane.service.api.schemas.sessions import ContinuationsBody, ForkBody, RewindBody, SessionBody, StepBody, StepsBody
from wane.service.api.schemas.tokenizer import DetokenizeBody, TokenizeBody
from wane.service.auth.guard import FREE
from wane.service.errors import InvalidRequest, TooLarge
from wane.service.settings import Settings
from wane.service.types.body import Body
from wane.service.types.generate import GenerateBody
from wane.service.types.predict import CompareBody, PredictBody, ScoreBody


class Cost(NamedTuple):
    """What a request costs. rows: the inputs, steps or samples, of which each counts as a request of the API key.
    tokens: the tokens that all rows together read. listed: the tokens that the answer lists, unless generated tokens
    are streamed. compared: how often a comparison runs its input again, for each model once recurrent and once for each
    window; each run counts as a request of the API key. answer_bytes: the expected size of an inference's answer.
    `rows_field` and `listed_fields` are the fields that decide these numbers."""

    rows: int = 1
    tokens: int = 0
    listed: int = 0
    rows_field: str = "inputs"
    listed_fields: str = "top_k"
    compared: int = 0
    answer_bytes: int = 0

    def check(self, settings: Settings) -> None:
        """Raises InvalidRequest for too many rows, and TooLarge for too many tokens or bytes."""
        if not self.rows <= settings.max_batch_inputs:
            raise InvalidRequest(
                f"{self.rows_field} asks for {self.rows} rows, but at most {settings.max_batch_inputs} are allowed",
                self.rows_field,
            )
        most = settings.max_scored_tokens
        if self.listed > most:
            raise TooLarge(
                f"the answer lists {self.listed} tokens, but at most {most} are allowed: lower {self.listed_fields}, "
                "or shorten the input"
            )
        if self.tokens > most:
            raise TooLarge(f"all rows have {self.tokens} tokens, but at most {most} are accepted in one request")
        if self.answer_bytes > settings.max_answer_bytes:
            raise TooLarge(
                f"the answer has up to {self.answer_bytes} bytes, but at most {settings.max_answer_bytes} are allowed: "
                "send fewer rows, or ask for binary outputs"
            )


def length_of(sequence: object) -> int:
    """Returns the number of tokens of an input, or 0 for a text, which is not tokenised yet."""
    return len(sequence) if isinstance(sequence, tuple) else len(getattr(sequence, "events", ()))


def _within(number: int | None, most: int) -> int:
    """Returns a number of a body, or 0 if it is out of its range. The engine refuses such a number by its name."""
    return number if number is not None and 0 <= number <= most else 0


def _of_predict(body: PredictBody, settings: Settings) -> Cost:
    inputs = (body.sequence,) if body.inputs is None else body.inputs
    return Cost(len(inputs), sum(map(length_of, inputs)), len(inputs) * _within(body.top_k, settings.top_k_limit))


def of_score(body: ScoreBody, settings: Settings, tokens: int | None = None) -> Cost:
    """`tokens` is the number of tokens, or None before a text is tokenised."""
    count = length_of(body.sequence) if tokens is None else tokens
    return Cost(1, count, count * _within(body.top_k, settings.top_k_limit))


def _of_generate(body: GenerateBody, settings: Settings) -> Cost:
    made = _within(body.max_tokens, settings.max_generated_tokens)
    listed = 0 if body.stream else made * _within(body.top_logprobs, settings.top_k_limit)
    return Cost(1, length_of(body.sequence), listed, listed_fields="max_tokens or top_logprobs")


def _of_steps(body: StepsBody, settings: Settings) -> Cost:
    tokens = sum(length_of(step.sequence) for step in body.steps)
    listed = sum(_within(step.top_k, settings.top_k_limit) for step in body.steps)
    return Cost(len(body.steps), tokens, listed, "steps")


def of_continuations(body: ContinuationsBody, settings: Settings, tokens: int | None = None) -> Cost:
    """`tokens` is the number of tokens of all continuations, or None before texts are tokenised."""
    count = len(body.continuations)
    tokens = sum(map(length_of, body.continuations)) if tokens is None else tokens
    return Cost(count, tokens, count * _within(body.top_k, settings.top_k_limit) + 2 * tokens, "continuations")


def of_completion(body: CompletionBody, settings: Settings, tokens: int | None = None) -> Cost:
    """`tokens` is the number of tokens of all prompts, or None before texts are tokenised."""
    prompt = body.prompt
    prompts = 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)
    samples = 1 if body.n is None else body.n
    if tokens is None:
        tokens = length_of(prompt) if prompts == 1 else sum(map(length_of, prompt))
    made = _within(MAX_TOKENS if body.max_tokens is None else body.max_tokens, settings.max_generated_tokens)
    each = max(1, _within(body.logprobs, settings.top_k_limit))
    echoed = tokens * samples * each if body.echo else 0
    listed = 0 if body.stream or body.logprobs is None else prompts * samples * made * each
    field = "prompt" if prompts > settings.max_batch_inputs else "n"
    return Cost(prompts * samples, tokens * samples, echoed + listed, field, "n, max_tokens or logprobs")


def _of_compare(body: CompareBody, _: Settings) -> Cost:
    models = 1 if body.models is None else len(body.models)
    return Cost(1, length_of(body.sequence), compared=models * (1 + len(body.windows)) - 1)


def of_outputs(rows: int, widths: Iterable[tuple[int, bool]]) -> Cost:
    """Returns the cost of an inference's answer. widths: for each output, the number of its values in a row, and
    whether they are binary."""
    sizes = [width * (BINARY_BYTES if is_binary else JSON_BYTES) for width, is_binary in widths]
    return Cost(rows, answer_bytes=rows * sum(sizes))


BINARY_BYTES, JSON_BYTES = 4, 12
"""The bytes of a float32 in an answer: in a binary tensor, and about, with a comma, in JSON."""


def _of_infer(body: InferBody, _: Settings) -> Cost:
    rows = [tensor.shape[0] for tensor in body.inputs if tensor.shape and type(tensor.shape[0]) is int]
    field = next((tensor.name for tensor in body.inputs), "inputs")
    return Cost(max(rows, default=1), rows_field=field)


COSTS: Mapping[type[Body], Callable[[Any, Settings], Cost]] = {
    PredictBody: _of_predict,
    ScoreBody: of_score,
    GenerateBody: _of_generate,
    CompareBody: _of_compare,
    StepsBody: _of_steps,
    ContinuationsBody: of_continuations,
    StepBody: lambda body, _: Cost(1, length_of(body.sequence)),
    CompletionBody: of_completion,
    InferBody: _of_infer,
    SessionBody: lambda body, _: Cost(1, len(body.history or body.events or ())),
    DetokenizeBody: lambda body, _: Cost(1, len(body.tokens)),
    **dict.fromkeys((ForkBody, RewindBody, TokenizeBody, IndexBody, LoadBody, UnloadBody), lambda *_: Cost()),
}


def admit(request: HTTPConnection, cost: Cost) -> None:
    """Refuses a request whose cost is over a limit, and charges its API key. One row was charged before the endpoint
    was called. Raises InvalidRequest, TooLarge, RateLimited, Unauthorized."""
    cost.check(request.app.state.settings)
    principal = context(request.scope).principal
    count = cost.rows + cost.compared
    if principal is not None and count > 1 and FREE not in request.scope:
        principal.charge(count - 1, before=1)


def admit_body(request: HTTPConnection, body: Body) -> None:
    """Admits a request by its body."""
    admit(request, COSTS[type(body)](body, request.app.state.settings))
