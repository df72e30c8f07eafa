"""Costs of the simulated operations for the tests. The costs are round numbers."""

from __future__ import annotations

from research.scaling.costs import Costs

ROUND = Costs(
    loop_step_s=400e-6,
    loop_batch_s=200e-6,
    loop_rebuilt_s=500e-6,
    run_batch_s=80e-6,
    run_step_s=20e-6,
    windows=((1.0, 100e-6), (64.0, 700e-6), (512.0, 6e-3)),
    restored_s=300e-6,
    front_s=50e-6,
    store_trip_s=50e-6,
    store_command_s=20e-6,
    write_s={"always": (100e-6, 150e-6, 400e-6), "everysec": (0.0,)},
    client_s=50e-6,
    ready_s=2.0,
    load_cpu_s=2.0,
    state_bytes=9472.0,
    replica_session_bytes=12_000.0,
    replica_base_bytes=2**28,
    store_session_bytes=1400.0,
    front_bytes=1100.0,
    store_bytes=350.0,
)
