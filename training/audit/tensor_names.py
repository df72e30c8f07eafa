"""The usual names of a language model's tensors, and the --map option for other names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from wane.training.errors import ForeignError

PARTS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
"""The names of a recurrent layer's tensors."""

PART = re.compile(
    rf"^(?P<prefix>|.*[._])(?P<part>{'|'.join(PARTS)}|weight_hr)(?:_l(?P<layer>\d+))?(?P<reverse>_reverse)?(?P<raw>_raw)?$"
)
"""Matches the tensor names of a torch.nn.RNN, GRU or LSTM layer, such as `rnn.weight_ih_l0`, and of torch's cells, such
as `cell.weight_ih`. `rnn.weight_hh_l0_raw` is the name that awd-lstm gives to a matrix before its dropout."""

PUBLISHED = re.compile(
    r"^(?:(?P<module>.*)\.)?(?P<part>to_hidden_and_gate(?=\.weight$)|linear_z(?=\.weight$)|nu_log$)(\.weight)?$"
)
"""Matches one tensor of each minGRU and LRU layer in the layouts of `published_layers.py`."""

OUTER = ("embedding", "embedding.bias", "projection", "projection.bias", "head", "head.bias")
"""The names that --map gives to the tensors before and after the layers."""

EMBEDDINGS = frozenset(
    {"encoder", "lookup", "lut", "wte", "e"}
    | {"emb", "embed", "embedder", "embedding", "embeddings", "embed_tokens", "input_embedding"}
    | {"tok_emb", "tok_embeddings", "token_embedding", "token_embeddings", "word_embedding", "word_embeddings"}
)
HEADS = frozenset(
    {"decoder", "head", "lm_head", "fc", "fc_out", "out", "output", "output_layer", "linear", "dense", "classifier"}
    | {"proj", "projection", "out_proj", "output_projection", "logits", "to_logits", "h2o", "wy"}
)


def parse_mapping(options: Sequence[str]) -> dict[str, str]:
    """Parses `["head=out.weight", ...]` to a dictionary from Wane's names to the file's names. Raises ForeignError."""
    mapping = {}
    for option in options:
        ours, equals, theirs = option.partition("=")
        if not equals or not theirs or not (ours in OUTER or re.fullmatch(r"layers\.\d{1,4}(\.\w+)?", ours)):
            raise ForeignError(
                f"--map {option}: expected NAME=THEIRS. THEIRS is a name in the file. NAME is one of "
                f"{', '.join(OUTER)}, layers.N (a module) and layers.N.PART. PART is one of {', '.join(PARTS)}"
            )
        if ours.count(".") == 2 and ours.split(".")[2] not in PARTS:
            raise ForeignError(f"--map {option}: a layer has no {ours.split('.')[2]}, only {', '.join(PARTS)}")
        mapping[ours] = theirs
    return mapping


def kind(name: str) -> frozenset[str] | None:
    """Returns EMBEDDINGS or HEADS, whichever contains the last known word of the name, or None if no word is known.
    `decoder.embedding.weight` is therefore an embedding."""
    for part in reversed(name.lower().split(".")):
        word = part.rstrip("0123456789").rstrip("_")
        for usual in (EMBEDDINGS, HEADS):
            if word in usual:
                return usual
    return None
