"""The tables of docs/scaling.md, from the JSON files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.page import markdown
from research.scaling import check

Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]
"""A heading, and the function that formats a row's cell."""


def all_of(result: Result, checked: Result) -> dict[str, list[str]]:
    """Returns the tables by the names of their markers on the page."""
    return {
        "costs": of_costs(result["costs"]),
        "check": markdown(
            ("what", "measured", "simulated: median (of five seeds)", "off by"), check.rows(checked, result["check"])
        ),
        "sizes": of_sizes(result),
        "saturation": of_saturation(result),
        "money": of_money(result),
        "lost": of_lost(result),
        "third": of_third(result),
        "joined": of_joined(result),
        "deployed": of_deployed(result),
        "ring": of_ring(result),
        "skew": of_skew(result),
    }


def table(columns: Sequence[Column], rows: Iterable[Result]) -> list[str]:
    """Returns a table's lines, with a row for each result."""
    return markdown([head for head, _ in columns], [[shown(row) for _, shown in columns] for row in rows])


def number(head: str, name: str, spec: str = ",", unit: str = "", times: float = 1) -> Column:
    """Returns a column of a named number in each row, multiplied by `times`."""
    return head, lambda row: f"{times * row[name]:{spec}}{unit}"


def word(head: str, name: str) -> Column:
    """Returns a column of a named value in each row, unformatted."""
    return head, lambda row: str(row[name])


def by_policy(result: Result, name: str) -> Iterator[Result]:
    """Yields the named results of each policy, with the policy."""
    return ({"policy": policy, **one} for policy, own in result["policies"].items() for one in own[name])


POLICY = word("Redis keeps", "policy")
REPLICAS = number("replicas", "replicas")
SESSIONS: Column = ("sessions", lambda row: power(row["sessions"]))
WORST: tuple[Column, ...] = (
    ("worst 2 s: resident", lambda row: ms(row["worst_resident_p99_ms"])),
    ("rebuilt", lambda row: ms(row["worst_rebuilt_p99_ms"])),
    number("doubled for", "raised_s", ".0f", " s"),
)
BEFORE: Column = ("p99 before, ms", lambda row: ms(row["calm_p99_ms"]))
MOVED = number("sessions moved to each", "moved_here")


