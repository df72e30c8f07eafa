"""The benchmark of steps with a model of 50,000 items."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.page import markdown
from benchmarks.summary import Spread

FIGURES, PAGE, TABLE = Path("docs/figures/events.json"), Path("docs/event_models.md"), "events"
COLUMNS = ("", "p50, ms", "p99, ms")


def lines(document: Mapping[str, Any]) -> list[str]:
    """Returns the page's table of the latencies, as lines of Markdown."""
    rows = [
        (one["what"], *(f"{Spread.model_validate(one[name]):.2f}" for name in ("p50_ms", "p99_ms")))
        for one in document["results"]
    ]
    return markdown(COLUMNS, rows)
