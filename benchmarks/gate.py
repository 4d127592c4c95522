"""Compares the speed of the ops relative to their alternatives with a stored baseline, and reports changes.

    python benchmarks/gate.py [--device cpu|cuda] [--threads N] [--rounds N] [--only SUBSTRING] [--tolerance SHARE]
    python benchmarks/gate.py --store ...

Runs ``trilinear.py --quick`` and ``pyramid.py --quick`` in separate processes, alternately for several rounds, and
compares two figures of each row: the ratio between the time of the best alternative and ours, and our share of the
physical limit (the floor). Both are determined within one run on one machine, so they depend less on the machine's load
than milliseconds do.

A baseline contains the range of each figure over its rounds, for one kind of machine: ``baselines/DEVICE.json`` next to
this file. A row has moved if the median of this run lies outside that range by more than ``--tolerance`` (0.15: 15 %).
If the ratio falls while the share of the floor stays, the alternative has become faster, for example with a new torch.
The exit status is 1 if a row has become slower in both figures, and 2 without a baseline. ``--store`` writes the
baseline instead.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import _harness as harness

HERE = Path(__file__).resolve().parent
BENCHMARKS = ("trilinear", "pyramid")
BASELINES = HERE / "baselines"

Verdict = Literal["slower", "faster", "the alternative is faster", "the alternative is slower"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Range:
    """The range of a figure over several rounds: smallest, median, largest."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        """Returns the range of some values, at least one."""
        return cls(min(values), statistics.median(values), max(values))

    def moved(self, value: float, tolerance: float) -> int:
        """Returns -1 for a value clearly below the range, 1 for one clearly above it, 0 otherwise."""
        return (value > self.high * (1 + tolerance)) - (value < self.low * (1 - tolerance))


@dataclass(frozen=True)
class Figures:
    """The compared figures of a row.

    Attributes:
        ratio: Time of the best alternative divided by ours.
        share: Time of the floor divided by ours.
    """

    ratio: Range
    share: Range


def figures(runs: Iterable[Sequence[Row]]) -> dict[str, Figures]:
    """Returns the figures of each row by name.

    Args:
        runs: The rows of each round.
    """
    found: dict[str, list[Row]] = {}
    for rows in runs:
        for row in rows:
            name = " ".join(filter(None, (row["op"], row["size"], row["points"], row["pass"])))
            found.setdefault(name, []).append(row)
    return {
        name: Figures(Range.of([row["ratio"] for row in rows]), Range.of([row["fraction_of_floor"] for row in rows]))
        for name, rows in found.items()
    }


def verdict(now: Figures, before: Figures, tolerance: float) -> Verdict | None:
    """Returns the verdict on a row, or None if it has not moved.

    Args:
        now: Figures of this run.
        before: Figures of the baseline.
        tolerance: Relative distance from the earlier range up to which the median has not moved.
    """
    ratio = before.ratio.moved(now.ratio.median, tolerance)
    share = before.share.moved(now.share.median, tolerance)
    if ratio < 0:
        return "slower" if share < 0 else "the alternative is faster"
    if ratio > 0:
        return "faster" if share > 0 else "the alternative is slower"
    return None


def measure(options: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[list[Row]]]:
    """Runs the benchmarks; returns the machine and the rows of each round."""
    machine: dict[str, Any] = {}
    runs: list[list[Row]] = []
    passed = ["--device", options.device] if options.device else []
    passed += ["--threads", str(options.threads)] if options.threads else []
    for number in range(options.rounds):
        rows: list[Row] = []
        for name in BENCHMARKS:
            path = folder / f"{name}_{number}.json"
            command = [sys.executable, str(HERE / f"{name}.py"), "--quick", "--only", options.only, "--json", str(path)]
            subprocess.run([*command, *passed], check=True, stdout=subprocess.DEVNULL)
            content = json.loads(path.read_text())
            machine = content["machine"]
            rows += content["rows"]
        runs.append(rows)
        print(f"round {number + 1} of {options.rounds}: {len(rows)} rows", flush=True)
    return machine, runs


def baseline_path(machine: Mapping[str, Any]) -> Path:
    """Returns the path of the baseline for a kind of machine."""
    name = machine["gpu"] or f"cpu {machine['threads']} threads"
    return BASELINES / f"{re.sub('[^a-z0-9]+', '_', name.lower())}.json"


def store(path: Path, machine: Mapping[str, Any], now: Mapping[str, Figures]) -> None:
    """Writes a baseline."""
    path.parent.mkdir(exist_ok=True)
    rows = {name: {key: list(of.values()) for key, of in asdict(row).items()} for name, row in now.items()}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(_rounded(row))}" for name, row in rows.items())
    path.write_text(f'{{\n "machine": {json.dumps(machine)},\n "rows": {{\n{lines}\n }}\n}}\n')


def _rounded(row: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    return {key: [float(f"{value:.3g}") for value in values] for key, values in row.items()}


def read(path: Path) -> tuple[dict[str, Any], dict[str, Figures]]:
    """Reads a baseline; returns its machine and its rows."""
    content = json.loads(path.read_text())
    rows = {name: Figures(Range(*row["ratio"]), Range(*row["share"])) for name, row in content["rows"].items()}
    return content["machine"], rows


def report(now: Mapping[str, Figures], before: Mapping[str, Figures], tolerance: float) -> list[str]:
    """Prints the rows that have moved; returns the names of those that have become slower."""
    lines, slower = [], []
    for name in now.keys() & before.keys():
        found = verdict(now[name], before[name], tolerance)
        if found is not None:
            lines.append([name, *_change(now[name], before[name]), found])
        if found == "slower":
            slower.append(name)
    lines += [[name, "-", f"{now[name].ratio.median:.2f}x", "-", "-", "new"] for name in now.keys() - before.keys()]
    if lines:
        print(harness.table(["row", "ratio before", "now", "of the floor before", "now", "verdict"], sorted(lines)))
    print(f"{len(lines)} of {len(now)} rows have moved, {len(slower)} of them are slower")
    return sorted(slower)


def _change(now: Figures, before: Figures) -> list[str]:
    return [
        f"{before.ratio.low:.2f} to {before.ratio.high:.2f}x",
        f"{now.ratio.median:.2f}x",
        f"{100 * before.share.low:.0f} to {100 * before.share.high:.0f}%",
        f"{100 * now.share.median:.0f}%",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measures and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds it")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's own choice")
    parser.add_argument("--rounds", type=int, default=3, help="of each benchmark")
    parser.add_argument("--only", default="", metavar="SUBSTRING", help="compare the rows whose name contains it")
    parser.add_argument("--tolerance", type=float, default=0.15, metavar="SHARE")
    parser.add_argument("--store", action="store_true", help="write the baseline instead of comparing with it")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        machine, runs = measure(options, Path(folder))
    now, path = figures(runs), baseline_path(machine)
    if options.store:
        store(path, machine, now)
        print(f"{path}: {len(now)} rows")
        return 0
    if not path.is_file():
        print(f"no baseline for this machine, {path}: write one with --store", file=sys.stderr)
        return 2
    compared, before = read(path)
    for key in ("torch", "cuda", "driver", "cpu"):
        if compared[key] != machine[key]:
            print(f"the baseline is of {key} {compared[key]}, this run of {machine[key]}")
    wanted = {name: row for name, row in before.items() if options.only in name}
    return 1 if report(now, wanted, options.tolerance) else 0


if __name__ == "__main__":
    sys.exit(main())
