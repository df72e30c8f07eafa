"""Trains a typical language model, a torch.nn.LSTM, on a text file with plain PyTorch code and without Wane.

    python examples/outside_lstm.py LICENSE outside/
    wane audit outside/model.pt --data LICENSE --tokenizer outside/tokenizer.json --export bundles/

The script writes `model.pt`, a dictionary that contains the state_dict, and `tokenizer.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=layers, dropout=0.2, batch_first=True)
        self.fc = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor, state: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, object]:
        x, state = self.lstm(self.dropout(self.embedding(tokens)), state)
        return self.fc(self.dropout(x)), state


def train_tokenizer(lines: list[str], size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=48)
    options = parser.parse_args()

    torch.manual_seed(0)
    lines = options.text.read_text(encoding="utf-8").splitlines()
    tokenizer = train_tokenizer(lines, options.vocabulary)
    end = tokenizer.token_to_id("<|endoftext|>")
    stream = torch.tensor([end, *(token for line in lines for token in [*tokenizer.encode(line).ids, end])])

    model = LanguageModel(tokenizer.get_vocab_size(), options.width, options.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    for step in range(1, options.steps + 1):
        starts = torch.randint(0, len(stream) - options.length, (options.batch,))
        window = stream[starts[:, None] + torch.arange(options.length + 1)]
        logits, _ = model(window[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    options.out.mkdir(parents=True, exist_ok=True)
    torch.save({"model": model.state_dict(), "step": options.steps}, options.out / "model.pt")
    tokenizer.save(str(options.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
