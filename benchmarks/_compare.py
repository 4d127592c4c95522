"""Comparison of alternatives on the same inputs: checked against each other and float64, timed, related to a floor."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import _floors
import _formula
import _harness as harness
import torch
from _alternatives import Inputs, Prepared
from torch import Tensor

# For float32 arithmetic; alternatives round the coordinates differently, which matters for fine grids.
TOLERANCE = 1e-4

Errors = dict[str, float]
Results = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One op at one size: its inputs, the alternatives, the bytes to move, and a float64 check.

    Attributes:
        op: The table to which the rows belong.
        size: Shape, as printed.
        points: Name of the point set, empty if there is only one.
        make: Creates a new set of inputs.
        alternatives: Functions that prepare each alternative for a set of inputs; the first one is ours. The others may
            lack passes.
        rivals: The alternatives, the best of which is compared with ours in the ratio.
        floor: Counts the bytes to move.
        float64_errors: Compares our results, by pass, with float64.
        tolerance: Largest relative difference between results.
    """

    op: str
    size: str
    points: str
    make: Callable[[], Inputs]
    alternatives: dict[str, Callable[[Inputs], Prepared]]
    rivals: tuple[str, ...]
    floor: Callable[[Inputs], _floors.Floor]
    float64_errors: Callable[[Inputs, dict[str, Results]], Errors]
    tolerance: float = TOLERANCE

    @property
    def label(self) -> str:
        """Returns the case's name in the table."""
        return " ".join(filter(None, (self.op, self.size, self.points)))


def flattened(tensors: Results) -> Tensor:
    """Returns the elements of several tensors concatenated in a 1-D tensor of at least float32."""
    return torch.cat([x.flatten().float() if x.dtype.itemsize < 4 else x.flatten() for x in tensors])


def _difference(some: Results, others: Results) -> float:
    """Returns the largest relative difference of corresponding tensors; 0 if there are none to compare."""
    if not some:
        return 0.0
    return max(harness.relative_error(flattened((a,)), flattened((b,))) for a, b in zip(some, others, strict=True))


def forward_error(inputs: Inputs, output: Tensor, reduce: Callable[[list[Tensor]], Tensor]) -> float:
    """Compares some rows with float64; ``reduce`` combines the rows of several grids."""
    some = torch.randint(len(inputs.points), (4096,), device=inputs.points.device)
    expected = reduce([_formula.sample_rows(grid, inputs.points[some]) for grid in inputs.sources])
    return harness.relative_error(output[some].double(), expected)


def backward_error(inputs: Inputs, gradients: Results, columns: Iterable[int]) -> float:
    """Compares the first and last channel of each grid's gradient with float64.

    Args:
        inputs: The grids, points and values.
        gradients: Our gradients, one for each grid.
        columns: Index of the first channel of each grid in a row of values.

    Returns:
        The error over all grids together.
    """
    actual, expected = [], []
    for grid, gradient, column in zip(inputs.sources, gradients, columns, strict=True):
        channels = torch.tensor([0, grid.shape[3] - 1], device=grid.device)
        expected.append(_formula.splat(inputs.values[:, column + channels], inputs.points, grid.shape[:3]))
        actual.append(gradient.view(-1, grid.shape[3])[:, channels].double())
    return harness.relative_error(torch.cat(actual), torch.cat(expected))


def grid_floor(device: torch.device, inputs: Inputs) -> _floors.Floor:
    """Counts the bytes that sampling one grid, or all levels at once, must move."""
    return _floors.grids(inputs.sources, inputs.points, inputs.values, harness.granule(device))


def _floors_of(case: Case, inputs: Inputs, session: harness.Session) -> dict[str, dict[str, Any]]:
    """Returns, by pass, the bytes that must move and the times that this takes."""
    moved = case.floor(inputs)

    def milliseconds(count: int | None, bandwidth: float | None) -> float | None:
        return None if count is None or bandwidth is None else 1e3 * count / bandwidth

    fits = session.l2_bandwidth is not None and moved.working_set <= harness.l2_bytes(session.device)
    return {
        "forward": {
            "floor_bytes": moved.forward,
            "floor_ms": milliseconds(moved.forward, session.bandwidth),
            "l2_ms": milliseconds(moved.cached, session.l2_bandwidth if fits else None),
        },
        "backward": {
            "floor_bytes": moved.backward,
            "floor_ms": milliseconds(moved.backward, session.bandwidth),
            "two_pass_ms": milliseconds(moved.two_pass, session.bandwidth),
        },
    }


