"""A client whose session survives retries, server restarts and the loss of servers. The client uses the package httpx.

    python examples/session_client.py http://127.0.0.1:8000

Sends the first tokens of a text to one session, one token in each step. Prints the most probable next token after each
step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import httpx

RETRY = {429, 502, 503, 504}  # the server is overloaded, restarting or too slow: retry the same step


class Session:
    def __init__(self, url: str, name: str) -> None:
        self.http, self.name, self.tokens = httpx.Client(base_url=url, timeout=10), name, list[int]()
        self.post("/v1/sessions", {"session": name})

    def step(self, token: int) -> dict[str, Any]:
        body = {"tokens": [token], "expected_position": len(self.tokens)}  # makes a retry of the step safe
        answer = self.post(f"/v1/sessions/{self.name}/tokens", body)
        self.tokens.append(token)
        return answer  # the "position" of an answer is the expected_position of the next step

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for wait_s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20):
            try:
                response = self.http.post(path, json=body)
                if response.status_code == 404:  # every server has lost the session: create it again
                    history = {"history": self.tokens[-512:], "position": len(self.tokens)} if self.tokens else {}
                    response = self.http.post("/v1/sessions", json={"session": self.name, **history})
                elif response.status_code not in RETRY:
                    answer: dict[str, Any] = response.raise_for_status().json()
                    return answer
            except httpx.TransportError:  # no connection or no answer: the step may have been appended
                pass
            time.sleep(wait_s)
        raise ConnectionError(f"no answer from {path}")


def main() -> None:
    """Runs a session on the server whose address is the first argument."""
    session = Session(sys.argv[1], f"example-{time.time_ns()}")
    for token in (313, 262, 517, 298):
        first = session.step(token)["predictions"][0]
        print(f"after {len(session.tokens)} tokens: {first['token']!r} with probability {first['probability']:.3f}")


if __name__ == "__main__":
    main()
