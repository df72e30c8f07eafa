"""The F1 of labelled spans, by the rules of the CoNLL-2000 task (`conlleval`): a predicted span is right if its type,
its first word and its last word are right."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[str, int, int]
"""The type, the first position, and the position after the last."""


def spans(tags: Sequence[str]) -> set[Span]:
    """Returns the spans of a sentence. A span begins at a tag `B-type`, or at a tag `I-type` that does not continue a
    span of this type. It ends before the next tag that is not `I-type`."""
    found: set[Span] = set()
    kind, first = "", 0
    for position, tag in enumerate([*tags, "O"]):
        prefix, _, of = tag.partition("-")
        if kind and not (prefix == "I" and of == kind):
            found.add((kind, first, position))
            kind = ""
        if prefix in ("B", "I") and not kind:
            kind, first = of, position
    return found


def span_f1(predicted: Sequence[Sequence[str]], expected: Sequence[Sequence[str]]) -> float:
    """Returns the F1 of all sentences' spans, between 0 and 1. It is 0 if no span is right."""
    pairs = [(spans(one), spans(other)) for one, other in zip(predicted, expected, strict=True)]
    right = sum(len(one & other) for one, other in pairs)
    total = sum(len(one) + len(other) for one, other in pairs)
    return 2 * right / total if total else 0.0
