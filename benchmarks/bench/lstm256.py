"""The model of several benchmarks: one LSTM layer of 256 units, a vocabulary of 256 words, and random weights. The
weights are scaled so that the network is contractive.

    python -m benchmarks.bench.lstm256 FOLDER

Its predictions are noise. A step costs as much as a step of a trained model with the same architecture. Its certificate
is valid. The seed is fixed, so that all servers of a comparison use the same weights and graphs. Needs the extra
`train`.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from wane.models.architecture import Architecture
from wane.models.constraints.projection import project
from wane.models.export.export import export_bundle
from wane.models.layer_registry import Lstm
from wane.models.manifest import Manifest, Provenance
from wane.models.networks import Network
from wane.models.vocabulary import EOS, UNK

NAME = "lstm256"
SIZE = 256
WINDOW = 64
MAX_WINDOW = 256
CONTRACTION = 0.9
SEED = 0
SAMPLE_TOKENS = 4096

ARCHITECTURE = Architecture(vocabulary_size=SIZE, embedding=SIZE, layers=(Lstm(units=SIZE),), tied=False)


def export(folder: Path) -> Manifest:
    """Writes the bundle `folder`/lstm256 and replaces an existing one. Raises ExportError if a graph does not compute
    the same values as the network."""
    torch.manual_seed(SEED)
    network = Network(ARCHITECTURE).eval().requires_grad_(False)
    project(network, [CONTRACTION])
    weights = {name: tensor.numpy() for name, tensor in network.weights().items()}
    return export_bundle(
        folder / NAME,
        architecture=ARCHITECTURE,
        weights=weights,
        vocabulary_kind="words",
        tokenizer_json=tokenizer(),
        name=NAME,
        version="1",
        description="One LSTM layer of 256 units with random contractive weights, for benchmarks",
        window=WINDOW,
        max_window=MAX_WINDOW,
        quality=None,
        provenance=Provenance(
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            command="python -m benchmarks.bench.lstm256",
            config={"contraction": CONTRACTION},
            seed=SEED,
            steps=0,
            best_step=0,
            git_commit=None,
            data={},
            versions={"torch": torch.__version__, "numpy": np.__version__},
            hardware="none",
            train_wall_s=0.0,
        ),
        sample_tokens=np.random.default_rng(SEED).integers(SIZE, size=SAMPLE_TOKENS).tolist(),
        torch_network=network,
        replace=True,
    )


def tokenizer() -> str:
    """Returns the tokenizer.json of `<eos>`, `<unk>` and 254 words."""
    words = [EOS, UNK, *(f"w{index}" for index in range(2, SIZE))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNK))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(made.to_str())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="parent folder of the bundle")
    export(parser.parse_args().folder)


if __name__ == "__main__":
    main()
