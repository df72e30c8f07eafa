"""Converts a foreign vocabulary (a Hugging Face tokenizer.json or a list of names) to one that Wane serves.

Wane has three kinds of vocabulary (`models/vocabulary.py`). In each kind `<eos>` begins a sequence and encodes a line
break. The foreign token that had this role in training is found by its usual names, or given with --eos. This token is
renamed to `<eos>` and keeps its id. With `--eos none` a sequence starts from the zero state, without a token. If then a
vocabulary of events has none of the usual names of `<eos>`, `<eos>` is added as the last event, because every
vocabulary of Wane has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from wane.models.manifest import Start, VocabularyKind
from wane.models.vocabulary import EOS, SPECIAL_NAMES, UNK, Vocabulary
from wane.training.errors import ForeignError

LINE_BREAK = "\u010a"
"""The character that stands for a line feed in byte-level BPE."""

EOS_NAMES = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<EOS>", "[EOS]", "<|eos|>", "<end>", "[SEP]")
UNKNOWN_NAMES = (UNK, "<UNK>", "[UNK]", "<|unk|>", "<oov>", "<OOV>")
NO_START = "none"
"""The value of --eos for a model that starts from the zero state, without a token before the first event, and of
--ignore-token for a model without padding."""

DataKind = Literal["text", "events"]


@dataclass(frozen=True, slots=True)
class ForeignVocabulary:
    """A vocabulary that Wane serves. `notes`: the assumptions and changes. `start`: "token" if a sequence begins with
    `<eos>`, "zero" if it begins without a token. `added`: the number of tokens, 0 or 1, that were added at the end of
    the vocabulary. `padding`: the ids of padding tokens that a tokenizer.json names."""

    vocabulary: Vocabulary
    tokenizer_json: str
    notes: tuple[str, ...]
    start: Start = "token"
    added: int = 0
    padding: frozenset[int] = frozenset()


def reserve(
    read: ForeignVocabulary, path: Path, ignored: Sequence[str], padding: Collection[int], zero_rows: Sequence[int]
) -> ForeignVocabulary:
    """Reserves the tokens that are never read, listed or drawn, and adds notes: those named `ignored` (the option
    --ignore-token), those with a usual name of such a token, `padding` (the ids that the checkpoint names), and the
    only one of `zero_rows`, the ids of tokens whose row of the embedding is zero, as
    torch.nn.Embedding(padding_idx=...) leaves it. If `ignored` is ["none"], reserves none. Raises ForeignError."""
    vocabulary = read.vocabulary
    ordinary = set(range(vocabulary.size - read.added)) - {vocabulary.eos_id, vocabulary.unk_id}
    why: dict[int, str] = {}
    if list(ignored) != [NO_START]:
        for name in ignored:
            found = next((index for index in ordinary if vocabulary.token(index) == name), None)
            if found is None:
                raise ForeignError(f"{path}: --ignore-token {name}: there is no such token, or it is {EOS} or {UNK}")
            why[found] = "as --ignore-token says"
        for index in sorted(ordinary & vocabulary.reserved):
            why.setdefault(index, "by its name")
        for index in sorted(ordinary & {*padding, *read.padding}):
            why.setdefault(index, "because the file names it as padding")
        for index in zero_rows if len(zero_rows) == 1 else ():
            if index in ordinary:
                why.setdefault(index, "because its row of the embedding is zero, as padding_idx leaves it")
    notes = [f"{vocabulary.token(index)!r} is never read, listed or drawn, {reason}" for index, reason in why.items()]
    if why and not ignored:
        notes.append("--ignore-token none makes these tokens ordinary ones")
    reserved = Vocabulary(vocabulary.kind, read.tokenizer_json, why)
    return replace(read, vocabulary=reserved, notes=(*read.notes, *notes))


def read_tokenizer(path: Path, data: DataKind, eos: str | None) -> ForeignVocabulary:
    """Reads a tokenizer.json: byte-level BPE, or one token per word or event (WordLevel).

    `eos`: the token that begins a sequence, "none" if no token does, None to find the token by its usual names. Raises
    ForeignError if the tokenizer is of another kind or lacks the token.
    """
    record = _json(path, _text(path))
    model = record.get("model") if isinstance(record, dict) else None
    if not isinstance(record, dict) or not isinstance(model, dict) or not isinstance(model.get("vocab"), dict):
        kind = model.get("type") if isinstance(model, dict) else None
        raise ForeignError(f"{path}: " + (_not_served(kind) if kind else "not a tokenizer.json"))
    kind = model.get("type") or ("BPE" if "merges" in model else None)
    lacks_end = False
    names = {**model["vocab"], **{token["content"]: token["id"] for token in record.get("added_tokens") or ()}}
    if kind == "BPE" and '"ByteLevel"' in json.dumps(record.get("pre_tokenizer")):
        own: VocabularyKind = "bpe"
        end, why = _end(path, names, eos, (*EOS_NAMES, LINE_BREAK))
    elif kind == "WordLevel":
        own = "events" if data == "events" else "words"
        if lacks_end := _lacks_end(names, data, eos):
            model["vocab"][EOS] = names[EOS] = len(names)
        end, why = _end(path, names, eos, EOS_NAMES)
    else:
        raise ForeignError(f"{path}: {_not_served(f'{kind}, not byte-level' if kind == 'BPE' else str(kind))}")
    if own == "bpe" and data == "events":
        raise ForeignError(f"{path}: a BPE splits text, but each event needs one token: use --vocabulary NAMES")
    renamed = _renaming(path, names, end, model.get("unk_token"))
    for old, new in renamed.items():
        model["vocab"] = {new if name == old else name: index for name, index in model["vocab"].items()}
        for token in record.get("added_tokens") or ():
            token["content"] = new if token["content"] == old else token["content"]
        if model.get("unk_token") == old:
            model["unk_token"] = new
        if "merges" in model:  # lines are encoded without line breaks, so merges that contain a line break never apply
            merges = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
            model["merges"] = [pair for pair in merges if old not in pair and "".join(pair) != old]
    padding = record.get("padding")
    record |= {"truncation": None, "padding": None, "post_processor": None}
    made = _made(path, own, json.dumps(record, ensure_ascii=False), [*why, *_notes(renamed)], eos, lacks_end)
    named = padding.get("pad_token") if isinstance(padding, dict) else None
    return replace(made, padding=frozenset({names[named]})) if named in names else made


def read_names(path: Path, data: DataKind, eos: str | None) -> ForeignVocabulary:
    """Reads a list of names in id order: JSON (a list, or an object from name to id), or one name per line.

    For text, the names are words, or characters if every name is one character. `eos`: as in `read_tokenizer`. Raises
    ForeignError.
    """
    names = _names(path)
    if lacks_end := _lacks_end(names, data, eos):
        names.append(EOS)
    ordinary = [name for name in names if name not in (*EOS_NAMES, *UNKNOWN_NAMES, *SPECIAL_NAMES, eos)]
    characters = data == "text" and all(len(name) == 1 for name in ordinary)
    table = {name: index for index, name in enumerate(names)}
    end, why = _end(path, table, eos, ("\n", *EOS_NAMES) if characters else EOS_NAMES)
    renamed = _renaming(path, table, end, None)
    table = {renamed.get(name, name): index for name, index in table.items()}
    if characters:
        why = ["every name is one character: text is split into characters", *why]
        return _made(path, "bpe", _characters(table), [*why, *_notes(renamed)], eos)
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=UNK))
    if data == "text":
        if split := [name for name in names if name not in renamed and len(name.split()) != 1]:
            raise ForeignError(f"{path}: {split[0]!r} is not one word, and text is split into words at blanks")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    kind: VocabularyKind = "words" if data == "text" else "events"
    return _made(path, kind, tokenizer.to_str(), [*why, *_notes(renamed)], eos, lacks_end)


def _characters(table: dict[str, int]) -> str:
    """Returns a tokenizer with one token per character. Its tokens are spelled as in byte-level BPE."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelling = {name if len(name) > 1 else spelled.pre_tokenize_str(name)[0][0]: index for name, index in table.items()}
    tokenizer = Tokenizer(models.WordLevel(spelling, unk_token=UNK))
    split = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spelled])
    made: str = tokenizer.to_str()
    return made


