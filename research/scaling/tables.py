"""The tables of docs/scaling.md, from the JSON files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from benchmarks.page import markdown
from research.scaling import check

Result = dict[str, Any]
Column = tuple[str, Callable[[Result], str]]
"""A column of a table: its heading, and the function that formats the column's cell of a row."""


def all_of(result: Result, checked: Result) -> dict[str, list[str]]:
    """Returns all tables, by the names of their markers on the page docs/scaling.md."""
    return {
        "costs": of_costs(result["costs"]),
        "check": markdown(
            ("what", "measured", "simulated: median (of five seeds)", "difference"),
            check.rows(checked, result["check"]),
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
    """Returns the lines of a table with one row per result."""
    return markdown([head for head, _ in columns], [[shown(row) for _, shown in columns] for row in rows])


def number(head: str, name: str, spec: str = ",", unit: str = "", times: float = 1) -> Column:
    """Returns a column that shows the number `row[name]` of each row, multiplied by `times`."""
    return head, lambda row: f"{times * row[name]:{spec}}{unit}"


def word(head: str, name: str) -> Column:
    """Returns a column that shows the value `row[name]` of each row without formatting."""
    return head, lambda row: str(row[name])


def by_policy(result: Result, name: str) -> Iterator[Result]:
    """Yields the rows in the list `name` of each policy's results. Adds the policy to each row."""
    return ({"policy": policy, **one} for policy, own in result["policies"].items() for one in own[name])


POLICY = word("Redis keeps", "policy")
REPLICAS = number("replicas", "replicas")
SESSIONS: Column = ("sessions", lambda row: power(row["sessions"]))
WORST: tuple[Column, ...] = (
    ("highest p99 in 2 s, ms: steps with resident states", lambda row: ms(row["worst_resident_p99_ms"])),
    ("with rebuilt states", lambda row: ms(row["worst_rebuilt_p99_ms"])),
    number("time with p99 above twice its normal value", "raised_s", ".0f", " s"),
)
BEFORE: Column = ("p99 before, ms", lambda row: ms(row["calm_p99_ms"]))
MOVED = number("sessions moved to each replica", "moved_here")


def of_costs(costs: Result) -> list[str]:
    """Returns the table of the simulation's costs."""
    policies = list(costs)
    tail, state = (costs[policy] for policy in policies)

    def each(name: str, key: str, spec: str, unit: str, times: float = 1) -> list[str]:
        """Returns a row with one cell per policy."""
        return [name, *(f"{times * costs[policy][key]:{spec}} {unit}" for policy in policies)]

    write = sorted(tail["write_s"]["always"])
    median, p95 = write[len(write) // 2], write[-2]
    tokens = "; ".join(f"{int(one)} tokens {1e3 * seconds:.2f} ms" for one, seconds in tail["windows"])
    rows = [
        *(
            each(name, key, ",.0f", "us", 1e6)
            for name, key in (
                ("event loop, per step", "loop_step_s"),
                ("event loop, per batch and its trip", "loop_batch_s"),
                ("event loop, additional per rebuilt step", "loop_rebuilt_s"),
                ("model, per batch of steps", "run_batch_s"),
                ("model, per step in a batch", "run_step_s"),
                ("HAProxy, per request", "front_s"),
                ("Redis, per trip", "store_trip_s"),
                ("Redis, per command in a trip", "store_command_s"),
            )
        ),
        [
            "disk, per write (median; p95)",
            *[f"{1e6 * median:,.0f} us; {1e6 * p95:,.0f} us"] * 2,
        ],
        ["model, per rebuilt state", tokens, f"{1e3 * state['restored_s']:.2f} ms from a stored state"],
        *(
            each(name, key, ",.0f", "bytes")
            for name, key in (
                ("replica, per session with its state", "replica_session_bytes"),
                ("Redis, per session", "store_session_bytes"),
                ("network, per step, client to replica", "front_bytes"),
                ("network, per step, replica to Redis", "store_bytes"),
            )
        ),
        each("replica, without sessions", "replica_base_bytes", ",.0f", "MiB", 1 / 2**20),
        each("replica, from restart to ready", "ready_s", ".1f", "s"),
    ]
    return markdown(("", *(f"Redis keeps: {policy}" for policy in policies)), rows)


def of_sizes(result: Result) -> list[str]:
    """Returns the table of fleet sizes by number of sessions."""
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
        ("USD/h per million", lambda row: f"{row['million_an_hour']:,.2f}"),
    )
    return table(columns, by_policy(result, "sizes"))


def of_saturation(result: Result) -> list[str]:
    """Returns the table of the numbers of sessions at which one replica, Redis, HAProxy or network link saturates, by
    step interval."""
    shown = [index for index, think_s in enumerate(result["thinks_s"]) if think_s in (1.0, 10.0, 100.0, 1000.0)]
    own = result["policies"]["tail"]["saturated_at"]
    rows = [[name, *(f"{sessions[index]:,.0f}" for index in shown)] for name, sessions in own.items()]
    thinks = (f"{result['thinks_s'][index]:,.0f} s" for index in shown)
    return markdown(("sessions at saturation, for one step per", *thinks), rows)


def of_money(result: Result) -> list[str]:
    """Returns the table of the cost of a million sessions."""
    rows = []
    for index, think_s in enumerate(result["thinks_s"]):
        for kind, found in result["policies"]["tail"]["by_think"].items():
            resident, *amounts, an_hour = (values[index] for values in found.values())
            cells = (f"{amount:,.2f}" for amount in amounts)
            rows.append([f"{think_s:,.0f} s", f"{kind} ({100 * resident:.0f} %)", *cells, f"{an_hour:,.3f}"])
    cores, gib = ("cores: replicas", "Redis", "HAProxy"), ("GiB: states", "replicas without states", "Redis")
    return markdown(("one step per", "states", *cores, *gib, "USD/h"), rows)


def of_lost(result: Result) -> list[str]:
    """Returns the table of the loss of one replica, with a row per fleet."""
    rebuilt = number("rebuilds/s at first", "first_rebuilt_per_s", ",.1f")
    return table((SESSIONS, POLICY, REPLICAS, MOVED, rebuilt, BEFORE, *WORST), by_policy(result, "lost"))


def of_third(result: Result) -> list[str]:
    """Returns the table of the loss of a third of the replicas."""
    columns = (
        POLICY,
        word("queue", "queue"),
        MOVED,
        number("rebuilds/s at first", "first_rebuilt_per_s", ",.0f"),
        BEFORE,
        *WORST,
        number("refused", "refused_share", ".1f", " %", 100),
        number("event loop busy", "loop_share", ".0f", " %", 100),
    )
    return table(columns, by_policy(result, "lost_zone"))


def of_joined(result: Result) -> list[str]:
    """Returns the table of a replica that joins the fleet without states in memory."""
    columns = (
        POLICY,
        number("slow start", "slowstart_s", ".0f", " s"),
        number("sessions arriving", "sessions"),
        number("rebuilt", "rebuilt"),
        ("p99 at the end, ms", lambda row: ms(row["late_p99_ms"])),
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
        number("replicas at a time", "at_once"),
        ("duration", lambda row: duration(row["takes_s"])),
        number("rebuilds per session", "rebuilt_for_each_session", ".2f"),
        number("highest rebuilds/s, all replicas", "most_rebuilt_per_s", ",.0f"),
    )
    sizes = [size["sessions"] for size in own["sizes"]]
    rows = [{**one, "sessions": sessions} for sessions, one in zip(sizes, own["deployed"], strict=True)]
    return table(columns, rows)


def of_ring(result: Result) -> list[str]:
    """Returns the table of the numbers of sessions that HAProxy's ring moves to other replicas."""
    columns = (
        word("replicas", "replicas"),
        (
            "sessions moved if one replica is added (necessary)",
            lambda row: f"{100 * row['added_moves']:.2f} % ({100 * row['added_must']:.2f} %)",
        ),
        word("moved, but not to the new replica", "added_moves_elsewhere"),
        (
            "sessions moved if one replica is lost (necessary)",
            lambda row: f"{100 * row['lost_moves']:.2f} % ({100 / row['replicas']:.2f} %)",
        ),
        word("moved, but not from the lost replica", "lost_moves_others"),
        (
            "a replica's share / mean share",
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
        number("steps/s of the hottest session", "hottest_per_s", ",.2f"),
        number("busiest replica's load / mean load", "busiest", ".2f"),
        number("steps whose state is in memory, with room for a tenth of all states", "resident", ".0f", " %", 100),
    )
    rows = [
        {**one, "sessions": float(sessions), "replicas": own["replicas"]}
        for sessions, own in result["skew"].items()
        for one in rows_of({name: values for name, values in own.items() if name != "replicas"})
    ]
    return table(columns, rows)


def rows_of(columns: dict[str, list[Any]]) -> Iterator[Result]:
    """Converts a dictionary of one list per key to rows."""
    return (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))


def ms(value: float | None) -> str:
    """Formats milliseconds. Returns an empty string for None."""
    return "" if value is None else f"{value:,.1f}"


def power(value: float) -> str:
    """Formats a power of ten as 10^n, and any other number with thousands separators."""
    exponent = len(str(round(value))) - 1
    return f"10^{exponent}" if round(value) == 10**exponent else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Formats a duration in hours, minutes or seconds."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
