"""What a request costs. Every body computes its cost (`Body.cost`). `decode` compares it with the limits before any
work, and charges the API key for its rows. The number of tokens of a text is known only when it is tokenised, so a
route that lists tokens of texts then checks the cost again. So does an inference with outputs as wide as the
vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

from wane.service.errors import InvalidRequest, TooLarge
from wane.service.settings import Settings


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


def length_of(sequence: Any) -> int:
    """Returns the number of tokens of an input, or 0 for a text, which is not tokenised yet."""
    return 0 if isinstance(sequence, str) else len(getattr(sequence, "events", sequence))


def within(number: int | None, most: int) -> int:
    """Returns a number of a body, or 0 if it is out of its range. The engine refuses such a number by its name."""
    return number if number is not None and 0 <= number <= most else 0
