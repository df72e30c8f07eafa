"""Finds the ends of request bodies and of WebSocket messages in received bytes. Does not check the bytes: uvicorn's
parsers refuse those that are invalid."""

from __future__ import annotations

SHORT_BYTES = 125  # the longest payload of a frame whose length fits in the frame's second byte
WHOLE_TEXT = 0x81  # the first byte of a text message in one frame
HEAD_BYTES = 14  # the longest head of a client's frame
LENGTH_BYTES = {126: 2, 127: 8}  # the size of the separate length field, by the length in the frame's second byte


class Body:
    """The end of one request's body. `bare_bytes` counts the bytes received since the last byte of content: chunk
    lengths and trailers."""

    __slots__ = ("_line", "bare_bytes", "ended", "in_trailers", "is_chunked", "left")

    def __init__(self, length: int | None) -> None:
        """`length` is the content-length in bytes, or None for a chunked body."""
        self.is_chunked = length is None
        self.left = length or 0
        self.ended = length == 0
        self.bare_bytes = 0
        self._line = b""
        self.in_trailers = False

    def take(self, data: bytes) -> int:
        """Returns the number of the first bytes of `data` that belong to the body. Stops where the trailers begin."""
        at, was_in_trailers = 0, self.in_trailers
        while at < len(data) and not self.ended and self.in_trailers is was_in_trailers:
            if self.left:
                step = min(self.left, len(data) - at)
                self.left -= step
                at += step
                self.bare_bytes = 0
                self.ended = not (self.left or self.is_chunked)
                continue
            end = data.find(b"\n", at) + 1 or len(data)
            self._line += data[at:end]
            self.bare_bytes += end - at
            at = end
            if self._line.endswith(b"\n"):
                self._end_line(self._line)
                self._line = b""
        return at

    def _end_line(self, line: bytes) -> None:
        if self.in_trailers:
            self.ended = line == b"\r\n"
            return
        try:
            size = int(line.partition(b";")[0], 16)
        except ValueError:  # uvicorn refuses such a body
            return
        self.in_trailers = not size
        self.left = size + 2 if size else 0  # a chunk ends in a line break


class Frames:
    """The ends of the frames and of the messages of one WebSocket (RFC 6455, 5.2)."""

    __slots__ = ("_first", "_head", "_in_fragments", "_left", "message_bytes", "messages", "without_message")

    def __init__(self) -> None:
        self._first = 0  # the first byte of the current frame
        self._head = b""  # received bytes of an incomplete head
        self._left = 0  # number of payload bytes of the current frame that are still to come
        self._in_fragments = False
        self.message_bytes = 0
        """Number of received bytes of the incomplete message and of the frames within it."""
        self.messages = 0
        """Number of complete messages that `take` has found."""
        self.without_message = 0
        """Number of frames since the last complete message."""

    @property
    def is_within_message(self) -> bool:
        """Whether a message or a frame is incomplete."""
        return bool(self._left or self._head or self._in_fragments)

    def is_short_text(self, data: bytes) -> bool:
        """Returns whether `data` is exactly one frame with a short text, and no other frame is incomplete."""
        return (
            data[0] == WHOLE_TEXT
            and len(data) > 1
            and data[1] - 0x80 == len(data) - 6 <= SHORT_BYTES
            and not self.is_within_message
        )

    def take(self, data: bytes) -> int:
        """Adds received bytes. Returns the number of bytes of the messages that are now complete."""
        at = complete_bytes = 0
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
            else:
                head = self._head + data[at : at + HEAD_BYTES - len(self._head)]
                width = LENGTH_BYTES.get(head[1] & 0x7F, 0) if len(head) > 1 else 0
                size = 6 + width
                if size > len(head):
                    self._head = head
                    self.message_bytes += len(data) - at
                    break
                step = size - len(self._head)
                self._head, self._first = b"", head[0]
                self._left = int.from_bytes(head[2 : 2 + width]) if width else head[1] & 0x7F
            at += step
            self.message_bytes += step
            if not self._left:
                complete_bytes += self._end_frame()
        return complete_bytes

    def _end_frame(self) -> int:
        self.without_message += 1
        if self._first & 0x08:  # a control frame, which may stand between the fragments of a message
            if not self._in_fragments:
                self.message_bytes = 0
            return 0
        self._in_fragments = not self._first & 0x80
        if self._in_fragments:
            return 0
        count, self.message_bytes, self.without_message = self.message_bytes, 0, 0
        self.messages += 1
        return count
