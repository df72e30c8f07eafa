"""Vocabularies convert text or event names to token ids and back. They read Hugging Face `tokenizers` files.

Three kinds share one interface:

- `bpe`: byte-level BPE over text. A line break is the token `<eos>`.
- `words`: one token per whitespace-separated word. A line break is `<eos>`.
- `events`: one token per event name. Text has one name per line, so names may contain spaces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from wane.models.manifest import VocabularyKind

EOS = "<eos>"
UNK = "<unk>"

SPECIAL_NAMES = frozenset(
    {"<pad>", "<PAD>", "[PAD]", "<|pad|>", "<mask>", "<MASK>", "[MASK]", "<|mask|>", "[CLS]", "[SEP]"}
    | {"<s>", "<bos>", "<BOS>", "[BOS]", "<sos>", "<SOS>"}
)
"""Usual names of tokens that stand for no word and no event. A vocabulary reserves them by default."""

LINES_AT_ONCE = 1024  # the number of lines that are encoded at once; other threads can run between two such batches


def _bytes_of_characters() -> dict[str, int]:
    """Returns the byte of each character of a byte-level BPE token (GPT-2's table)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def _check_characters(text: str) -> None:
    """Raises ValueError if the text contains half of a surrogate pair. JSON can represent such a character, but UTF-8
    and the library `tokenizers` cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half of a surrogate pair") from error


class TooManyTokens(Exception):
    """Raised if a text has more tokens than allowed. `count` is a lower bound of the number of its tokens."""

    def __init__(self, count: int) -> None:
        super().__init__(f"the text has at least {count} tokens")
        self.count = count


class Vocabulary:
    """Converts text or event names to token ids and back. The object is immutable, so threads can share it.

    `texts`: the results of `token`, by id. `partials`: the bytes of each token that alone is not valid UTF-8, by id;
    None for any other token. `reserved`: the ids of tokens that stand for no word and no event, such as padding and
    masks. They are never read, listed or drawn. `has_special`: whether a token has a name in SPECIAL_NAMES.
    """

    def __init__(self, kind: VocabularyKind, tokenizer_json: str, reserved: Iterable[int] | None = None) -> None:
        """`reserved` None reserves the tokens with a name in SPECIAL_NAMES. Raises ValueError."""
        self.kind = kind
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self.size: int = self._tokenizer.get_vocab_size()
        self.sha256 = hashlib.sha256(tokenizer_json.encode()).hexdigest()
        eos_id = self._tokenizer.token_to_id(EOS)
        if eos_id is None:
            raise ValueError(f"the vocabulary has no {EOS} token")
        self.eos_id: int = eos_id
        names: list[str] = []
        for index in range(self.size):
            name = self._tokenizer.id_to_token(index)
            if name is None:
                raise ValueError(f"the vocabulary has no token with id {index}")
            names.append(name)
        table = _bytes_of_characters()
        self._bytes: list[bytes] = [
            bytes(table[character] for character in name) if kind == "bpe" and name not in (EOS, UNK) else name.encode()
            for name in names
        ]
        self.texts = tuple(piece.decode(errors="replace") for piece in self._bytes)
        self.partials = tuple(
            None if raw == text.encode() else tuple(raw) for raw, text in zip(self._bytes, self.texts, strict=True)
        )
        self._ids = {name: index for index, name in enumerate(names)}
        self.unk_id: int | None = self._ids.get(UNK)
        """The id of the token for unknown words or events. None: the vocabulary has no such token."""
        self._longest_bytes = max(map(len, self._bytes))
        special = frozenset(self._ids[name] for name in SPECIAL_NAMES & self._ids.keys())
        self.reserved = special if reserved is None else frozenset(reserved)
        self.has_special = bool(special)
        if not self.reserved <= set(range(self.size)) - {self.eos_id, self.unk_id}:
            raise ValueError(
                f"the reserved tokens are {sorted(self.reserved)}, but must be ids below {self.size} of tokens other "
                f"than {EOS} and {UNK}"
            )

    @classmethod
    def read(cls, kind: VocabularyKind, path: Path, reserved: Iterable[int] | None = None) -> Vocabulary:
        """Reads a `tokenizer.json`. Raises ValueError if its content is invalid, OSError if it cannot be read."""
        text = path.read_text(encoding="utf-8")
        try:
            return cls(kind, text, reserved)
        except ValueError:
            raise
        except Exception as error:  # tokenizers raises a bare Exception for a malformed file
            raise ValueError(f"{path.name} is not a tokenizers file: {error}") from error

    @property
    def has_unknown(self) -> bool:
        """Whether there is a token for unknown words or events."""
        return self.unk_id is not None

    @property
    def unlisted(self) -> tuple[int, ...]:
        """The ids of the tokens that an answer does not list by default, ascending: `<unk>`, the reserved tokens and,
        for a vocabulary of events, `<eos>`, because they are not words or events."""
        ids = set(self.reserved)
        if self.kind == "events":
            ids.add(self.eos_id)
        if self.unk_id is not None:
            ids.add(self.unk_id)
        return tuple(sorted(ids))

    def never_drawn(self, *, include_unknown: bool = False) -> frozenset[int]:
        """Returns the ids of the tokens that are not drawn: the reserved tokens and, unless `include_unknown`,
        `<unk>`."""
        return self.reserved if include_unknown or self.unk_id is None else self.reserved | {self.unk_id}

    def event_id(self, name: str) -> int | None:
        """Returns the id of an event. Returns None for a name that the vocabulary lacks, for `<unk>` and for a reserved
        name, which are not names of events."""
        found = self._ids.get(name)
        return None if found == self.unk_id or found in self.reserved else found

    def is_reserved(self, name: str) -> bool:
        """Whether `name` is the name of a reserved token."""
        return self._ids.get(name) in self.reserved

    def encode(self, text: str, most: int | None = None) -> list[int]:
        """Returns the token ids of `text`. A line break is `<eos>`. The vocabulary must be of text, not of events.

        Releases the interpreter lock while it encodes lines. Raises ValueError if the text contains half of a surrogate
        pair. If `most` is given, raises TooManyTokens for a text of more than `most` tokens, because building a list of
        millions of ids would block the other threads.
        """
        assert self.kind != "events", "events are not text: this is a bug"
        _check_characters(text)
        lines = text.split("\n")
        ids: list[int] = []
        for line in self._encodings(lines):
            if most is not None and len(ids) + len(line) > most:
                raise TooManyTokens(len(ids) + len(line))
            ids += line.ids
            ids.append(self.eos_id)
        ids.pop()  # no line break follows the last line
        return ids

    def fewest_tokens(self, text: str) -> int:
        """Returns a cheap lower bound of the number of tokens of `text`. Raises ValueError like `encode`."""
        _check_characters(text)
        breaks = text.count("\n")
        if self.kind == "words":
            return breaks
        # The floor of a negative quotient rounds the number of tokens up.
        return breaks - (breaks - len(text.encode())) // self._longest_bytes

    def encode_lines(self, lines: list[str]) -> list[list[int]]:
        """Returns the token ids of lines without line breaks, encoded in parallel. Adds no `<eos>`.

        Raises ValueError if a word is unknown and the vocabulary has no `<unk>`.
        """
        return [encoding.ids for encoding in self._encodings(lines)]

    def _encodings(self, lines: list[str]) -> Iterator[Encoding]:
        """Yields the encoding of each line. Only a batch of them is in memory: each takes many times the memory of its
        ids. Raises ValueError like `encode_lines`."""
        for start in range(0, len(lines), LINES_AT_ONCE):
            batch = lines[start : start + LINES_AT_ONCE]
            try:
                encodings: list[Encoding] = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
            except Exception as error:  # the library `tokenizers` raises a bare Exception
                raise ValueError(f"the text cannot be encoded: {error}") from error
            if self.reserved:
                self._check_not_reserved(index for encoding in encodings for index in encoding.ids)
            yield from encodings

    def _check_not_reserved(self, ids: Iterable[int]) -> None:
        """Raises ValueError if a token is reserved."""
        found = next((index for index in ids if index in self.reserved), None)
        if found is not None:
            raise ValueError(f"it contains {self.texts[found]!r}, which the vocabulary reserves for other purposes")

    def encode_events(self, names: list[str]) -> list[int]:
        """Returns the token ids of event names. An unknown name becomes `<unk>`. Raises ValueError for a reserved name,
        and for an unknown name if the vocabulary has no `<unk>`."""
        unknown = self.unk_id
        if unknown is None:
            for name in names:
                if name not in self._ids:
                    raise ValueError(f"the vocabulary has no event {name!r} and no {UNK}")
        ids = [self._ids.get(name, unknown or 0) for name in names]
        if self.reserved:
            self._check_not_reserved(ids)
        return ids

    def decode(self, ids: list[int]) -> str:
        """Returns the readable text of the tokens. An incomplete character becomes U+FFFD."""
        if self.kind == "bpe":
            pieces = (b"\n" if index == self.eos_id else self._bytes[index] for index in ids)
            return b"".join(pieces).decode(errors="replace")
        separator = "\n" if self.kind == "events" else " "
        return separator.join("\n" if index == self.eos_id else self.texts[index] for index in ids)

    def token(self, index: int) -> str:
        """Returns one token as text. The text of `<eos>` is its name."""
        return self.texts[index]

    def token_bytes(self, index: int) -> bytes:
        """Returns one token's bytes, which may be part of a UTF-8 character."""
        return self._bytes[index]
