"""Generates the clicks of a shop with a known structure, and computes the best score that any model can reach on them.

    python examples/clickstream.py shop --sessions 20000

writes shop/clicks.csv (session, time, item) and shop/sessions.jsonl (one list per session). Both hold the same
sessions.

The shop has aisles, whose items have a fixed order, and popular items. The probability of a popular item is
proportional to 1 / rank (Zipf). A session begins with an item of a random aisle. Each later click is a step along the
aisle or a detour:

- A step goes to an item of the session's aisle. With the probability `follow`, this is the item after the session's
  last aisle item. Otherwise it is a random item of the aisle.
- A detour goes to a random popular item. The click after a step is a detour with the probability `leave`. The click
  after a detour is another detour with the probability `stay`.

From its second click on, a session ends after each click with the probability `stop`. With `--memory long`, detours
last 5 clicks on average, and a model must remember the last aisle item through them. With `--memory short`, there are
no detours, so the next click depends on the last click alone. A table of counts of pairs of clicks is then the best
model.

The earlier clicks of a session determine the true probabilities of its next click exactly. A ranking by these
probabilities has the largest possible recall. The perplexity of these probabilities is the smallest possible
perplexity.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

START_S = 1_767_225_600.0
"""2026-01-01T00:00:00Z in seconds since 1970."""
DAYS = 30
MEAN_GAP_S = 40.0
"""The mean time between two successive clicks of a session, in seconds."""
TEST_SHARE = 0.05
"""The optimum is computed for this share of the sessions: those that end last. `wane train` uses these sessions as the
test split."""
ROWS_AT_ONCE = 100_000


@dataclass(frozen=True)
class Shop:
    """The parameters of the clicks. The module's docstring explains them."""

    aisles: int = 40
    items: int = 25
    popular: int = 100
    leave: float = 0.3
    stay: float = 0.8
    follow: float = 0.8
    stop: float = 0.08

    @property
    def names(self) -> list[str]:
        """The name of each item; the index is the item's number. The items of each aisle come first, in the aisle's
        order, then the popular items, most popular first. The names do not reveal the order of an aisle or the
        popularity."""
        shuffled = np.random.default_rng(0).permutation(self.items)
        of_aisles = [f"aisle-{aisle}/{item}" for aisle in range(self.aisles) for item in shuffled]
        return of_aisles + [f"popular/{rank}" for rank in np.random.default_rng(1).permutation(self.popular)]

    @property
    def zipf(self) -> NDArray[np.float64]:
        """The probabilities of the popular items in a detour, descending: float64 (popular,)."""
        weights = 1 / np.arange(1, self.popular + 1)
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares


@dataclass(frozen=True)
class Clicks:
    """The clicks of sessions. The sessions are in the order of their last clicks.

    items: int64 (clicks,), item numbers. times: float64 (clicks,), seconds since 1970. begins: int64 (sessions + 1,),
    the index of each session's first click; the last value is the number of clicks.
    """

    items: NDArray[np.int64]
    times: NDArray[np.float64]
    begins: NDArray[np.int64]

    def last(self, share: float) -> Clicks:
        """Returns the clicks of the last sessions. `share` is their share of all sessions."""
        count = max(1, round((len(self.begins) - 1) * share))
        first = self.begins[-1 - count]
        return Clicks(self.items[first:], self.times[first:], self.begins[-1 - count :] - first)


@dataclass(frozen=True)
class Optimum:
    """The best possible scores on some clicks. `recall` maps k to the share of next clicks that are among the k most
    probable items. `perplexity` is the perplexity per token. A session's tokens are its clicks and its end.
    `perplexity_after_first` leaves out the first click of each session, which a model with `start = "zero"` does not
    predict."""

    recall: dict[int, float]
    perplexity: float
    perplexity_after_first: float


def generate(shop: Shop, sessions: int, seed: int) -> Clicks:
    """Generates random sessions. `seed` is the seed of the random numbers."""
    random = np.random.default_rng(seed)
    lengths = 1 + random.geometric(shop.stop, sessions)
    begins = np.concatenate([[0], np.cumsum(lengths)])
    items = np.empty(begins[-1], np.int64)
    aisle = random.integers(shop.aisles, size=sessions)
    place = random.integers(shop.items, size=sessions)
    detour = np.zeros(sessions, np.bool_)
    cumulative = np.cumsum(shop.zipf)
    items[begins[:-1]] = aisle * shop.items + place
    for click in range(1, int(lengths.max())):
        going = np.flatnonzero(lengths > click)
        detour[going] = random.random(len(going)) < np.where(detour[going], shop.stay, shop.leave)
        away = going[detour[going]]
        ranks = np.searchsorted(cumulative, random.random(len(away)), side="right").clip(max=shop.popular - 1)
        items[begins[away] + click] = shop.aisles * shop.items + ranks
        steps = going[~detour[going]]
        follows = random.random(len(steps)) < shop.follow
        place[steps] = np.where(follows, (place[steps] + 1) % shop.items, random.integers(shop.items, size=len(steps)))
        items[begins[steps] + click] = aisle[steps] * shop.items + place[steps]
    times = np.cumsum(random.exponential(MEAN_GAP_S, len(items)) + 0.01)
    times += np.repeat(START_S + random.random(sessions) * DAYS * 86_400 - times[begins[:-1]], lengths)
    order = np.argsort(times[begins[1:] - 1], kind="stable")
    moved = np.concatenate([[0], np.cumsum(lengths[order])])
    index = np.repeat(begins[:-1][order] - moved[:-1], lengths[order]) + np.arange(len(items))
    return Clicks(items[index], times[index], moved)


