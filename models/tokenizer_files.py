"""A bundle's tokenizer files in the form that Hugging Face's libraries read.

`tokenizer.json` names the tokenizer's decoder. Without a decoder, these libraries decode byte-level tokens as
`TheĠhistory`. `tokenizer_config.json` names the tokenizer's class and its special tokens.
"""

from __future__ import annotations

import json

from wane.models.manifest import VocabularyKind
from wane.models.vocabulary import EOS, UNK, Vocabulary

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


def with_decoder(kind: VocabularyKind, tokenizer_json: str) -> str:
    """Returns `tokenizer_json`. If the vocabulary is byte-level BPE and the JSON names no decoder, the byte-level
    decoder is added."""
    if kind != "bpe":
        return tokenizer_json
    record = json.loads(tokenizer_json)
    if not isinstance(record, dict) or record.get("decoder") is not None:
        return tokenizer_json
    record["decoder"] = BYTE_LEVEL
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"))


def tokenizer_config(vocabulary: Vocabulary) -> str:
    """Returns the content of `tokenizer_config.json`."""
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.has_unknown:
        config["unk_token"] = UNK
    return json.dumps(config, indent=2) + "\n"
