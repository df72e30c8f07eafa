"""The requests and answers of OpenAI's text completions. As in OpenAI's API, a null field has its default value."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypedDict

from msgspec import UNSET, UnsetType

from wane.service.settings import Settings
from wane.service.types.body import (
    HISTORY,
    Body,
    IncludeUnknown,
    Integer,
    Name,
    Natural,
    Positive,
    SessionId,
    absent,
    at_most,
    keywords,
)
from wane.service.types.common import Result, says
from wane.service.types.cost import Cost, length_of, within
from wane.service.types.generate import MAX_STOPS, LogitBias, Penalty, Stop

MAX_TOKENS = 16
"""The default of `max_tokens`."""

Prompt = str | tuple[str | int | tuple[int, ...], ...]
TEXT = {"type": "string", "minLength": 1}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT = {
    "description": "a text, a list of token ids, or a list of several of these; texts are tokenised without special "
    "tokens",
    "anyOf": [
        TEXT,
        IDS,
        {"type": "array", "items": TEXT, "minItems": 1},
        {"type": "array", "items": IDS, "minItems": 1},
    ],
}


class StreamOptions(Body, kw_only=True):
    """Options of a streamed answer."""

    include_usage: bool | None = None
    """true: the stream ends with a chunk that has the usage and no choices"""


def with_value(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"required": [name], "properties": {name: schema}}


class CompletionBody(Body, kw_only=True):
    """Complete one or many prompts."""

    examples = (
        {"model": "gated-stable-64", "prompt": HISTORY, "max_tokens": 8, "temperature": 0},
        {"model": "gated-stable-64", "prompt": [HISTORY, "In 1990"], "n": 2, "max_tokens": 4, "seed": 7, "stop": ["."]},
        {"model": "gated-stable-64", "prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1},
    )

    rules: ClassVar = (
        {"anyOf": [{"properties": {"max_tokens": {"not": {"const": 0}}}}, with_value("echo", {"const": True})]},
        {"anyOf": [absent("stream_options"), with_value("stream", {"const": True})]},
        {"anyOf": [absent("expected_position"), with_value("session", {"type": "string"})]},
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
    n: Annotated[Positive, at_most("max_batch_inputs")] | None = None
    """the number of samples of each prompt; default: 1"""
    stream: Annotated[bool | None, says("true: answer with server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, says("only with `stream`")] = None
    logprobs: Annotated[Natural, at_most("top_k_limit")] | None = None
    """the number of most probable tokens that the answer lists for each token of a choice; the token itself is always
    listed, too"""
    echo: Annotated[bool | None, says("true: the text of each choice begins with the prompt")] = None
    stop: Annotated[Stop | tuple[Stop, ...], at_most(MAX_STOPS)] | None = None
    """the text ends before the first of these strings"""
    seed: Annotated[Integer | None, says("requests with the same seed generate the same samples")] = None
    presence_penalty: Annotated[Penalty | None, says("default: 0")] = None
    frequency_penalty: Annotated[Penalty | None, says("default: 0")] = None
    logit_bias: LogitBias | None = None
    user: Annotated[str | None, says("ignored")] = None
    suffix: Annotated[Annotated[str, keywords(maxLength=0)] | None, says("not supported: absent or empty")] = None
    best_of: Annotated[Positive | None, says("not supported: absent, 1, or the value of `n`")] = None
    include_unknown: IncludeUnknown | None = None
    session: SessionId | None = None
    """not part of OpenAI's API: appends the prompt to this session, and completes the whole session. The completion is
    not appended. The request must also have `expected_position` or the header `Idempotency-Key`"""
    expected_position: Natural | None = None
    """only with `session`: the session's position before the prompt; 0 creates the session if it does not exist"""

    @property
    def create(self) -> bool:
        """Whether the prompt's step may create the session."""
        return self.expected_position == 0

    def cost(self, settings: Settings, tokens: int | None = None) -> Cost:
        """`tokens` is the number of tokens of all prompts, or None before texts are tokenised."""
        prompt = self.prompt
        prompts = 1 if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else len(prompt)
        samples = 1 if self.n is None else self.n
        if tokens is None:
            tokens = length_of(prompt) if prompts == 1 else sum(map(length_of, prompt))
        made = within(MAX_TOKENS if self.max_tokens is None else self.max_tokens, settings.max_generated_tokens)
        each = max(1, within(self.logprobs, settings.top_k_limit))
        echoed = tokens * samples * each if self.echo else 0
        listed = 0 if self.stream or self.logprobs is None else prompts * samples * made * each
        field = "prompt" if prompts > settings.max_batch_inputs else "n"
        return Cost(prompts * samples, tokens * samples, echoed + listed, field, "n, max_tokens or logprobs")


