"""Times the trilinear ops beside what they replace, on the machine at hand, in one run.

    python benchmarks/trilinear.py [--device cpu|cuda] [--threads N] [--quick] [--json PATH]

``sample_trilinear`` stands beside ``F.grid_sample`` (contiguous NCDHW grid, and channels-last-3d) and the plain formula
in torch (gather eight corners, weight, sum); ``trilinear_interpolate`` beside the formula of the published tutorial and
a batched matrix product. Everything is float32, and every alternative computes the same function of the same fresh
random inputs: outputs and gradients are compared in the run, and ours with float64 as well.

- Forward runs without a graph. Backward is ``torch.autograd.grad`` to the grid (or the features) alone, on a retained
  graph, the same for every alternative; it includes allocating and zeroing its result.
- ``F.grid_sample`` gets its coordinates already scaled to [-1, 1] and reversed; that conversion is not timed.
- Point sets: ``camera`` is rays x 256 samples, ordered along the ray between entry and exit of the unit cube, the eyes
  on a sphere of radius 2 about its centre, aimed at uniform points inside it; ``random`` is uniform.
- The floor is the time that the bytes which must move take at the copy bandwidth measured in the same run: points
  read, output written and each touched sector of the grid (32 bytes on a GPU, 64 on a CPU) read once; backward: values
  and points read, the gradient written once in full, and its touched sectors read and written. A copy on a CPU also
  reads the lines that it overwrites, which is not counted: a pass that mostly reads can come in under the floor there.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import _harness as harness
import torch
import torch.nn.functional as F
from torch import Tensor

from voxelfield.ops import sample_trilinear, trilinear_interpolate

SAMPLES_PER_RAY = 256
OURS = "voxelfield"
# float32 arithmetic; alternatives round the coordinate differently, which shows at fine grids.
TOLERANCE = 1e-4
CORNERS = tuple(itertools.product((0, 1), repeat=3))


class Inputs(NamedTuple):
    """One input set: what is sampled, where, and the gradient that comes back."""

    source: Tensor
    points: Tensor
    values: Tensor


class Prepared(NamedTuple):
    """One alternative on one input set, in that alternative's own layout."""

    source: Tensor
    forward: Callable[[], Tensor]
    values: Tensor
    to_rows: Callable[[Tensor], Tensor] = lambda output: output
    to_source: Callable[[Tensor], Tensor] = lambda gradient: gradient


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: an op at one size, what competes with it, what it must move, and a float64 check."""

    op: str
    size: str
    points: str
    make: Callable[[], Inputs]
    alternatives: dict[str, Callable[[Inputs], Prepared]]
    floor_bytes: Callable[[Inputs], tuple[int, int]]
    float64_errors: Callable[[Inputs, Tensor, Tensor], tuple[float, float]]

    @property
    def label(self) -> str:
        """Returns the row's name in the table."""
        return " ".join(filter(None, (self.op, self.size, self.points)))


# --- point sets -----------------------------------------------------------------------------------------------------


def random_points(count: int, device: torch.device) -> Tensor:
    """Returns uniform points of the unit cube."""
    return torch.rand(count, 3, device=device)


def camera_points(count: int, device: torch.device) -> Tensor:
    """Returns samples along rays from a sphere around the unit cube, ray by ray, near to far."""
    rays = count // SAMPLES_PER_RAY
    eyes = 0.5 + 2 * F.normalize(torch.randn(rays, 3, device=device, dtype=torch.float64), dim=1)
    directions = F.normalize(torch.rand(rays, 3, device=device, dtype=torch.float64) - eyes, dim=1)
    faces = torch.stack((-eyes / directions, (1 - eyes) / directions))
    near, far = faces.amin(0).amax(1, keepdim=True), faces.amax(0).amin(1, keepdim=True)
    steps = (torch.arange(SAMPLES_PER_RAY, device=device, dtype=torch.float64) + 0.5) / SAMPLES_PER_RAY
    t = near + (far - near) * steps
    points = eyes[:, None] + t[:, :, None] * directions[:, None]
    return points.reshape(-1, 3).float().clamp_(0, 1)


POINT_SETS = {"camera": camera_points, "random": random_points}


# --- sampling a grid ------------------------------------------------------------------------------------------------


def cells_of(points: Tensor, resolution: torch.Size) -> tuple[Tensor, Tensor]:
    """Returns each point's lower vertex (N, 3) and its position within the cell (N, 3), in the points' dtype."""
    # One axis at a time: a tensor of the resolution would have to be copied to the device, which waits for it.
    scaled = torch.stack([points[:, axis] * (n - 1) for axis, n in enumerate(resolution)], dim=1)
    lower = torch.stack([scaled[:, axis].long().clamp_(max=n - 2) for axis, n in enumerate(resolution)], dim=1)
    return lower, scaled - lower