def _results(case: Case, name: str, prepared: Prepared, first: Inputs) -> dict[str, Results]:
    """Runs every pass of one alternative once, or twice if it must be bit-for-bit reproducible."""
    results = {}
    for what, timed in prepared.items():
        if first.points.is_cuda:
            # The allocator reuses this memory, so an element that is not written would show as NaN.
            for like in first.sources if what == "backward" else (first.values,):
                torch.full_like(like, torch.nan if like.is_floating_point() or like.is_complex() else -1)
        results[what] = timed.to_ours(timed.call())
        if timed.repeatable and not all(map(torch.equal, results[what], timed.to_ours(timed.call()))):
            raise SystemExit(f"{case.label}: {what} of {name} gave other bits the second time")
    return results


@torch.no_grad()
def run(case: Case, session: harness.Session) -> list[dict[str, Any]]:
    """Checks and times one case; returns a row for each of its passes."""
    first = case.make()
    count = harness.input_sets(sum(x.nbytes for x in (*first.sources, first.points, first.values)), session.device)
    sets = [first, *(case.make() for _ in range(count - 1))]
    bounds = _floors_of(case, first, session)
    rows: dict[str, dict[str, Any]] = {}
    ours: dict[str, Results] = {}
    for name, prepare in case.alternatives.items():
        with torch.enable_grad():
            prepared = [prepare(inputs) for inputs in sets]
        results = _results(case, name, prepared[0], first)
        if not ours:
            ours = results
            errors = case.float64_errors(first, results)
            for what in results:
                rows[what] = {
                    "op": case.op,
                    "size": case.size,
                    "points": case.points,
                    "pass": what,
                    "input_sets": count,
                    **bounds[what],
                    "ms": {},
                    "difference_from_float64": harness.check(
                        f"{case.label}: {what} against float64", errors[what], case.tolerance
                    ),
                    "difference_from_ours": {},
                }
        for what, result in results.items():
            label = f"{case.label}: {what} of {name} against ours"
            error = harness.check(label, _difference(result, ours[what]), case.tolerance)
            rows[what]["difference_from_ours"][name] = error
        existing = list(results)
        del results
        for what in existing:
            rows[what]["ms"][name] = harness.measure([p[what].call for p in prepared], session.device, session.how)
    for row in rows.values():
        medians = {name: timing.median for name, timing in row["ms"].items()}
        best = next(iter(medians.values()))
        row["ratio"] = min((medians[name] for name in case.rivals if name in medians), default=None)
        if row["ratio"] is not None:
            row["ratio"] /= best
        row["fraction_of_floor"] = row["floor_ms"] / best
    return list(rows.values())


def _run_all(cases: Iterable[Case], only: str, session: harness.Session) -> list[dict[str, Any]]:
    """Runs the cases whose label contains ``only``; returns their rows."""
    rows: list[dict[str, Any]] = []
    for case in cases:
        if only in case.label:
            rows += run(case, session)
            print(f"{case.label}: checked and timed", flush=True)
    return rows


def _print_tables(rows: list[dict[str, Any]], ratios: dict[str, str]) -> None:
    """Prints a table for each op that has rows; ``ratios`` contains the titles of the ratio columns."""
    for op, ratio in ratios.items():
        chosen = [row for row in rows if row["op"] == op]
        if not chosen:
            continue
        names = list(dict.fromkeys(name for row in chosen for name in row["ms"]))
        titles = {"two_pass_ms": "two-pass", "l2_ms": "L2"}
        extra = [key for key in titles if any(row.get(key) is not None for row in chosen)]
        lines = []
        for row in chosen:
            label = " ".join(filter(None, (row["size"], row["points"], row["pass"])))
            times = [f"{row['ms'][name].median:.3f}" if name in row["ms"] else "-" for name in names]
            factor = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
            bounds = [f"{row['floor_ms']:.3f}", f"{100 * row['fraction_of_floor']:.0f}%"]
            bounds += ["-" if row.get(key) is None else f"{row[key]:.3f}" for key in extra]
            lines.append([label, *times, factor, *bounds])
        header = [f"{op}, ms", *names, ratio, "floor", "reached", *(titles[key] for key in extra)]
        print("\n" + harness.table(header, lines))


def installed(module: str) -> bool:
    """Whether a package is installed."""
    return importlib.util.find_spec(module) is not None


def name_missing(packages: Mapping[str, str]) -> None:
    """Prints the packages, by their modules, that are not installed and therefore not compared."""
    for module, package in packages.items():
        if not installed(module):
            print(f"not compared, because it is not installed: {package}")


def run_benchmark(
    name: str,
    description: str | None,
    cases: Callable[[torch.device], Iterator[Case]],
    ratios: dict[str, str],
    arguments: list[str] | None,
) -> None:
    """Parses the command line, runs the cases for its device, and prints their tables last."""
    options = harness.parser(description).parse_args(arguments)
    session = harness.start(options)
    rows = _run_all(cases(session.device), options.only, session)
    session.announce()
    _print_tables(rows, ratios)
    if options.json:
        session.write(options.json, name, description, rows)