def _lacks_end(names: Collection[str], data: DataKind, eos: str | None) -> bool:
    """Whether `<eos>` must be added: the events include none of its usual names, and the model starts from the zero
    state."""
    return eos == NO_START and data == "events" and not any(name in names for name in EOS_NAMES)


def _end(path: Path, names: dict[str, int], eos: str | None, usual: tuple[str, ...]) -> tuple[str, list[str]]:
    """Returns the name of the token that becomes `<eos>`, and notes for the report. The token is the one that --eos
    names, or else the one with the first of the names `usual` that the vocabulary contains. Raises ForeignError if
    there is no such token."""
    if eos is not None and eos != NO_START:
        if eos not in names:
            raise ForeignError(f"{path}: --eos {eos}: there is no such token")
        return eos, []
    for name in usual:
        if name in names:
            if eos == NO_START:
                return name, ["a sequence starts from the zero state: no token is read before its first token"]
            return name, [] if name == EOS else [f"{name!r} is assumed to begin a sequence and to encode a line break"]
    raise ForeignError(
        f"{path}: none of the {len(names)} tokens has a usual name of a token that begins a sequence "
        f"({', '.join(map(repr, usual))}); name it with --eos TOKEN"
        + (", or use --eos none if the model starts from the zero state" if eos is None else "")
    )