def corner_index(lower: Tensor, resolution: torch.Size, corner: tuple[int, ...]) -> Tensor:
    """Returns the row of each point's corner in the grid seen as (X*Y*Z, C)."""
    x, y, z = (lower[:, axis] + corner[axis] for axis in range(3))
    return (x * resolution[1] + y) * resolution[2] + z


def corner_weights(fraction: Tensor) -> Tensor:
    """Returns the weights (N, 8) of the corners, in binary order."""
    low_high = torch.stack((1 - fraction, fraction))
    x, y, z = (low_high[..., axis] for axis in range(3))
    return torch.stack([x[i] * y[j] * z[k] for i, j, k in CORNERS], dim=1)


def sample_by_formula(grid: Tensor, points: Tensor) -> Tensor:
    """Samples a grid (X, Y, Z, C) in plain torch: one gather of all corners, whose backward is one scatter."""
    lower, fraction = cells_of(points, grid.shape[:3])
    index = torch.stack([corner_index(lower, grid.shape[:3], corner) for corner in CORNERS], dim=1)
    corners = grid.view(-1, grid.shape[3]).index_select(0, index.view(-1)).view(*index.shape, -1)
    return (corner_weights(fraction).unsqueeze(2) * corners).sum(1)


def prepare_sample(sample: Callable[[Tensor, Tensor], Tensor], inputs: Inputs) -> Prepared:
    """Prepares an alternative that takes our own layout."""
    grid = inputs.source.detach().requires_grad_()
    return Prepared(grid, partial(sample, grid, inputs.points), inputs.values)


def prepare_grid_sample(memory_format: torch.memory_format, inputs: Inputs) -> Prepared:
    """Prepares ``F.grid_sample``: x, y, z of our grid are its D, H, W, which it addresses in reverse."""
    volume = inputs.source.detach().permute(3, 0, 1, 2).unsqueeze(0)
    volume = volume.contiguous(memory_format=memory_format).requires_grad_()
    coordinates = (2 * inputs.points - 1).flip(1).view(1, 1, 1, -1, 3)
    values = inputs.values.t().contiguous().view(1, -1, 1, 1, inputs.points.shape[0])
    return Prepared(
        volume,
        partial(F.grid_sample, volume, coordinates, mode="bilinear", padding_mode="border", align_corners=True),
        values,
        lambda output: output[0, :, 0, 0].t(),
        lambda gradient: gradient[0].permute(1, 2, 3, 0),
    )


