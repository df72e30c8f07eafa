"""Measures everything that a GPU is needed for, in parts ordered by value.

    python -m benchmarks.gpu --out FOLDER [--minutes M] [--parts NAME,...] [--device cuda|cpu] [--data FOLDER]
    python -m benchmarks.gpu --pack DIR --python 3.12 [--piece-mb N] [--device cuda|cpu]
    python -m benchmarks.gpu --unpack DIR --out FOLDER

The first command runs each part in a process of its own, with a time limit of its own, and writes FOLDER/PART.json at
each figure. A run that is cut off loses only the rest. `--device cpu` rehearses: the same code, small sizes. The second
command gathers the packages for a machine without a network, and the third installs them there. docs/gpu.md has the
steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from benchmarks.gpu.pack import PackError, pack, unpack
from benchmarks.gpu.part import Part, write_record
from benchmarks.gpu.parts import PARTS, measure
from benchmarks.gpu.reach import summary

PRELOADED = ["torch", "benchmarks.gpu.parts"]
"""The modules that the parts' processes share, so that not every part imports them again."""

GRACE_S = 3.0
"""The time after a part's limit until its process is ended, in seconds. Most parts stop by themselves."""


def run(options: argparse.Namespace) -> int:
    """Runs the parts. Returns the exit status: 1 if a part failed."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    end = time.monotonic() + 60 * options.minutes
    names = options.parts
    for index, name in enumerate(names):
        left = end - time.monotonic()
        later = sum(PARTS[other].minutes for other in names[index:])
        limit = left * PARTS[name].minutes / later
        print(f"part {index + 1} of {len(names)}, {name}: {PARTS[name].title}, at most {limit:.0f} s", flush=True)
        print(f"  {left / 60:.1f} min left", flush=True)
        part = Part(name, options.out, options.device, time.monotonic() + limit, options.device == "cpu", options.data)
        part.keep(status="cut off")
        begun = time.monotonic()
        process = processes.Process(target=measure, args=(part,))
        process.start()
        process.join(limit + GRACE_S)
        if process.is_alive():
            assert process.pid is not None
            end_session(process.pid)
            process.kill()
            process.join()
        record = part.read(name)
        record["seconds"] = round(time.monotonic() - begun, 1)
        if record["status"] == "cut off":
            record["reason"] = (
                f"ended after its limit of {limit:.0f} s" if process.exitcode == -9 else "its process ended"
            )
        write_record(options.out / f"{name}.json", record)
        print(f"  {record['status']}{': ' + record['reason'] if 'reason' in record else ''}", flush=True)
    lines, record = summary(options.out)
    write_record(options.out / "summary.json", record)
    print("\n".join(lines), flush=True)
    found = [json.loads((options.out / f"{name}.json").read_text())["status"] for name in names]
    return int("failed" in found)


def end_session(leader: int) -> None:
    """Ends the processes of a part: those of the session that its process leads. Servers lead groups of their own in
    it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(ProcessLookupError):
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)


def parts(text: str) -> list[str]:
    """Parses the names of parts. They keep the order of their value."""
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a part: choose from {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def minutes(text: str) -> float:
    """Parses a positive number of minutes."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1440:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of minutes above 0 and at most 1440")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder of the results, or of the installed packages"
    )
    parser.add_argument("--minutes", type=minutes, default=10.0, help="time of the whole run (default: %(default)g)")
    parser.add_argument(
        "--parts", type=parts, default=list(PARTS), help=f"parts to run, of {','.join(PARTS)} (default: all)"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--data", type=Path, help="folder of WikiText-2 (default: $WANE_DATA/wikitext-2, if it is set)")
    parser.add_argument("--pack", type=Path, metavar="DIR", help="gather the packages in DIR")
    parser.add_argument("--unpack", type=Path, metavar="DIR", help="install the packages of DIR in the folder --out")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine (default: %(default)s)")
    parser.add_argument("--piece-mb", type=int, default=64, help="largest size of a piece in MB (default: %(default)s)")
    options = parser.parse_args()
    if options.pack is None and options.out is None:
        parser.error("--out is missing")
    try:
        if options.pack is not None:
            pack(options.pack, options.python, options.piece_mb, options.device)
            return 0
        if options.unpack is not None:
            unpack(options.unpack, options.out)
            return 0
    except PackError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.data is None and "WANE_DATA" in os.environ:
        options.data = Path(os.environ["WANE_DATA"]) / "wikitext-2"
    return run(options)


if __name__ == "__main__":
    sys.exit(main())