def _renaming(path: Path, names: dict[str, int], end: str, unknown: str | None) -> dict[str, str]:
    """Returns a mapping from the tokens' foreign names to Wane's names."""
    renamed = {}
    if end != EOS:
        if EOS in names:
            raise ForeignError(f"{path}: {end!r} should begin a sequence, but another token has the name {EOS}")
        renamed[end] = EOS
    unknown = unknown or next((name for name in UNKNOWN_NAMES if name in names), None)
    if unknown in names and unknown not in (UNK, end) and UNK not in names:
        renamed[unknown] = UNK
    return renamed


def _notes(renamed: dict[str, str]) -> list[str]:
    return [f"the token {old!r} is renamed to {new}" for old, new in renamed.items()]


def _not_served(kind: str) -> str:
    return (
        f"a tokenizer of the kind {kind}; Wane serves byte-level BPE and one token per word or event (WordLevel), "
        "because it must turn tokens back into the text's bytes"
    )


def _made(
    path: Path, kind: VocabularyKind, tokenizer_json: str, notes: list[str], eos: str | None, lacks_end: bool = False
) -> ForeignVocabulary:
    try:
        vocabulary = Vocabulary(kind, tokenizer_json)
    except KeyError as error:
        raise ForeignError(f"{path}: a token holds {error}, which byte-level BPE never writes") from error
    except Exception as error:  # the library `tokenizers` raises a bare Exception
        raise ForeignError(f"{path}: {error}") from error
    if '"BPE"' not in tokenizer_json and all(vocabulary.token(index) != UNK for index in range(vocabulary.size)):
        notes.append(f"there is no token for unknown items ({UNK}): they are refused")
    if lacks_end:
        notes.append(f"no event has a usual name of {EOS}: {EOS} is added as the last event, with probability 0")
    start: Start = "zero" if eos == NO_START else "token"
    return ForeignVocabulary(vocabulary, tokenizer_json, tuple(notes), start, int(lacks_end))


def _names(path: Path) -> list[str]:
    text = _text(path)
    if path.suffix != ".json":
        names: object = text.removesuffix("\n").split("\n")
    else:
        names = _json(path, text)
        if isinstance(names, dict):
            ids = list(names.values())
            if not all(type(index) is int for index in ids) or sorted(ids) != list(range(len(ids))):
                raise ForeignError(
                    f"{path}: the ids of {len(ids)} names must be 0 to {len(ids) - 1}, each exactly once"
                )
            names = sorted(names, key=names.__getitem__)
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ForeignError(f"{path}: expected a list of names, or an object from name to id")
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise ForeignError(f"{path}: the name {twice[0]!r} occurs more than once")
    return names


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ForeignError(f"{path}: not JSON: {error}") from error


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except OSError as error:
        raise ForeignError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ForeignError(f"{path}: not UTF-8 at byte {error.start}") from error
