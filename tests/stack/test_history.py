from __future__ import annotations

import math
import random

import pytest

from tests.stack.harness.history import Append, Outcome, faults

ACKNOWLEDGED, UNKNOWN, REFUSED = Outcome


def steps(*tokens: int, outcome: Outcome = ACKNOWLEDGED) -> list[Append]:
    """Returns appends of one token each, with the given outcome. Each append begins at the position at which the
    previous one ends."""
    return [append(token, place, outcome, 2 * place) for place, token in enumerate(tokens)]


def append(token: int, start: int | None, outcome: Outcome = ACKNOWLEDGED, invoked_s: float = 0) -> Append:
    """Returns an append of one token. The append is answered after a second, unless its outcome is unknown."""
    return Append((token,), outcome, start, invoked_s, math.inf if outcome is UNKNOWN else invoked_s + 1)


def kinds(history: list[Append], *final: int) -> list[str]:
    return [fault.kind for fault in faults(history, final)]


def test_acknowledged_tokens_in_order_are_no_fault() -> None:
    assert not faults(steps(7, 8, 9), [7, 8, 9])
    assert not faults([], [])
    assert not faults(
        [Append((1, 2, 3), ACKNOWLEDGED, 0, 0, 1), Append((1, 2), ACKNOWLEDGED, 3, 2, 3)], [1, 2, 3, 1, 2]
    )


@pytest.mark.parametrize("final", [(7, 8), (7, 9), (7, 8, 5), ()], ids=str)
def test_a_missing_acknowledged_token_is_lost(final: tuple[int, ...]) -> None:
    assert "lost" in kinds(steps(7, 8, 9), *final)


def test_a_missing_part_of_an_acknowledged_append_is_lost() -> None:
    (fault,) = faults([Append((7, 8, 9), ACKNOWLEDGED, 0, 0, 1)], [7, 8])
    assert str(fault) == "lost at 0: [7, 8, 9] was acknowledged, but the session has [7, 8]"


def test_two_acknowledged_appends_at_one_position_are_one_loss() -> None:
    assert kinds([append(7, 0), append(7, 0, invoked_s=2)], 7) == ["lost"]


@pytest.mark.parametrize("again", [0, 1, 2])
def test_a_duplicated_token_is_found_anywhere(again: int) -> None:
    tokens = [7, 8, 9]
    final = [*tokens[: again + 1], *tokens[again:]]
    shifted = [append(token, place + (place > again), invoked_s=2 * place) for place, token in enumerate(tokens)]
    assert kinds(shifted, *final) == ["duplicated"]
    assert kinds(steps(*tokens), *final) in (["lost"] * (2 - again), ["duplicated"])


def test_an_append_of_unknown_outcome_may_be_applied_at_most_once() -> None:
    history = [append(7, 0), append(8, 1, UNKNOWN, 2), append(8, None, UNKNOWN, 4)]
    assert not faults(history, [7])
    assert not faults(history, [7, 8])
    assert not faults(history, [7, 8, 8])
    assert kinds(history, 7, 8, 8, 8) == ["duplicated"]


def test_an_append_of_unknown_outcome_with_a_position_is_at_that_position_or_nowhere() -> None:
    history = [append(7, 0), append(8, 1, UNKNOWN, 2), append(9, 1, invoked_s=4)]
    assert not faults(history, [7, 9])
    assert kinds(history, 7, 9, 8) == ["reordered"]


def test_an_append_of_unknown_outcome_may_be_applied_late_but_not_early() -> None:
    early = [append(8, None, UNKNOWN), append(7, 0, invoked_s=2), append(9, 1, invoked_s=4)]
    assert not faults(early, [7, 9, 8])
    late = [append(7, 1, invoked_s=0), append(8, None, UNKNOWN, 2)]
    assert kinds(late, 8, 7) == ["reordered"]


def test_acknowledged_appends_must_be_in_the_order_of_their_times() -> None:
    assert kinds([append(7, 1, invoked_s=0), append(8, 0, invoked_s=2)], 8, 7) == ["reordered"]
    beside = [Append((7,), ACKNOWLEDGED, 1, 0, 5), Append((8,), ACKNOWLEDGED, 0, 1, 2)]
    assert not faults(beside, [8, 7])


def test_a_token_that_no_client_appended_is_strange() -> None:
    assert kinds(steps(7), 7, 5) == ["strange"]
    assert kinds([append(7, 1)], 5, 7) == ["strange"]


def test_a_rejected_append_is_not_applied() -> None:
    history = [append(7, 0), append(8, 1, REFUSED, 2)]
    assert not faults(history, [7])
    assert kinds(history, 7, 8) == ["refused"]


def test_an_append_of_unknown_outcome_does_not_hide_a_loss() -> None:
    history = [Append((7, 8), UNKNOWN, None, 0), append(8, 1, invoked_s=1)]
    assert kinds(history, 7, 8) == ["reordered"]


def test_the_search_finds_the_only_order_that_explains_the_tokens() -> None:
    unknown = [Append((1,), UNKNOWN, None, 0), Append((1, 2), UNKNOWN, None, 0), Append((2, 1), UNKNOWN, None, 0)]
    assert not faults(unknown, [1, 2, 1])
    assert not faults(unknown, [1, 2, 1, 1, 2])
    assert not faults(unknown, [1, 2, 2, 1, 1])
    assert kinds(unknown, 1, 1, 1, 1) == ["duplicated"]


@pytest.mark.parametrize("seed", range(20))
def test_a_random_valid_history_has_no_fault_and_a_changed_token_is_a_fault(seed: int) -> None:
    random_ = random.Random(seed)
    history: list[Append] = []
    final: list[int] = []
    for number in range(60):
        tokens = tuple(1000 * number + k for k in range(random_.randint(1, 3)))
        fate = random_.random()
        if fate < 0.7:
            history.append(Append(tokens, ACKNOWLEDGED, len(final), 2 * number, 2 * number + 1))
            final += tokens
        elif fate < 0.8:
            history.append(Append(tokens, REFUSED, len(final), 2 * number, 2 * number + 1))
        else:
            history.append(Append(tokens, UNKNOWN, len(final), 2 * number))
            final += tokens if fate < 0.9 else ()
    assert not faults(history, final)
    acknowledged = {append.start for append in history if append.outcome is ACKNOWLEDGED}
    place = random_.choice(sorted(start for start in acknowledged if start is not None))
    assert faults(history, [*final[:place], *final[place + 1 :]])
    assert faults(history, [*final[:place], final[place], *final[place:]])
    swapped = [*final]
    swapped[place], swapped[place - 1] = swapped[place - 1], swapped[place]
    assert faults(history, swapped)
