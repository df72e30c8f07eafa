"""`wane report`: shows the statistics of one server, or the merged statistics of its replicas."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rich.console import Console

from wane.arguments import Parser
from wane.client import WaneError
from wane.service.cli.connect import CommandError, Document, connect, traced
from wane.service.cli.render import report_tables
from wane.service.workers.merge_reports import MergeError, merge

FAILURES = (CommandError, WaneError, MergeError, OSError)


def main(arguments: Sequence[str]) -> int:
    """Runs the command. `arguments[0]` is the command's name."""
    parser = Parser("wane report", description=__doc__)
    parser.add_argument("urls", nargs="+", metavar="URL", help="a server's address, such as http://127.0.0.1:8000")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments[1:])
    urls = dict.fromkeys(url.rstrip("/") for url in options.urls)
    reports: list[Document] = []
    failures: list[str] = []
    with traced() as tracing:
        for url in urls:
            try:
                with connect(url, tracing) as client:
                    report = dict(client.report().document)
                merge([*reports, report])
                reports.append(report)
            except (CommandError, WaneError, MergeError) as error:
                failures.append(str(error) if url in str(error) else f"{url}: {error}")
    if reports:
        merged = reports[0] if len(urls) == 1 else merge(reports)
        if options.json:
            print(json.dumps(merged, indent=2))  # noqa: T201
        else:
            Console().print(*report_tables(merged))
    if failures:
        missing = f"{len(failures)} of {len(urls)} servers are not included: " if reports else ""
        raise CommandError(missing + "; ".join(failures))
    return 0
