"""Tests of the content of log lines, and of the time at which the server writes log lines."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from wane.service.observability.logs import JsonFormatter, TogetherHandler

TIMEOUT_S = 60


class Stream(io.StringIO):
    """A stream that records every write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []
        self.written = threading.Event()

    def write(self, text: str) -> int:
        self.writes.append(text)
        count = super().write(text)
        self.written.set()
        return count


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def logger(stream: Stream) -> Iterator[logging.Logger]:
    handler = TogetherHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.Logger("test")
    logger.addHandler(handler)
    yield logger
    handler.close()


def messages(stream: Stream) -> list[str]:
    return [json.loads(line)["message"] for line in stream.getvalue().splitlines()]


def test_a_warning_is_written_immediately_with_all_earlier_lines(logger: logging.Logger, stream: Stream) -> None:
    for text in ("one", "two"):
        logger.info(text)
    logger.warning("three")
    assert messages(stream) == ["one", "two", "three"]
    assert len(stream.writes) <= 2


def test_lines_are_written_in_order_before_the_handler_is_closed(logger: logging.Logger, stream: Stream) -> None:
    for index in range(100):
        logger.info("line %d", index)
    logger.handlers[0].close()
    assert messages(stream) == [f"line {index}" for index in range(100)]
    assert len(stream.writes) < 100


def test_a_single_line_is_written(logger: logging.Logger, stream: Stream) -> None:
    logger.info("alone")
    assert stream.written.wait(TIMEOUT_S)
    assert messages(stream) == ["alone"]


@pytest.mark.parametrize(
    "text", ["é ẞ 漢", 'a "quoted" \\ line\nand another', "half a pair: \ud800", "a\u2028b\u2029c\x85d\x9be"]
)
def test_every_line_is_one_json_object(text: str) -> None:
    record = logging.makeLogRecord({"msg": text, "fields": {"path": text, "odd": {1, 2}}})
    line = JsonFormatter().format(record)
    assert line.splitlines() == [line] and "\x9b" not in line
    document = json.loads(line)
    assert document["message"] == document["path"] == text
    assert document["odd"] == "{1, 2}"


def test_an_exception_is_logged_with_its_traceback() -> None:
    try:
        raise ZeroDivisionError("so it goes")
    except ZeroDivisionError as error:
        record = logging.makeLogRecord({"msg": "failed", "exc_info": (type(error), error, error.__traceback__)})
    assert "ZeroDivisionError: so it goes" in json.loads(JsonFormatter().format(record))["trace"]
