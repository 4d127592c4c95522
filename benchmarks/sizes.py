"""Times ``sample_trilinear`` against ``F.grid_sample`` over sizes: resolution, channels and number of points.

    python benchmarks/sizes.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]
    python benchmarks/sizes.py --plot PATH.json --out PATH.svg [--channels C]

One of the three is varied at a time, around 256^3 vertices, 4 and 12 channels and a million points (64^3 and 1e5 points
on a CPU), and the corners of that box are included as far as memory allows. A configuration that does not fit in memory
with our op is left out, as is a layout of ``F.grid_sample`` that does not fit in addition to ours; the output lists
these with the reason.

- Data are float32; the passes and point sets are those of benchmarks/trilinear.py. ``F.grid_sample`` is the better of
  two layouts, NCDHW and channels-last-3d.
- Every configuration is checked in the run: some rows of the values against float64, the gradient by the identity
  <gradient, grid> = <values, sampled>, and both against every timed layout of ``F.grid_sample``, at some points.
- Times are device times. With few points, the host's overhead makes a call take longer: the host's time to enqueue a
  call is in the JSON. With few points, the vertices also stay in the cache between calls, whatever the size of the
  grid.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _formula
import _harness as harness
import _plot
import torch
from _alternatives import LAYOUTS, OURS, Inputs, Prepared, prepare, prepare_grid_sample
from _compare import TOLERANCE
from _points import POINT_SETS
from torch import Tensor

from voxelfield.ops import sample_trilinear

CHECKED_POINTS = 4096
# Number of grid elements that the check of the gradient converts to float64 at once.
CHECKED_CHUNK = 1 << 26
RESERVE = 4 << 30


def count_label(count: int) -> str:
    """Formats a number of points for printing, such as 1e6."""
    return f"{count:.0e}".replace("e+0", "e")


class Size(NamedTuple):
    """One configuration."""

    resolution: int
    channels: int
    points: int

    @property
    def label(self) -> str:
        """Returns the configuration as printed."""
        return f"{self.resolution}^3 x {self.channels}, {count_label(self.points)}"

    @property
    def grid_bytes(self) -> int:
        """Returns the bytes of the grid."""
        return 4 * self.channels * self.resolution**3

    @property
    def stream_bytes(self) -> int:
        """Returns the bytes of points and values."""
        return 4 * (3 + self.channels) * self.points


class Range(NamedTuple):
    """The varied values, and the centre of the variation."""

    resolutions: tuple[int, ...]
    channels: tuple[int, ...]
    points: tuple[int, ...]
    center: tuple[int, int]
    center_channels: tuple[int, ...] = (4, 12)


RANGES = {
    "cuda": Range(
        (32, 64, 128, 256, 512, 1024),
        (1, 2, 4, 8, 16, 32, 64),
        (10**3, 10**4, 10**5, 10**6, 10**7, 10**8),
        (256, 10**6),
    ),
    "cpu": Range((16, 32, 64, 128), (1, 2, 4, 8, 16, 32), (10**3, 10**4, 10**5, 10**6), (64, 10**5)),
}


# Largest number of output values: more would take minutes.
MAX_VALUES = 2 * 10**9


def sizes(device: torch.device, quick: bool) -> list[Size]:
    """Returns the configurations for a device, without duplicates; a quick run leaves out the slow ones."""
    span = RANGES[device.type]
    resolution, points = span.center
    found: list[Size] = []
    for channels in span.center_channels[:1] if quick else span.center_channels:
        found += [Size(n, channels, points) for n in span.resolutions]
        found += [Size(resolution, channels, n) for n in span.points]
    found += [Size(resolution, n, points) for n in span.channels]
    for n, c, p in itertools.product(*((values[0], values[-1]) for values in span[:3])):
        found.append(Size(n, c, p if c * p <= MAX_VALUES else p // 10))
    if quick:
        found = [s for s in found if s.points <= 10**6 and s.grid_bytes <= 4 << 30]
    return sorted(dict.fromkeys(found))


# --- memory ---------------------------------------------------------------------------------------------------------


def free_bytes(device: torch.device) -> int:
    """Returns the usable memory, less a reserve for the allocator's fragmentation."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0] - RESERVE
    available = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    return int(available.split()[1]) * 1024 // 2


