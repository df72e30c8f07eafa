"""What a task of the paper's experiments consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from research.paper.corpora import Corpus
from research.paper.network import Cell
from research.paper.training import Recipe, Run

CELLS: tuple[Cell, ...] = ("rnn_tanh", "lstm")


@dataclass(frozen=True)
class Task:
    """One task.

    folder: the folder of its data. read: reads the data from this folder; with False as its second argument, it accepts
    other files of the same format. measure: the name of the task's figure, with the unit. figure: computes it from a
    loss in nats a position, or from the record of a split for F1. recipe: how its networks are trained on a processor.
    full: the same with the source's sizes, for a GPU; None if they are the same. seeds: the number of seeds. windows:
    the windows of truncated training. control: whether a network without memory is trained, which reads one input.
    source: the figure that Miller and Hardt report, by cell and whether the network is stable. A figure that was not
    verified in their text is marked as recalled. differs: what differs from the source.
    """

    name: str
    title: str
    folder: str
    read: Callable[[Path, bool], Corpus]
    measure: str
    figure: Callable[[Mapping[str, Any]], float]
    recipe: Recipe
    seeds: int
    windows: tuple[int, ...]
    source: dict[tuple[Cell, bool], str]
    differs: str
    bidirectional: bool = False
    control: bool = False
    full: Recipe | None = None

    def runs(self) -> list[Run]:
        """Returns all runs, seed by seed."""
        found = []
        for seed in range(1, self.seeds + 1):
            found += [
                Run(self.name, cell, stable, window, bidirectional, seed)
                for bidirectional in ((False, True) if self.bidirectional else (False,))
                for cell in CELLS
                for stable in (False, True)
                for window in (None, *self.windows)
            ]
            if self.control:
                found.append(Run(self.name, "rnn_tanh", False, 1, False, seed))
        return found

    def small(self) -> Task:
        """Returns the task with two epochs of a tiny network and one seed, for generated data."""
        shapes = {
            cell: replace(shape, embedding=4, hidden=6, cutoffs=(4,) if shape.cutoffs else ())
            for cell, shape in self.recipe.shapes.items()
        }
        recipe = replace(self.recipe, shapes=shapes, batch=2, epochs=2, chunk=4)
        return replace(self, recipe=recipe, seeds=1, windows=tuple(min(k, 4) for k in self.windows[:1]))