def grid_floor(granule: int, inputs: Inputs) -> tuple[int, int]:
    """Returns the fewest bytes that forward and backward of a grid must move."""
    grid, points, values = inputs
    resolution, vertex_bytes = grid.shape[:3], grid.shape[3] * grid.element_size()
    lower, _ = cells_of(points, resolution)
    touched = torch.zeros(resolution.numel(), dtype=torch.bool, device=grid.device)
    for corner in CORNERS:
        touched[corner_index(lower, resolution, corner)] = True
    vertices = touched.nonzero().squeeze(1)
    first, last = vertices * vertex_bytes // granule, ((vertices + 1) * vertex_bytes - 1) // granule
    sectors = torch.zeros(-(-grid.nbytes // granule), dtype=torch.bool, device=grid.device)
    for step in range(vertex_bytes // granule + 2):
        sectors[torch.minimum(first + step, last)] = True
    sector_bytes = int(sectors.sum()) * granule
    streams = points.nbytes + values.nbytes
    return streams + sector_bytes, streams + grid.nbytes + 2 * sector_bytes


def grid_float64_errors(inputs: Inputs, output: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Compares some of our rows, and the first and last channel of our gradient, with float64."""
    grid, points, values = inputs
    some = torch.randint(len(points), (4096,), device=points.device)
    lower, fraction = cells_of(points[some].double(), grid.shape[:3])
    flat = grid.view(-1, grid.shape[3])
    index = torch.stack([corner_index(lower, grid.shape[:3], corner) for corner in CORNERS], dim=1)
    expected = torch.einsum("nk,nkc->nc", corner_weights(fraction), flat[index].double())

    lower, fraction = cells_of(points.double(), grid.shape[:3])
    weights, channels = corner_weights(fraction), [0, grid.shape[3] - 1]
    sums = torch.zeros(flat.shape[0], 2, dtype=torch.float64, device=grid.device)
    for k, corner in enumerate(CORNERS):
        index = corner_index(lower, grid.shape[:3], corner)
        sums.index_add_(0, index, weights[:, k, None] * values[:, channels].double())
    return (
        harness.relative_error(output[some].double(), expected),
        harness.relative_error(gradient.reshape(flat.shape)[:, channels].double(), sums),
    )


def grid_case(resolution: int, channels: int, points: str, count: int, device: torch.device) -> Case:
    """Describes sampling a cubic grid."""

    def make() -> Inputs:
        grid = torch.randn(resolution, resolution, resolution, channels, device=device)
        return Inputs(grid, POINT_SETS[points](count, device), torch.randn(count, channels, device=device))

    return Case(
        "grid",
        f"{resolution}^3 x {channels}",
        points,
        make,
        {
            OURS: partial(prepare_sample, sample_trilinear),
            "grid_sample NCDHW": partial(prepare_grid_sample, torch.contiguous_format),
            "grid_sample channels-last": partial(prepare_grid_sample, torch.channels_last_3d),
            "formula": partial(prepare_sample, sample_by_formula),
        },
        partial(grid_floor, harness.granule(device)),
        grid_float64_errors,
    )


# --- points that bring their own cell -------------------------------------------------------------------------------


def cell_fraction(points: Tensor) -> Tensor:
    """Returns the position in [0, 1] of points given in [-1, 1]."""
    return (points + 1) / 2


def interpolate_by_formula(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolates cells as the published tutorial writes it in torch."""
    u, v, w = cell_fraction(points).unsqueeze(2).unbind(1)
    a, b, c, d = (1 - v) * (1 - w), (1 - v) * w, v * (1 - w), v * w
    lower = a * feats[:, 0] + b * feats[:, 1] + c * feats[:, 2] + d * feats[:, 3]
    upper = a * feats[:, 4] + b * feats[:, 5] + c * feats[:, 6] + d * feats[:, 7]
    return (1 - u) * lower + u * upper


def interpolate_by_product(feats: Tensor, points: Tensor) -> Tensor:
    """Interpolates cells by one batched matrix product of weights and features."""
    return torch.bmm(corner_weights(cell_fraction(points)).unsqueeze(1), feats).squeeze(1)


def prepare_cells(interpolate: Callable[[Tensor, Tensor], Tensor], inputs: Inputs) -> Prepared:
    """Prepares an alternative of the cell op."""
    feats = inputs.source.detach().requires_grad_()
    return Prepared(feats, partial(interpolate, feats, inputs.points), inputs.values)


def cell_floor(inputs: Inputs) -> tuple[int, int]:
    """Returns the fewest bytes that forward and backward of cells must move: each input and output once."""
    total = sum(tensor.nbytes for tensor in inputs)
    return total, total


def cell_float64_errors(inputs: Inputs, output: Tensor, gradient: Tensor) -> tuple[float, float]:
    """Compares some of our rows with float64."""
    some = torch.randint(len(inputs.points), (4096,), device=output.device)
    feats, points, values = (tensor[some].double() for tensor in inputs)
    weights = corner_weights(cell_fraction(points))
    return (
        harness.relative_error(output[some].double(), torch.einsum("nk,nkc->nc", weights, feats)),
        harness.relative_error(gradient[some].double(), weights.unsqueeze(2) * values.unsqueeze(1)),
    )


def cell_case(count: int, channels: int, device: torch.device) -> Case:
    """Describes interpolating cells."""

    def make() -> Inputs:
        return Inputs(
            torch.randn(count, 8, channels, device=device),
            2 * torch.rand(count, 3, device=device) - 1,
            torch.randn(count, channels, device=device),
        )

    return Case(
        "cells",
        f"({count}, 8, {channels})",
        "",
        make,
        {
            OURS: partial(prepare_cells, trilinear_interpolate),
            "formula": partial(prepare_cells, interpolate_by_formula),
            "bmm": partial(prepare_cells, interpolate_by_product),
        },
        cell_floor,
        cell_float64_errors,
    )


# --- the run --------------------------------------------------------------------------------------------------------


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every row for a device."""
    on_gpu = device.type == "cuda"
    resolutions = [160, 256] if on_gpu else [128]
    channels = [1, 4, 12, 28] if on_gpu else [4, 12, 28]
    count = 1 << (20 if on_gpu else 18)
    for resolution, points, width in itertools.product(resolutions, POINT_SETS, channels):
        yield grid_case(resolution, width, points, count, device)
    for cells, width in ((1024, 256), (65536, 256), (1048576, 16)):
        yield cell_case(cells, width, device)


def gradient_of(prepared: Prepared, output: Tensor) -> Tensor:
    """Returns the gradient to the grid or the features alone; the graph stays."""
    (gradient,) = torch.autograd.grad(output, prepared.source, prepared.values, retain_graph=True)
    return gradient


def check(case: Case, what: str, error: float) -> float:
    """Returns the error if it is that of float32 arithmetic; ends the run otherwise (NaN never passes)."""
    if not error < TOLERANCE:
        raise SystemExit(f"{case.label}: {what} is off by {error:.1e} (relative, tolerance {TOLERANCE:.0e})")
    return error


def run(case: Case, device: torch.device, how: harness.Effort, bandwidth: float) -> list[dict[str, Any]]:
    """Checks and times one case; returns its forward and its backward row."""
    first = case.make()
    count = harness.input_sets(sum(tensor.nbytes for tensor in first), device)
    sets = [first, *(case.make() for _ in range(count - 1))]
    passes: list[dict[str, Any]] = [
        {
            "op": case.op,
            "size": case.size,
            "points": case.points,
            "pass": name,
            "input_sets": count,
            "floor_bytes": moved,
            "floor_ms": 1e3 * moved / bandwidth,
            "ms": {},
            "difference_from_ours": {},
        }
        for name, moved in zip(("forward", "backward"), case.floor_bytes(first), strict=True)
    ]
    reference: tuple[Tensor, Tensor] | None = None
    for name, prepare in case.alternatives.items():
        prepared = [prepare(inputs) for inputs in sets]
        if device.type == "cuda":
            # The allocator hands this memory out again: an element left unwritten would show as NaN.
            torch.full_like(prepared[0].source, torch.nan)
        outputs = [p.forward() for p in prepared]
        results = (
            prepared[0].to_rows(outputs[0].detach()),
            prepared[0].to_source(gradient_of(prepared[0], outputs[0])),
        )
        if reference is None:
            reference = results
            for row, error in zip(passes, case.float64_errors(first, *results), strict=True):
                row["difference_from_float64"] = check(case, f"{row['pass']} against float64", error)
        for row, result, expected in zip(passes, results, reference, strict=True):
            error = harness.relative_error(result, expected)
            row["difference_from_ours"][name] = check(case, f"{row['pass']} of {name} against ours", error)
        del results

        with torch.no_grad():
            passes[0]["ms"][name] = harness.measure([p.forward for p in prepared], device, how)
        backward = [partial(gradient_of, p, output) for p, output in zip(prepared, outputs, strict=True)]
        passes[1]["ms"][name] = harness.measure(backward, device, how)
    for row in passes:
        medians = {name: timing.median for name, timing in row["ms"].items()}
        rivals = [name for name in medians if name != OURS and (case.op == "cells" or name.startswith("grid_sample"))]
        row["ratio"] = min(medians[name] for name in rivals) / medians[OURS]
        row["fraction_of_floor"] = row["floor_ms"] / medians[OURS]
    return passes


def as_table(rows: list[dict[str, Any]], op: str) -> str:
    """Formats the rows of one op."""
    chosen = [row for row in rows if row["op"] == op]
    names = list(chosen[0]["ms"])
    lines = []
    for row in chosen:
        times = [f"{row['ms'][name].median:.3f}" for name in names]
        label = " ".join(filter(None, (row["size"], row["points"], row["pass"])))
        figures = (
            f"{row['ratio']:.2f}x",
            f"{row['floor_ms']:.3f}",
            f"{100 * row['fraction_of_floor']:.0f}%",
        )
        lines.append([label, *times, *figures])
    better = "better grid_sample" if op == "grid" else "better alternative"
    return harness.table([f"{op}, ms", *names, f"{better} / ours", "floor", "reached"], lines)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs every case, prints the tables last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch finds it")
    parser.add_argument("--threads", type=int, help="of torch on the CPU; default: torch's own choice")
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--json", type=Path, help="file for every figure")
    options = parser.parse_args(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))

    if options.threads is not None:
        torch.set_num_threads(options.threads)

    how = harness.effort(device, options.quick)
    machine = harness.machine(device)
    bandwidth = harness.copy_bandwidth(device)
    rows: list[dict[str, Any]] = []
    for case in cases(device):
        rows += run(case, device, how, bandwidth)
        print(f"{case.label}: checked and timed", flush=True)

    print("\n" + ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None))
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s, bytes read and written; medians of float32 calls")
    for op in ("grid", "cells"):
        print("\n" + as_table(rows, op))
    if options.json:
        harness.write_json(
            options.json,
            {
                "benchmark": "trilinear",
                "machine": machine,
                "copy_bytes_per_second": bandwidth,
                "effort": how,
                "method": __doc__,
                "rows": rows,
            },
        )


if __name__ == "__main__":
    main()
