"""The tables of docs/scaling.md, from the JSON files: nothing on the page is written by hand that a table can say."""

from __future__ import annotations

from typing import Any

from benchmarks.page import markdown
from benchmarks.scaling import check

Result = dict[str, Any]
STORM = ("calm_p99_ms", "worst_resident_p99_ms", "worst_rebuilt_p99_ms")


def all_of(result: Result, checked: Result) -> dict[str, list[str]]:
    """Each by its name on the page."""
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


def of_costs(costs: Result) -> list[str]:
    """What the simulation is fed with."""
    micro = {
        "event loop, a step": "loop_step_s",
        "event loop, a batch and its trip": "loop_batch_s",
        "event loop, a rebuilt one more": "loop_rebuilt_s",
        "model, a batch of steps": "run_batch_s",
        "model, each step in it": "run_step_s",
        "HAProxy, a request": "front_s",
        "Redis, a trip": "store_trip_s",
        "Redis, a command in it": "store_command_s",
    }
    columns = list(costs)
    rows = [[name, *(f"{1e6 * costs[policy][key]:,.0f} us" for policy in columns)] for name, key in micro.items()]
    tail = costs[columns[0]]
    write = sorted(tail["write_s"]["always"])
    rows.append(
        ["the disk, a write (median; p95)", *[f"{1e6 * write[len(write) // 2]:,.0f} us; {1e6 * write[-2]:,.0f} us"] * 2]
    )
    tokens = "; ".join(f"{int(one)} tokens {1e3 * seconds:.2f} ms" for one, seconds in tail["windows"])
    rows.append(
        [
            "model, a state rebuilt from",
            tokens,
            f"{1e3 * costs[columns[1]]['restored_s']:.2f} ms from one that was kept",
        ]
    )
    for name, key in (
        ("replica, a session with its state", "replica_session_bytes"),
        ("Redis, a session", "store_session_bytes"),
        ("network, a step: client and replica", "front_bytes"),
        ("network, a step: replica and Redis", "store_bytes"),
    ):
        rows.append([name, *(f"{costs[policy][key]:,.0f} bytes" for policy in columns)])
    rows.append(
        ["replica, before any session", *(f"{costs[one]['replica_base_bytes'] / 2**20:,.0f} MiB" for one in columns)]
    )
    rows.append(["replica, started anew until ready", *(f"{costs[one]['ready_s']:.1f} s" for one in columns)])
    return markdown(("", *(f"Redis keeps: {policy}" for policy in columns)), rows)


def of_sizes(result: Result) -> list[str]:
    """Fleets by sessions."""
    rows: list[list[str]] = []
    for policy, own in result["policies"].items():
        rows += [
            [
                power(one["sessions"]),
                policy,
                f"{one['steps_per_s']:,.0f}",
                *(f"{one[name]:,}" for name in ("replicas", "shards", "fronts")),
                f"{sum(one['cores'].values()):,.0f}",
                f"{sum(one['gib'].values()):,.0f}",
                f"{8e-9 * one['network_bytes_per_s']:,.1f}",
                f"{one['per_million']['an_hour']:,.2f}",
            ]
            for one in own["sizes"]
        ]
    head = (
        "sessions",
        "Redis keeps",
        "steps/s",
        "replicas",
        "Redis",
        "HAProxy",
        "cores",
        "GiB",
        "Gbit/s",
        "USD/h a million",
    )
    return markdown(head, rows)


def of_saturation(result: Result) -> list[str]:
    """Sessions at which one of each is used up, by how often they step."""
    own = result["policies"]["tail"]["saturated_at"]
    thinks = [think for think in own if float(think) in (1.0, 10.0, 100.0, 1000.0)]
    rows = [[name, *(f"{own[think][name]:,.0f}" for think in thinks)] for name in own[thinks[0]]]
    return markdown(
        ("one of each carries, sessions that step once in", *(f"{float(one):,.0f} s" for one in thinks)), rows
    )


def of_money(result: Result) -> list[str]:
    """A million sessions."""
    rows: list[list[str]] = []
    for think, kinds in result["policies"]["tail"]["by_think"].items():
        for kind, one in kinds.items():
            each = one["per_million"]
            rows.append(
                [
                    f"{float(think):,.0f} s",
                    f"{kind} ({100 * one['resident']:.0f} %)",
                    *(f"{each['cores'][name]:,.2f}" for name in each["cores"]),
                    *(f"{each['gib'][name]:,.2f}" for name in each["gib"]),
                    f"{each['an_hour']:,.3f}",
                ]
            )
    head = (
        "a step once in",
        "states",
        "cores: replicas",
        "Redis",
        "HAProxy",
        "GiB: states",
        "replicas' rest",
        "Redis",
        "USD/h",
    )
    return markdown(head, rows)


