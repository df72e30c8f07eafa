"""The requests and answers of OpenAI's text completions. As in OpenAI's API, a null field has its default value."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic requires this TypedDict before Python 3.12

from wane.service.api.schemas.common import (
    HISTORY,
    Body,
    IncludeUnknown,
    Integer,
    Name,
    Natural,
    Positive,
    SessionId,
    Stop,
    absent,
    at_most,
    keywords,
)
from wane.service.api.schemas.generate import LogitBias, Penalty
from wane.service.types.common import says
from wane.service.types.request import MAX_STOPS

MAX_TOKENS = 16
"""The default of `max_tokens`."""

Prompt = Annotated[
    str | tuple[str | int | tuple[int, ...], ...],
    says("a text, a list of token ids, or a list of several of these; texts are tokenised without special tokens"),
]
TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {
    "anyOf": [
        TEXT,
        IDS,
        {"type": "array", "items": TEXT, "minItems": 1},
        {"type": "array", "items": IDS, "minItems": 1},
    ]
}


class StreamOptions(Body, kw_only=True):
    """Options of a streamed answer."""

    include_usage: Annotated[
        bool | None, says("true: the stream ends with a chunk that has the usage and no choices")
    ] = None


def given(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": [name], "properties": {name: schema}}


class CompletionBody(Body, kw_only=True):
    """Complete one or many prompts."""

    examples = (
        {"model": "gated-stable-64", "prompt": HISTORY, "max_tokens": 8, "temperature": 0},
        {"model": "gated-stable-64", "prompt": [HISTORY, "In 1990"], "n": 2, "max_tokens": 4, "seed": 7, "stop": ["."]},
        {"model": "gated-stable-64", "prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1},
    )

    rules: ClassVar = (
        {"anyOf": [{"properties": {"max_tokens": {"not": {"const": 0}}}}, given("echo", {"const": True})]},
        {"anyOf": [absent("stream_options"), given("stream", {"const": True})]},
        {"anyOf": [absent("expected_position"), given("session", {"type": "string"})]},
        {
            "anyOf": [
                absent("session"),
                {
                    "properties": {
                        "n": {"enum": [None, 1]},
                        "echo": {"enum": [None, False]},
                        "prompt": {"anyOf": [{"type": "string"}, {"maxItems": 1}, {"items": {"type": "integer"}}]},
                    }
                },
            ]
        },
    )

    overrides: ClassVar = {"prompt": PROMPT}

    model: Annotated[Name, says("a model's name from /v1/models")]
    prompt: Prompt
    max_tokens: Annotated[
        Annotated[Natural, at_most("max_generated_tokens")] | None,
        says(f"the largest number of tokens to generate; default: {MAX_TOKENS}; 0 only with `echo`"),
    ] = None
    temperature: Annotated[Annotated[float, keywords(minimum=0)] | None, says("default: 1")] = None
    top_p: Annotated[Annotated[float, keywords(exclusiveMinimum=0, maximum=1)] | None, says("default: 1")] = None
    n: Annotated[
        Annotated[Positive, at_most("max_batch_inputs")] | None,
        says("the number of samples of each prompt; default: 1"),
    ] = None
    stream: Annotated[bool | None, says("true: answer with server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, says("only with `stream`")] = None
    logprobs: Annotated[
        Annotated[Natural, at_most("top_k_limit")] | None,
        says(
            "the number of most probable tokens that the answer lists for each token of a choice; the token "
            "itself is always listed, too"
        ),
    ] = None
    echo: Annotated[bool | None, says("true: the text of each choice begins with the prompt")] = None
    stop: Annotated[
        Annotated[Stop | tuple[Stop, ...], at_most(MAX_STOPS)] | None,
        says("the text ends before the first of these strings"),
    ] = None
    seed: Annotated[Integer | None, says("requests with the same seed generate the same samples")] = None
    presence_penalty: Annotated[Penalty | None, says("default: 0")] = None
    frequency_penalty: Annotated[Penalty | None, says("default: 0")] = None
    logit_bias: LogitBias | None = None
    user: Annotated[str | None, says("ignored")] = None
    suffix: Annotated[Annotated[str, keywords(maxLength=0)] | None, says("not supported: absent or empty")] = None
    best_of: Annotated[Positive | None, says("not supported: absent, 1, or the value of `n`")] = None
    include_unknown: IncludeUnknown | None = None
    session: Annotated[
        SessionId | None,
        says(
            "not part of OpenAI's API: appends the prompt to this session, and completes the whole session. "
            "The completion is not appended. The request must also have `expected_position` or the header "
            "`Idempotency-Key`"
        ),
    ] = None
    expected_position: Annotated[
        Natural | None,
        says(
            "only with `session`: the session's position before the prompt; 0 creates the session if it does not exist"
        ),
    ] = None


class LogprobsDocument(TypedDict):
    """The tokens of a choice, with their log-probabilities at temperature 1, before bias and penalties.

    A token that alone is not valid UTF-8 is written as its bytes: `bytes:\\xe2\\x80`. `text_offset` is the position of
    each token in the text, in characters. The values of `token_logprobs` and `top_logprobs` are null for the first
    token of a prompt if the model reads no start token before it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class ChoiceDocument(TypedDict):
    """One sample of one prompt. In a stream, a part of the sample."""

    index: int
    text: str
    logprobs: LogprobsDocument | None
    finish_reason: Literal["stop", "length"] | None


class UsageDocument(TypedDict):
    """The numbers of tokens of all prompts and all samples. `prompt_tokens_details` has `cached_tokens`, the number of
    the prompts' tokens that did not run."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[Literal["cached_tokens"], int]


class CompletionDocument(TypedDict):
    """The answer to a completion request. The choices are ordered by prompt, then by sample. `session`, `position`,
    `replayed` and `error_bound` are present only if the request has a session. `unknown` has the names of the prompts'
    events that the vocabulary lacks, and is present only if there are any."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChoiceDocument]
    usage: UsageDocument
    session: NotRequired[str]
    position: NotRequired[int]
    replayed: NotRequired[bool]
    error_bound: NotRequired[float | None]
    unknown: NotRequired[list[str]]


class ErrorFacts(TypedDict):
    """A failure in OpenAI's format. `code` is OpenAI's code for the failure, or the problem document's code if OpenAI
    has none."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorDocument(TypedDict):
    """The answer to a failed request, in OpenAI's format."""

    error: ErrorFacts
