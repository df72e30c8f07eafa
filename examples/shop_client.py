"""A client that appends events to sessions. It handles errors, restarts of servers, a new version of the model and the
loss of all servers' sessions. It uses the package httpx. The environment variable WANE_API_KEY may have an API key.

    python examples/shop_client.py http://127.0.0.1:8000 runs/shop/sessions.jsonl --pause 0.5

Creates a session for each line of the file, and sends the events of the line, one event in each step. After each step,
prints the events that the model recommends. The recommendations exclude the events that are already in the session.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import httpx

RETRY = {429, 502, 503, 504}  # the server is overloaded, restarting or too slow: retry the same step
WAITS_S = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)


class Session:
    """One session. `events`: the appended events, without those that the model's vocabulary lacks. Their number is the
    session's position."""

    def __init__(self, http: httpx.Client, name: str) -> None:
        self.http, self.name, self.events = http, name, list[str]()

    def step(self, event: str, recommended: int = 3) -> dict[str, Any]:
        """Appends an event. Returns the answer, which lists the `recommended` most probable next events that are not in
        the session."""
        # With `create`, the first step creates the session.
        body = {"events": [event], "create": True, "exclude_seen": True, "top_k": recommended}
        # With `expected_position`, the server does not append the event twice if the step is retried.
        position = {"expected_position": len(self.events)}
        answer = self.post(f"/v1/sessions/{self.name}/tokens", body | position)
        if "unknown" not in answer:  # the vocabulary has the event
            self.events.append(event)
        return answer

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns the answer. Repeats the request while the server is not available. Creates the
        session again if the server has lost it."""
        for wait_s in WAITS_S:
            try:
                response = self.http.post(path, json=body)
                if response.status_code == 404:  # no server has the session any more: create it again
                    history = {"events": self.events[-256:], "position": len(self.events)} if self.events else {}
                    response = self.http.post("/v1/sessions", json={"session": self.name, **history})
                elif response.status_code not in RETRY:
                    answer: dict[str, Any] = response.raise_for_status().json()
                    return answer
            except httpx.TransportError:  # no connection or no answer: the step may have been appended
                pass
            time.sleep(wait_s)
        raise ConnectionError(f"no answer from {path}")


def main() -> None:
    """Sends the sessions of a file to the server."""
    parser = argparse.ArgumentParser(description="Steps sessions of events, and prints recommendations.")
    parser.add_argument("url", help="the server's address")
    parser.add_argument("file", type=Path, help="JSON lines: a list of events per line")
    parser.add_argument("--sessions", type=int, default=1, help="number of lines to read (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps (default: %(default)s)")
    options = parser.parse_args()
    key = os.environ.get("WANE_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=options.url, timeout=10, headers=headers) as http, options.file.open() as lines:
        for number, line in zip(range(options.sessions), lines, strict=False):
            session = Session(http, f"shop-{time.time_ns()}-{number}")
            for event in json.loads(line):
                answer = session.step(event)
                names = ", ".join(one["token"] for one in answer["predictions"])
                print(
                    f"{answer['position']}: {event}, version {answer['model_version']} recommends {names}", flush=True
                )
                time.sleep(options.pause)


if __name__ == "__main__":
    main()
