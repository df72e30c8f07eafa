"""Text that grows token by token, and stops where it should."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from models.vocabulary import Vocabulary


class TextStream:
    """Turns generated tokens into text as soon as it is certain.

    Withheld are the bytes of an unfinished UTF-8 character, and an end of the text that may be the beginning of
    a stop string. The text never holds a stop string nor anything behind it. A sequence of events also stops at
    its `<eos>`; in text that is only a line break.

    `tokens` holds every token pushed, one that stopped the text among them.
    """

    def __init__(self, vocabulary: Vocabulary, stop: Sequence[str]) -> None:
        self.tokens: list[int] = []
        self.stopped = False
        self._vocabulary = vocabulary
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._withheld = ""
        self._text: list[str] = []

    @property
    def text(self) -> str:
        """All that is certain so far."""
        return "".join(self._text)

    def push(self, token: int, *, final: bool = False) -> str:
        """Takes one token and returns the text that it made certain; `final` withholds nothing any more."""
        assert not self.stopped, "a token after the stop: this is a bug"
        self.tokens.append(token)
        if self._vocabulary.kind == "events" and token == self._vocabulary.eos_id:
            self.stopped = True
            return self._give(len(self._withheld))
        self._withheld += self._piece(token, final)
        found = [at for stop in self._stop if (at := self._withheld.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._give(min(found))
        return self._give(len(self._withheld) - (0 if final else self._open()))

    def _give(self, length: int) -> str:
        """Makes the first `length` withheld characters certain."""
        certain, self._withheld = self._withheld[:length], self._withheld[length:]
        self._text.append(certain)
        return certain

    def _open(self) -> int:
        """Length of the longest end of the withheld text that a stop string begins with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._withheld)), 0, -1):
            if any(stop.startswith(self._withheld[-length:]) for stop in self._stop):
                return length
        return 0

    def _piece(self, token: int, final: bool) -> str:
        """What a token adds to the text: `Vocabulary.decode` of all of them, in pieces."""
        vocabulary = self._vocabulary
        if vocabulary.kind == "bpe":
            raw = b"\n" if token == vocabulary.eos_id else vocabulary.token_bytes(token)
            return self._decoder.decode(raw, final)
        separator = "\n" if vocabulary.kind == "events" else " "
        return (separator if len(self.tokens) > 1 else "") + vocabulary.decode([token])