def needed_bytes(size: Size, copies_of_grid: int) -> int:
    """Returns the peak memory of one input set: grids, gradients, points, values, output, and temporary ray data."""
    return copies_of_grid * size.grid_bytes + 4 * size.stream_bytes + 160 * size.points


# --- one configuration ----------------------------------------------------------------------------------------------


def make(size: Size, points: str, device: torch.device) -> Inputs:
    """Makes a random grid, points, and the gradient of their values."""
    grid = torch.randn(*(size.resolution,) * 3, size.channels, device=device)
    return Inputs(
        (grid,), POINT_SETS[points](size.points, device), torch.randn(size.points, size.channels, device=device)
    )


class Probe(NamedTuple):
    """The part of the results that is compared: rows of the output, and the vertices that these points touch."""

    rows: Tensor
    x: Tensor
    y: Tensor
    z: Tensor

    def look(self, what: str, result: tuple[Tensor, ...]) -> Tensor:
        """Returns the compared part of a pass's result."""
        return result[0][self.rows] if what == "forward" else result[0][self.x, self.y, self.z]


def probe(inputs: Inputs) -> Probe:
    """Chooses random points."""
    (grid,), points, _ = inputs
    rows = torch.randint(len(points), (CHECKED_POINTS,), device=points.device)
    lower, _ = _formula.cells_of(points[rows], grid.shape[:3])
    corners = lower[:, None] + torch.tensor(_formula.CORNERS, device=points.device)
    return Probe(rows, *corners.view(-1, 3).unbind(1))


def dot(a: Tensor, b: Tensor) -> float:
    """Returns the inner product of two tensors in float64, without a float64 copy of either."""
    chunks = zip(a.flatten().split(CHECKED_CHUNK), b.flatten().split(CHECKED_CHUNK), strict=True)
    return sum(float(torch.dot(x.double(), y.double())) for x, y in chunks)


def check(label: str, name: str, prepared: Prepared, inputs: Inputs, at: Probe, ours: dict[str, Tensor]) -> None:
    """Compares ours, which must come first, with float64 and stores it in ``ours``; compares the others with that."""
    results = {what: timed.to_ours(timed.call()) for what, timed in prepared.items()}
    looked = {what: at.look(what, result) for what, result in results.items()}
    if name == OURS:
        (grid,), points, values = inputs
        (output,), (gradient,) = results["forward"], results["backward"]
        error = harness.relative_error(looked["forward"].double(), _formula.sample_rows(grid, points[at.rows]))
        harness.check(f"{label}: forward against float64", error, TOLERANCE)
        # For a normally distributed grid, the standard deviation of <gradient, grid> is the gradient's norm.
        error = abs(dot(gradient, grid) - dot(values, output)) / math.sqrt(dot(gradient, gradient))
        harness.check(f"{label}: backward against the adjoint", error, TOLERANCE)
    for what, part in looked.items():
        error = harness.relative_error(part, ours.setdefault(what, part))
        harness.check(f"{label}: {what} of {name} against ours", error, TOLERANCE)


@torch.no_grad()
def run(size: Size, points: str, session: harness.Session) -> list[dict[str, Any]]:
    """Checks and times one configuration on one point set; returns a row for each pass, or none if it does not fit."""
    room = free_bytes(session.device)
    per_set = size.grid_bytes + size.stream_bytes
    count = harness.input_sets(per_set, session.device)
    if needed_bytes(size, 3) * count > room:
        count = harness.input_sets(per_set, session.device, min_sets=1)
    # The grid and its gradient; NCDHW additionally copies the grid.
    needed = {name: needed_bytes(size, 3 if "NCDHW" in name else 2) * count for name in (OURS, *LAYOUTS)}
    skipped = {
        name: f"needs {size_in_bytes / 2**30:.1f} GiB, {room / 2**30:.1f} GiB are free"
        for name, size_in_bytes in needed.items()
        if size_in_bytes > room
    }
    label = f"{size.label} {points}"
    for name, why in skipped.items():
        print(f"{label}: {name} left out, {why}", flush=True)
    if OURS in skipped:
        return []
    sets = [make(size, points, session.device) for _ in range(count)]
    at = probe(sets[0])
    ours: dict[str, Tensor] = {}
    rows = [
        {**size._asdict(), "point_set": points, "pass": what, "input_sets": count, "ms": {}, "left_out": skipped}
        for what in ("forward", "backward")
    ]
    implementations = {OURS: partial(prepare, sample_trilinear)}
    implementations |= {name: partial(prepare_grid_sample, layout) for name, layout in LAYOUTS.items()}
    for name, prepare_inputs in implementations.items():
        if name in skipped:
            continue
        with torch.enable_grad():
            prepared = [prepare_inputs(inputs) for inputs in sets]
        check(label, name, prepared[0], sets[0], at, ours)
        for row in rows:
            timing = harness.measure([p[row["pass"]].call for p in prepared], session.device, session.how)
            row["ms"][name] = asdict(timing)
        del prepared
    print(f"{label}: checked and timed", flush=True)
    return rows