def of_lost(result: Result) -> list[str]:
    """One replica of each fleet."""
    rows: list[list[str]] = []
    for policy, own in result["policies"].items():
        rows += [
            [
                power(one["sessions"]),
                policy,
                f"{one['replicas']:,}",
                f"{one['moved_here']:,}",
                f"{one['first_rebuilt_per_s']:,.1f}",
                *(ms(one[name]) for name in STORM),
                f"{one['raised_s']:.0f} s",
            ]
            for one in own["lost"]
        ]
    head = (
        "sessions",
        "Redis keeps",
        "replicas",
        "sessions moved to each",
        "rebuilt/s at first",
        "p99 before, ms",
        "worst 2 s: resident",
        "rebuilt",
        "doubled for",
    )
    return markdown(head, rows)


def of_third(result: Result) -> list[str]:
    """A third of all."""
    rows: list[list[str]] = []
    for policy, own in result["policies"].items():
        rows += [
            [
                policy,
                one["queue"],
                f"{one['moved_here']:,}",
                f"{one['first_rebuilt_per_s']:,.0f}",
                *(ms(one[name]) for name in STORM),
                f"{one['raised_s']:.0f} s",
                f"{100 * one['refused_share']:.1f} %",
                f"{100 * one['loop_share']:.0f} %",
            ]
            for one in own["lost_zone"]
        ]
    head = (
        "Redis keeps",
        "queue",
        "sessions moved to each",
        "rebuilt/s at first",
        "p99 before, ms",
        "worst 2 s: resident",
        "rebuilt",
        "doubled for",
        "refused",
        "loop busy",
    )
    return markdown(head, rows)


def of_joined(result: Result) -> list[str]:
    """A replica without states."""
    rows: list[list[str]] = []
    for policy, own in result["policies"].items():
        rows += [
            [
                policy,
                f"{one['slowstart_s']:.0f} s",
                f"{one['sessions']:,}",
                f"{one['rebuilt']:,}",
                *(ms(one[name]) for name in ("late_p99_ms", *STORM[1:])),
                f"{one['raised_s']:.0f} s",
                f"{one['refused']:,}",
            ]
            for one in own["joined"]
        ]
    head = (
        "Redis keeps",
        "slow start",
        "sessions come",
        "rebuilt",
        "p99 in the end, ms",
        "worst 2 s: resident",
        "rebuilt",
        "doubled for",
        "refused",
    )
    return markdown(head, rows)


def of_deployed(result: Result) -> list[str]:
    """All replicas, one after another."""
    own = result["policies"]["tail"]
    rows = [
        [
            power(size["sessions"]),
            f"{one['replicas']:,}",
            f"{one['at_once']:,}",
            duration(one["takes_s"]),
            f"{one['rebuilt_for_each_session']:.2f}",
            f"{one['most_rebuilt_per_s']:,.0f}",
        ]
        for size, one in zip(own["sizes"], own["deployed"], strict=True)
    ]
    return markdown(
        ("sessions", "replicas", "at once", "takes", "rebuilt for each session", "rebuilt/s at most, all replicas"),
        rows,
    )


def of_ring(result: Result) -> list[str]:
    """What moves."""
    rows = [
        [
            str(one["replicas"]),
            f"{100 * one['added_moves']:.2f} % ({100 * one['added_must']:.2f} %)",
            str(one["added_moves_elsewhere"]),
            f"{100 * one['lost_moves']:.2f} % ({100 / one['replicas']:.2f} %)",
            str(one["lost_moves_others"]),
            f"{one['least_share']:.2f} to {one['largest_share']:.2f}",
        ]
        for one in result["ring"]
    ]
    head = (
        "replicas",
        "one more moves (must move)",
        "of these not to it",
        "one fewer moves (must move)",
        "others moved",
        "a replica's share by the mean",
    )
    return markdown(head, rows)


def of_skew(result: Result) -> list[str]:
    """Hot sessions."""
    rows: list[list[str]] = []
    for sessions, own in result["skew"].items():
        rows += [
            [
                power(float(sessions)),
                f"{own['replicas']:,}",
                f"{one['exponent']:.1f}",
                f"{one['hottest_per_s']:,.2f}",
                f"{one['busiest']:.2f}",
                f"{100 * one['resident']:.0f} %",
            ]
            for one in own["exponents"]
        ]
    head = (
        "sessions",
        "replicas",
        "exponent",
        "steps/s of the hottest",
        "busiest replica by the mean",
        "steps that find their state, room for a tenth",
    )
    return markdown(head, rows)


def ms(value: float | None) -> str:
    """Milliseconds, if there were any."""
    return "" if value is None else f"{value:,.1f}"


def power(value: float) -> str:
    """10^6 for a million."""
    exponent = len(str(round(value))) - 1
    return f"10^{exponent}" if round(value) == 10**exponent else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """In the unit that fits."""
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