class LogprobsDocument(Result):
    """The tokens of a choice, with their log-probabilities at temperature 1, before bias and penalties."""

    tokens: Annotated[
        list[str],
        says("the tokens' texts; a token that alone is not valid UTF-8 is written as its bytes: `bytes:\\xe2\\x80`"),
    ]
    token_logprobs: list[float | None]
    """the tokens' log-probabilities; null for the first token of a prompt without a start token"""
    top_logprobs: list[dict[str, float] | None]
    """the most probable tokens at each position, with their log-probabilities; null where there is none"""
    text_offset: Annotated[list[int], says("the position of each token in the text, in characters")]


class ChoiceDocument(Result):
    """One sample of one prompt. In a stream, a part of the sample."""

    index: Annotated[int, says("the choice's place among those of all prompts: by prompt, then by sample")]
    text: Annotated[str, says("the generated text, after the prompt if `echo` is true")]
    logprobs: Annotated[LogprobsDocument | None, says("only with `logprobs`: the log-probabilities of the tokens")]
    finish_reason: Literal["stop", "length"] | None
    """stop: a stop string, or the end of an event sequence; length: the limit `max_tokens`"""


class UsageDocument(Result):
    """The numbers of tokens of all prompts and all samples. `prompt_tokens_details` has `cached_tokens`, the number of
    the prompts' tokens that did not run."""

    prompt_tokens: Annotated[int, says("the number of tokens of all prompts")]
    completion_tokens: Annotated[int, says("the number of generated tokens")]
    total_tokens: Annotated[int, says("the sum of the two")]
    prompt_tokens_details: dict[Literal["cached_tokens"], int]
    """`cached_tokens`: the number of the prompts' tokens that did not run"""


class CompletionDocument(Result):
    """The answer to a completion request."""

    id: Annotated[str, says("the answer's id")]
    object: Annotated[Literal["text_completion"], says("always text_completion, as in OpenAI's API")]
    created: Annotated[int, says("when the request was answered, in seconds since 1970")]
    model: Annotated[str, says("the model's name")]
    system_fingerprint: str
    """a digest of the model's version and files, the server's version and the device"""
    choices: Annotated[list[ChoiceDocument], says("the samples, ordered by prompt, then by sample")]
    usage: UsageDocument | UnsetType | None = UNSET
    """the numbers of tokens. In a stream, only with `include_usage`, and null in all chunks but the last"""
    unknown: list[str] | None = None
    """only if there are any: the names of the prompts' events that the vocabulary lacks"""
    session: Annotated[str | None, says("only with `session`: the session's id")] = None
    position: Annotated[int | None, says("only with `session`: the number of its tokens")] = None
    replayed: bool | None = None
    """only with `session`. true: the request is a retry, and its prompt was not appended again"""
    error_bound: float | UnsetType | None = UNSET
    """only with `session`: the error bound of the answer, as in /v1/generate"""


class ErrorFacts(TypedDict):
    """A failure in OpenAI's format."""

    message: Annotated[str, says("what is wrong")]
    type: Annotated[str, says("OpenAI's kind of the failure")]
    param: Annotated[str | None, says("the field that is wrong; null: no single field is")]
    code: Annotated[str, says("OpenAI's code for the failure, or the problem document's code if OpenAI has none")]


class ErrorDocument(TypedDict):
    """The answer to a failed request, in OpenAI's format."""

    error: Annotated[ErrorFacts, says("the failure")]
