"""A DNS server like that of a cluster, with the records that HAProxy uses: the SRV records of a headless service, and
the addresses of its hosts."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

A, SRV, INTERNET = 1, 33, 1
ANSWER, NO_SUCH_NAME = 0x8580, 0x8583
TTL_S = 5
LOOPBACK = bytes([127, 0, 0, 1])


class Names(asyncio.DatagramProtocol):
    """Answers a query for SRV records of the name `service` with one record for each of `ports`. The records have
    different host names. The address of each host name is 127.0.0.1."""

    def __init__(self, service: str) -> None:
        self.service = service
        self.ports: set[int] = set()
        self.port = 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.port = transport.get_extra_info("sockname")[1]

    def datagram_received(self, data: bytes, address: Any) -> None:
        """Answers a DNS query."""
        (number,) = struct.unpack_from(">H", data)
        end = data.index(b"\0", 12) + 5
        name = read(data[12 : end - 4])
        (kind,) = struct.unpack_from(">H", data, end - 4)
        answers: list[bytes] = []
        if kind == SRV and name == self.service:
            answers = [
                record(name, SRV, struct.pack(">3H", 0, 1, port) + write(self._host(port))) for port in self.ports
            ]
        elif kind == A and name in map(self._host, self.ports):
            answers = [record(name, A, LOOPBACK)]
        flags = ANSWER if answers or name == self.service else NO_SUCH_NAME
        self.transport.sendto(
            struct.pack(">6H", number, flags, 1, len(answers), 0, 0) + data[12:end] + b"".join(answers), address
        )

    def _host(self, port: int) -> str:
        return f"replica-{port}.{self.service.split('.', 2)[2]}"


def write(name: str) -> bytes:
    """Returns a domain name in the wire format of DNS."""
    return b"".join(bytes([len(label)]) + label.encode() for label in name.split(".")) + b"\0"


def read(wire: bytes) -> str:
    """Returns the domain name that a query asks for."""
    labels: list[str] = []
    while wire[0]:
        labels.append(wire[1 : wire[0] + 1].decode().lower())
        wire = wire[wire[0] + 1 :]
    return ".".join(labels)


def record(name: str, kind: int, data: bytes) -> bytes:
    return write(name) + struct.pack(">HHIH", kind, INTERNET, TTL_S, len(data)) + data


@asynccontextmanager
async def names(service: str) -> AsyncIterator[Names]:
    """Runs a DNS server on a free port of 127.0.0.1 while the `with` block runs."""
    loop = asyncio.get_running_loop()
    transport, server = await loop.create_datagram_endpoint(lambda: Names(service), local_addr=("127.0.0.1", 0))
    try:
        yield server
    finally:
        transport.close()
