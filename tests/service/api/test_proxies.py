"""Tests of the client address of a request. The client address is the address of the connection's peer, or the address
that a trusted proxy forwards."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from websockets.sync.client import connect

from tests.service.live_server import BUNDLE, LiveServer, live_server
from wane.service.settings import Settings, SettingsError

SPOOFED = "6.6.6.6"


def logged_client(server: LiveServer, forwarded: str, address: str = "127.0.0.1") -> str:
    """Sends a request from the local address `address`, with `forwarded` as the `x-forwarded-for` header. Returns the
    client address that the server logs."""
    headers = {"x-forwarded-for": forwarded, "x-request-id": f"{forwarded}-{address}".replace(" ", "")}
    with httpx.Client(transport=httpx.HTTPTransport(local_address=address)) as client:
        assert client.get(f"{server.url}/v1/models", headers=headers).status_code == 200
    return str(server.read_until("request", request_id=headers["x-request-id"])["client"])


def test_without_proxies_a_request_s_forwarded_for_is_ignored(live: LiveServer) -> None:
    assert logged_client(live, SPOOFED) == "127.0.0.1"
    assert logged_client(live, f"{SPOOFED}, 127.0.0.1") == "127.0.0.1"


def test_without_proxies_a_websocket_s_forwarded_for_is_ignored(live: LiveServer) -> None:
    stream = f"ws{live.url.removeprefix('http')}/v1/sessions/none/stream"
    with connect(stream, additional_headers={"x-forwarded-for": SPOOFED, "x-request-id": "a-socket"}):
        pass
    assert live.read_until("socket", request_id="a-socket")["client"] == "127.0.0.1"


@pytest.fixture(scope="module")
def behind() -> Iterator[LiveServer]:
    """A server that trusts two levels of proxies. A proxy on 127.0.0.1 connects to the server, and a proxy in
    10.0.0.0/8 connects to the proxy on 127.0.0.1."""
    with live_server(WANE_BUNDLES=BUNDLE, WANE_TRUSTED_PROXIES="127.0.0.1, 10.0.0.0/8") as server:
        yield server


@pytest.mark.parametrize(
    ("forwarded", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("192.0.2.7, 10.1.2.3", "192.0.2.7"),
        (f"{SPOOFED}, 192.0.2.7, 10.1.2.3", "192.0.2.7"),
        ("", "127.0.0.1"),
    ],
)
def test_the_client_is_the_latest_forwarded_address_that_is_not_a_proxy(
    behind: LiveServer, forwarded: str, client: str
) -> None:
    assert logged_client(behind, forwarded) == client


def test_the_forwarded_for_of_an_untrusted_peer_is_ignored(behind: LiveServer) -> None:
    assert logged_client(behind, SPOOFED, "127.0.0.2") == "127.0.0.2"


@pytest.mark.parametrize("value", ["", "haproxy", "*", "10.0.0.0/8,", "10.0.0.1/8", "127.0.0.1:80"])
def test_a_proxy_must_be_an_address_or_a_network(value: str) -> None:
    with pytest.raises(SettingsError, match=r"^WANE_TRUSTED_PROXIES is .*must be an address, or a network"):
        Settings.read({"WANE_TRUSTED_PROXIES": value})