def optimum(shop: Shop, clicks: Clicks, cutoffs: Sequence[int] = (1, 5, 10, 20)) -> Optimum:
    """Computes the scores of a model that predicts the true probability of each next click and of each session's end.
    `cutoffs` are the values of k for the recall."""
    count, of_aisles = len(clicks.items), shop.aisles * shop.items
    at = np.arange(count)
    first = np.zeros(count, np.bool_)
    first[clicks.begins[:-1]] = True
    popular = clicks.items >= of_aisles
    # For each click, the index of the latest click on an aisle's item, which may be the click itself. Every session
    # begins with a click on an aisle's item.
    last_step = np.maximum.accumulate(np.where(popular, 0, at))
    before = at[~first] - 1
    target = clicks.items[~first]
    away = np.where(popular[before], shop.stay, shop.leave)
    here = clicks.items[last_step[before]]
    following = np.where(here % shop.items == shop.items - 1, here - shop.items + 1, here + 1)
    anywhere = (1 - away) * (1 - shop.follow) / shop.items
    along = (1 - away) * shop.follow + anywhere
    detour, step = target >= of_aisles, target == following
    zipf = shop.zipf
    detoured = away * zipf[np.where(detour, target - of_aisles, 0)]
    probability = np.where(detour, detoured, np.where(step, along, anywhere))
    more_popular = np.searchsorted(-zipf, -probability / np.maximum(away, 1e-300))
    more_popular = np.where(detour, target - of_aisles, more_popular)
    higher = more_popular + (along > probability) + np.where(anywhere > probability, shop.items - 1, 0)
    # All items of the aisle except the next one have the same probability, so their order in the ranking is random.
    tied = np.where(detour | step, 1, shop.items - 1)
    recall = {k: float(((k - higher) / tied).clip(0, 1).mean()) for k in cutoffs}
    sessions = len(clicks.begins) - 1
    # A session cannot end after its first click. After each later click it ends with the probability `stop`.
    lengths = np.diff(clicks.begins)
    ends = sessions * math.log(shop.stop) + float((lengths - 2).sum()) * math.log1p(-shop.stop)
    clicked = float(np.log(probability).sum())
    after_first = clicked + ends
    whole = after_first - sessions * math.log(of_aisles)
    return Optimum(recall, math.exp(-whole / (count + sessions)), math.exp(-after_first / count))


def write(shop: Shop, clicks: Clicks, folder: Path) -> None:
    """Writes clicks.csv, whose rows are in the order of time, and sessions.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    names = shop.names
    owner = np.repeat(np.arange(len(clicks.begins) - 1), np.diff(clicks.begins))
    order = np.argsort(clicks.times, kind="stable")
    with (folder / "clicks.csv").open("w", encoding="utf-8") as file:
        file.write("session,time,item\n")
        for start in range(0, len(order), ROWS_AT_ONCE):
            some = order[start : start + ROWS_AT_ONCE]
            columns = zip(owner[some].tolist(), clicks.times[some].tolist(), clicks.items[some].tolist(), strict=True)
            file.writelines(f"s{session},{time:.3f},{names[item]}\n" for session, time, item in columns)
    with (folder / "sessions.jsonl").open("w", encoding="utf-8") as file:
        for begin, end in zip(clicks.begins[:-1].tolist(), clicks.begins[1:].tolist(), strict=True):
            file.write(json.dumps([names[item] for item in clicks.items[begin:end].tolist()]) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the clicks, and prints the best possible scores."""
    parser = argparse.ArgumentParser(description="Generates the clicks of a shop with a known best score.")
    parser.add_argument("folder", type=Path, help="folder for clicks.csv and sessions.jsonl")
    parser.add_argument("--sessions", type=int, default=20_000, help="number of sessions (default: %(default)s)")
    parser.add_argument("--aisles", type=int, default=Shop.aisles, help="number of aisles (default: %(default)s)")
    parser.add_argument(
        "--items", type=int, default=Shop.items, help="number of items of each aisle (default: %(default)s)"
    )
    parser.add_argument(
        "--popular", type=int, default=Shop.popular, help="number of popular items (default: %(default)s)"
    )
    parser.add_argument("--memory", choices=("long", "short"), default="long", help="short: no detours")
    parser.add_argument("--seed", type=int, default=1, help="seed of the random numbers (default: %(default)s)")
    options = parser.parse_args(arguments)
    leave = Shop.leave if options.memory == "long" else 0.0
    shop = Shop(options.aisles, options.items, options.popular, leave)
    clicks = generate(shop, options.sessions, options.seed)
    write(shop, clicks, options.folder)
    best = optimum(shop, clicks.last(TEST_SHARE))
    print(f"{len(clicks.items):,} clicks, {options.sessions:,} sessions, {len(shop.names):,} items: {options.folder}")
    print(
        f"best possible on the last {TEST_SHARE:.0%} of the sessions: "
        + ", ".join(f"recall@{k} {value:.3f}" for k, value in best.recall.items())
        + f", perplexity {best.perplexity:.2f} ({best.perplexity_after_first:.2f} without each session's first click)"
    )


if __name__ == "__main__":
    main()