# --- what is printed and drawn --------------------------------------------------------------------------------------


def milliseconds(row: dict[str, Any], ours: bool) -> float | None:
    """Returns the median of ours or of the better layout of ``F.grid_sample``, or None if neither fits."""
    return min((timing["median"] for name, timing in row["ms"].items() if (name == OURS) == ours), default=None)


def as_table(rows: list[dict[str, Any]]) -> str:
    """Formats one line for each configuration and point set."""
    lines: dict[str, list[str]] = {}
    for row in rows:
        label = f"{size_of(row).label} {row['point_set']}"
        ours, theirs = milliseconds(row, True), milliseconds(row, False)
        ratio = "-" if ours is None or theirs is None else f"{theirs / ours:.2f}x"
        lines.setdefault(label, [label]).extend(["-" if t is None else f"{t:.3f}" for t in (ours, theirs)] + [ratio])
    header = ["size, ms", "forward", "grid_sample", "ratio", "backward", "grid_sample", "ratio"]
    return harness.table(header, list(lines.values()))


def size_of(row: dict[str, Any]) -> Size:
    """Returns the configuration of a row."""
    return Size(row["resolution"], row["channels"], row["points"])


def draw(rows: list[dict[str, Any]], channels: int) -> str:
    """Plots time against resolution, channels and points, forward above backward."""
    center = RANGES["cuda"].center if any(size_of(row).resolution == 256 for row in rows) else RANGES["cpu"].center
    resolution, points = center
    sweeps = {
        "resolution": (f"{channels} channels, {count_label(points)} points", {"channels": channels, "points": points}),
        "channels": (f"{resolution}^3, {count_label(points)} points", {"resolution": resolution, "points": points}),
        "points": (f"{resolution}^3 x {channels}", {"resolution": resolution, "channels": channels}),
    }
    drawn = []
    for what in ("forward", "backward"):
        panels = []
        for axis, (title, fixed) in sweeps.items():
            chosen = [row for row in rows if row["pass"] == what and fixed.items() <= row.items()]
            series = [
                _plot.Series(
                    f"{'voxelfield' if ours else 'F.grid_sample'}, {point_set}",
                    _plot.BLUE if ours else _plot.ORANGE,
                    point_set == "random",
                    [
                        (row[axis], time)
                        for row in chosen
                        if row["point_set"] == point_set and (time := milliseconds(row, ours)) is not None
                    ],
                )
                for ours in (True, False)
                for point_set in POINT_SETS
            ]
            places = sorted({row[axis] for row in chosen})
            ticks = [(place, count_label(place) if axis == "points" else str(place)) for place in places]
            panels.append(_plot.Panel(f"{what}: {title}", axis, "ms", ticks, series))
        drawn.append(panels)
    return _plot.figure(drawn)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line; runs every configuration and prints the table last, or plots an earlier run."""
    parser = harness.parser(__doc__)
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw this run instead of running")
    parser.add_argument("--out", type=Path, help="SVG file to draw into")
    parser.add_argument("--channels", type=int, default=4, help="of the grids in the plot (default: 4)")
    options = parser.parse_args(arguments)
    if (options.plot is None) != (options.out is None):
        parser.error("--plot and --out go together")
    if options.plot:
        rows = json.loads(options.plot.read_text())["rows"]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(draw(rows, options.channels))
        return

    session = harness.start(options)
    session = replace(session, how=harness.Effort(0.03, 3) if options.quick else harness.Effort(0.1, 5))
    rows = []
    for size in sizes(session.device, options.quick):
        for points in POINT_SETS:
            if options.only in f"{size.label} {points}":
                rows += run(size, points, session)

    session.announce()
    print("\n" + as_table(rows))
    if options.json:
        session.write(options.json, "sizes", __doc__, rows)


if __name__ == "__main__":
    main()
