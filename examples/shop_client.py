"""A client that appends events to sessions, with Wane's Python client. It survives errors, restarts of servers, a new
version of the model and the loss of all servers' sessions. The environment variable WANE_API_KEY may have an API key.

    python examples/shop_client.py http://127.0.0.1:8000 runs/shop/sessions.jsonl --pause 0.5

Creates a session for each line of the file, and appends the events of the line, one event in each step. After each
step, prints the events that the model recommends. They exclude the events that are already in the session.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

from wane.client import Wane  # where the service is not installed: pip install ./client, and import wane_client


def main() -> None:
    """Sends the sessions of a file to the server."""
    parser = argparse.ArgumentParser(description="Steps sessions of events, and prints recommendations.")
    parser.add_argument("url", help="the server's address, or those of several replicas, separated by commas")
    parser.add_argument("file", type=Path, help="JSON lines: a list of events per line")
    parser.add_argument("--sessions", type=int, default=1, help="number of lines to read (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between two steps (default: %(default)s)")
    options = parser.parse_args()
    with Wane(options.url, deadline_s=60) as wane, options.file.open() as lines:
        for line in islice(lines, options.sessions):
            session = wane.session()
            for event in json.loads(line):
                answer = session.append(event, exclude_seen=True, top_k=3)
                names = ", ".join(one.token for one in answer.predictions)
                print(f"{answer.position}: {event}, version {answer.model_version} recommends {names}", flush=True)
                time.sleep(options.pause)


if __name__ == "__main__":
    main()