def of_costs(costs: Result) -> list[str]:
    """Returns the table of the simulation's costs."""
    policies = list(costs)
    tail, state = (costs[policy] for policy in policies)

    def each(name: str, key: str, spec: str, unit: str, times: float = 1) -> list[str]:
        """Returns a row with a column for each policy."""
        return [name, *(f"{times * costs[policy][key]:{spec}} {unit}" for policy in policies)]

    write = sorted(tail["write_s"]["always"])
    median, p95 = write[len(write) // 2], write[-2]
    tokens = "; ".join(f"{int(one)} tokens {1e3 * seconds:.2f} ms" for one, seconds in tail["windows"])
    rows = [
        *(
            each(name, key, ",.0f", "us", 1e6)
            for name, key in (
                ("event loop, a step", "loop_step_s"),
                ("event loop, a batch and its trip", "loop_batch_s"),
                ("event loop, a rebuilt one more", "loop_rebuilt_s"),
                ("model, a batch of steps", "run_batch_s"),
                ("model, each step in it", "run_step_s"),
                ("HAProxy, a request", "front_s"),
                ("Redis, a trip", "store_trip_s"),
                ("Redis, a command in it", "store_command_s"),
            )
        ),
        [
            "the disk, a write (median; p95)",
            *[f"{1e6 * median:,.0f} us; {1e6 * p95:,.0f} us"] * 2,
        ],
        ["model, a state rebuilt from", tokens, f"{1e3 * state['restored_s']:.2f} ms from one that was kept"],
        *(
            each(name, key, ",.0f", "bytes")
            for name, key in (
                ("replica, a session with its state", "replica_session_bytes"),
                ("Redis, a session", "store_session_bytes"),
                ("network, a step: client and replica", "front_bytes"),
                ("network, a step: replica and Redis", "store_bytes"),
            )
        ),
        each("replica, before any session", "replica_base_bytes", ",.0f", "MiB", 1 / 2**20),
        each("replica, started anew until ready", "ready_s", ".1f", "s"),
    ]
    return markdown(("", *(f"Redis keeps: {policy}" for policy in policies)), rows)


def of_sizes(result: Result) -> list[str]:
    """Returns the table of fleets by sessions."""
    columns = (
        SESSIONS,
        POLICY,
        number("steps/s", "steps_per_s", ",.0f"),
        REPLICAS,
        number("Redis", "shards"),
        number("HAProxy", "fronts"),
        ("cores", lambda row: f"{sum(row['cores'].values()):,.0f}"),
        ("GiB", lambda row: f"{sum(row['gib'].values()):,.0f}"),
        number("Gbit/s", "network_bytes_per_s", ",.1f", times=8e-9),
        ("USD/h a million", lambda row: f"{row['million_an_hour']:,.2f}"),
    )
    return table(columns, by_policy(result, "sizes"))


def of_saturation(result: Result) -> list[str]:
    """Returns the table of the sessions at which one of each saturates, by their rate of steps."""
    shown = [index for index, think_s in enumerate(result["thinks_s"]) if think_s in (1.0, 10.0, 100.0, 1000.0)]
    own = result["policies"]["tail"]["saturated_at"]
    rows = [[name, *(f"{sessions[index]:,.0f}" for index in shown)] for name, sessions in own.items()]
    thinks = (f"{result['thinks_s'][index]:,.0f} s" for index in shown)
    return markdown(("one of each carries, sessions that step once in", *thinks), rows)


def of_money(result: Result) -> list[str]:
    """Returns the table of the cost of a million sessions."""
    rows = []
    for index, think_s in enumerate(result["thinks_s"]):
        for kind, found in result["policies"]["tail"]["by_think"].items():
            resident, *amounts, an_hour = (values[index] for values in found.values())
            cells = (f"{amount:,.2f}" for amount in amounts)
            rows.append([f"{think_s:,.0f} s", f"{kind} ({100 * resident:.0f} %)", *cells, f"{an_hour:,.3f}"])
    cores, gib = ("cores: replicas", "Redis", "HAProxy"), ("GiB: states", "replicas' rest", "Redis")
    return markdown(("a step once in", "states", *cores, *gib, "USD/h"), rows)


def of_lost(result: Result) -> list[str]:
    """Returns the table of the loss of one replica by fleet."""
    rebuilt = number("rebuilt/s at first", "first_rebuilt_per_s", ",.1f")
    return table((SESSIONS, POLICY, REPLICAS, MOVED, rebuilt, BEFORE, *WORST), by_policy(result, "lost"))


def of_third(result: Result) -> list[str]:
    """Returns the table of the loss of a third of the replicas."""
    columns = (
        POLICY,
        word("queue", "queue"),
        MOVED,
        number("rebuilt/s at first", "first_rebuilt_per_s", ",.0f"),
        BEFORE,
        *WORST,
        number("refused", "refused_share", ".1f", " %", 100),
        number("loop busy", "loop_share", ".0f", " %", 100),
    )
    return table(columns, by_policy(result, "lost_zone"))


def of_joined(result: Result) -> list[str]:
    """Returns the table of a replica that joins without states."""
    columns = (
        POLICY,
        number("slow start", "slowstart_s", ".0f", " s"),
        number("sessions come", "sessions"),
        number("rebuilt", "rebuilt"),
        ("p99 in the end, ms", lambda row: ms(row["late_p99_ms"])),
        *WORST,
        number("refused", "refused"),
    )
    return table(columns, by_policy(result, "joined"))


def of_deployed(result: Result) -> list[str]:
    """Returns the table of rolling restarts."""
    own = result["policies"]["tail"]
    columns = (
        SESSIONS,
        REPLICAS,
        number("at once", "at_once"),
        ("takes", lambda row: duration(row["takes_s"])),
        number("rebuilt for each session", "rebuilt_for_each_session", ".2f"),
        number("rebuilt/s at most, all replicas", "most_rebuilt_per_s", ",.0f"),
    )
    sizes = [size["sessions"] for size in own["sizes"]]
    rows = [{**one, "sessions": sessions} for sessions, one in zip(sizes, own["deployed"], strict=True)]
    return table(columns, rows)


def of_ring(result: Result) -> list[str]:
    """Returns the table of the ring's moves."""
    columns = (
        word("replicas", "replicas"),
        (
            "one more moves (must move)",
            lambda row: f"{100 * row['added_moves']:.2f} % ({100 * row['added_must']:.2f} %)",
        ),
        word("of these not to it", "added_moves_elsewhere"),
        (
            "one fewer moves (must move)",
            lambda row: f"{100 * row['lost_moves']:.2f} % ({100 / row['replicas']:.2f} %)",
        ),
        word("others moved", "lost_moves_others"),
        (
            "a replica's share by the mean",
            lambda row: f"{row['least_share']:.2f} to {row['largest_share']:.2f}",
        ),
    )
    return table(columns, result["ring"])


def of_skew(result: Result) -> list[str]:
    """Returns the table of hot sessions."""
    columns = (
        SESSIONS,
        REPLICAS,
        number("exponent", "exponent", ".1f"),
        number("steps/s of the hottest", "hottest_per_s", ",.2f"),
        number("busiest replica by the mean", "busiest", ".2f"),
        number("steps that find their state, room for a tenth", "resident", ".0f", " %", 100),
    )
    rows = [
        {**one, "sessions": float(sessions), "replicas": own["replicas"]}
        for sessions, own in result["skew"].items()
        for one in rows_of({name: values for name, values in own.items() if name != "replicas"})
    ]
    return table(columns, rows)


def rows_of(columns: dict[str, list[Any]]) -> Iterator[Result]:
    """Converts a list for each figure to rows."""
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def ms(value: float | None) -> str:
    """Formats milliseconds; empty if there are none."""
    return "" if value is None else f"{value:,.1f}"


def power(value: float) -> str:
    """Formats a million as 10^6."""
    exponent = len(str(round(value))) - 1
    return f"10^{exponent}" if round(value) == 10**exponent else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Formats a duration in a fitting unit."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
