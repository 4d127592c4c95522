"""Times signed distances, their meshes and lists of voxels against the packages that people use for them, in one run.

    python benchmarks/distances.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

- "distance": a grid of distances at points, next to the linear ``CachedSDF`` of pytorch-volumetric, inside the box and
  without its gradients, which are those of the nearest voxel; next to ``F.grid_sample`` with the distance
  to the box; and next to ``signed_distance`` of trimesh, of the grid's mesh, on a CPU, which is the distance to its
  triangles and not what the grid interpolates.
- "redistance": a grid to distances, next to ``scipy.ndimage.distance_transform_edt`` inside and outside, which is right
  to half a voxel, on a CPU.
- "mesh": the triangles of a grid, next to ``skimage.measure.marching_cubes``, on a CPU.
- "voxels": features of a list of voxels, on a sphere, at points beside them, next to eight look-ups by
  ``torch.searchsorted`` with their gathers.

Every alternative gets the same new inputs: values and gradients are compared in the run, and ours with float64 as well.
The forward pass runs without a graph; the backward pass is the gradient with respect to the points, and to the features
of voxels, on a retained graph. A package that is not installed is named in the output.

- The floor is the time to move the required bytes at the copy bandwidth measured in the same run: points, values and
  grid once, and twice in the backward pass.
"""

from __future__ import annotations

import importlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import _floors
import _harness as harness
import torch
import torch.nn.functional as F
from _alternatives import OURS, Inputs, Pass, Prepared, gradients
from _compare import Case, Errors, Results, installed, name_missing, run_benchmark
from torch import Tensor

from voxelfield import ops

# Packages to compare with: their modules, and what pip calls them.
PACKAGES = {
    "pytorch_volumetric": "pytorch-volumetric==0.6.0",
    "rtree": "trimesh rtree",
    "scipy": "scipy",
    "skimage": "scikit-image",
}
RATIOS = dict.fromkeys(("distance", "redistance", "mesh", "voxels"), "best of others / ours")
SIDE = {"cpu": 96, "cuda": 256}
COUNT = {"cpu": 1 << 16, "cuda": 1 << 21}
RADIUS = 0.6
FEW = 1 << 10  # points for trimesh, which takes milliseconds for each


def box(like: Tensor) -> Tensor:
    """Returns the box of all grids, (2, 3)."""
    return like.new_tensor([[-1.0] * 3, [1.0] * 3])


def sphere(side: int, device: torch.device) -> Tensor:
    """Returns the distances to a sphere with bumps, (side, side, side, 1), new in each call."""
    axis = torch.linspace(-1, 1, side, device=device)
    points = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"), dim=-1)
    bumps = 0.02 * torch.sin(6 * points + 6 * torch.rand(3, device=device)).sum(dim=-1)
    return (points.norm(dim=-1) - RADIUS + bumps)[..., None]


def passes(op: Callable[..., Tensor], leaves: tuple[Tensor, ...], values: Tensor) -> Prepared:
    """Prepares the forward pass of an op, and the gradients in its leaves."""
    leaves = tuple(leaf.detach().requires_grad_() for leaf in leaves)
    forward = partial(op, *leaves)
    return {"forward": Pass(forward), "backward": Pass(partial(gradients, forward(), leaves, values))}


def float64_errors(prepare: Callable[[Inputs], Prepared], inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares our results with another alternative's in float64."""
    wide = Inputs(
        tuple(x.double() if x.is_floating_point() else x for x in inputs.sources), *(x.double() for x in inputs[1:])
    )
    with torch.enable_grad():
        exact = {what: timed.to_ours(timed.call()) for what, timed in prepare(wide).items()}
    return {
        what: max(harness.relative_error(a.double(), b) for a, b in zip(results[what], exact[what], strict=True))
        for what in results
    }


def floor(inputs: Inputs) -> _floors.Floor:
    """Counts the bytes of all inputs and values."""
    moved = sum(x.nbytes for x in (*inputs.sources, inputs.points, inputs.values))
    return _floors.Floor(moved, 2 * moved)


# --- distances ------------------------------------------------------------------------------------------------------


def distance_inputs(side: int, count: int, reach: float, device: torch.device) -> Inputs:
    """Makes distances and points within ``reach`` of the box's half edge, off the faces of cells."""
    points = reach * (2 * torch.rand(count, 3, device=device) - 1)
    u = (points + 1) / 2 * (side - 1)
    u = u.floor() + (u - u.floor()).clamp(0.01, 0.99)
    return Inputs((sphere(side, device),), 2 * u / (side - 1) - 1, torch.randn(count, 1, device=device))


def prepare_ours(inputs: Inputs) -> Prepared:
    """Prepares ``sample_distance``."""
    grid, aabb = inputs.sources[0], box(inputs.points)  # a copy to the device, in the call, would wait for it
    sample = cast(Callable[..., Tensor], ops.sample_distance)
    return passes(lambda points: sample(grid, points, aabb), (inputs.points,), inputs.values)


def prepare_torch(inputs: Inputs) -> Prepared:
    """Prepares ``F.grid_sample`` and the distance to the box."""
    volume = inputs.sources[0].permute(3, 0, 1, 2)[None].contiguous()

    def sample(points: Tensor) -> Tensor:
        where = points.flip(-1).view(1, -1, 1, 1, 3)
        inside = F.grid_sample(volume, where, padding_mode="border", align_corners=True).view(-1, 1)
        squared = (points - points.clamp(-1, 1)).square().sum(dim=-1, keepdim=True)
        return inside + torch.where(squared > 0, torch.where(squared > 0, squared, 1.0).sqrt(), 0.0)

    return passes(sample, (inputs.points,), inputs.values)


def prepare_volumetric(inputs: Inputs) -> Prepared:
    """Prepares ``CachedSDF`` with the values of the grid."""
    module = importlib.import_module("pytorch_volumetric")
    grid = inputs.sources[0]

    class Known(module.ObjectFrameSDF):  # type: ignore[name-defined]
        """The distances of the grid, which the cache reads once."""

        def __call__(self, points: Tensor, compute_grad: bool = True) -> tuple[Tensor, Tensor]:
            """Returns the distances of all vertices."""
            return grid.view(1, -1).cpu(), torch.zeros(1, len(points), 3)

        def surface_bounding_box(self, **_: Any) -> Tensor:
            """Returns the box of the grid."""
            return torch.tensor([[-1.0, 1.0]] * 3)

    with tempfile.TemporaryDirectory() as folder:
        cached = module.CachedSDF(
            "grid", 2 / (len(grid) - 1), [(-1.0, 1.0)] * 3, Known(), device=grid.device, method="linear",
            cache_path=str(Path(folder) / "cache.pkl"),
        )  # fmt: skip
    call = partial(cached, inputs.points, compute_grad=False)
    return {"forward": Pass(lambda: call()[0], lambda value: (value.view(-1, 1),))}


def prepare_trimesh(inputs: Inputs) -> Prepared:
    """Prepares the distance to the grid's mesh, which is above 0 inside."""
    trimesh = importlib.import_module("trimesh")
    vertices, faces = ops.marching_cubes(inputs.sources[0], box(inputs.points))
    query = trimesh.proximity.ProximityQuery(trimesh.Trimesh(vertices.numpy(), faces.numpy()))
    points = inputs.points.numpy()
    return {"forward": Pass(lambda: query.signed_distance(points), lambda d: (-torch.from_numpy(d).float()[:, None],))}


def prepare_ours_of_distances(inputs: Inputs) -> Prepared:
    """Prepares sampling of true distances, made once."""
    aabb = box(inputs.points)
    grid = ops.redistance(inputs.sources[0], aabb)
    return {"forward": Pass(lambda: ops.sample_distance(grid, inputs.points, aabb))}


def distance_cases(device: torch.device) -> Iterator[Case]:
    """Yields the cases of points in and around a grid."""
    side, count = SIDE[device.type], COUNT[device.type]
    for name, reach in (("inside", 0.99), ("around", 1.6)):
        others: dict[str, Callable[[Inputs], Prepared]] = {"grid_sample": prepare_torch}
        if installed("pytorch_volumetric") and name == "inside":
            others["pytorch-volumetric"] = prepare_volumetric
        make = partial(distance_inputs, side, count, reach, device)
        errors = partial(float64_errors, prepare_torch)
        yield Case("distance", f"{side}^3", name, make, {OURS: prepare_ours, **others}, tuple(others), floor, errors)
    if device.type == "cpu" and installed("rtree"):
        yield Case(
            "distance", f"{side // 2}^3 mesh", f"{FEW} inside", partial(distance_inputs, side // 2, FEW, 0.9, device),
            {OURS: prepare_ours_of_distances, "trimesh": prepare_trimesh}, ("trimesh",), floor,
            partial(float64_errors, prepare_ours_of_distances), tolerance=0.02,
        )  # fmt: skip


# --- whole grids ----------------------------------------------------------------------------------------------------


def prepare_redistance(inputs: Inputs) -> Prepared:
    """Prepares ``redistance``."""
    return {"forward": Pass(partial(ops.redistance, inputs.sources[0], box(inputs.points)))}


def prepare_edt(inputs: Inputs) -> Prepared:
    """Prepares SciPy's distance transform, from both sides, moved by half a voxel."""
    transform = importlib.import_module("scipy.ndimage").distance_transform_edt
    values = inputs.sources[0][..., 0].numpy()
    step = 2 / (len(values) - 1)

    def distances() -> Any:
        inside = values < 0
        outer, inner = transform(~inside, sampling=step), transform(inside, sampling=step)
        return outer - inner + step / 2 * (inside * 1.0 - ~inside)

    return {"forward": Pass(distances, lambda found: (torch.from_numpy(found).float()[..., None],))}


def prepare_mesh(inputs: Inputs) -> Prepared:
    """Prepares ``marching_cubes``."""
    call = partial(ops.marching_cubes, inputs.sources[0], box(inputs.points))
    return {"forward": Pass(call, lambda mesh: (mesh[0],))}


def prepare_skimage(inputs: Inputs) -> Prepared:
    """Prepares ``marching_cubes`` of scikit-image, with vertices in world units."""
    march = importlib.import_module("skimage.measure").marching_cubes
    values = inputs.sources[0][..., 0].numpy()
    call = partial(march, values, 0.0, spacing=(2 / (len(values) - 1),) * 3)
    return {"forward": Pass(call, lambda mesh: (torch.from_numpy(mesh[0].copy()) - 1,))}


def grid_cases(device: torch.device) -> Iterator[Case]:
    """Yields the cases that read a whole grid."""
    on_cpu, side = device.type == "cpu", SIDE[device.type]
    pairs = {
        "redistance": (prepare_redistance, "scipy", "scipy", prepare_edt, 0.1),
        "mesh": (prepare_mesh, "skimage", "scikit-image", prepare_skimage, 1e-4),
    }
    for op, (ours, module, name, prepare, tolerance) in pairs.items():
        others = {name: prepare} if on_cpu and installed(module) else {}
        yield Case(
            op, f"{side}^3", "", partial(distance_inputs, side, 1, 0.9, device), {OURS: ours, **others}, tuple(others),
            floor, partial(float64_errors, ours), tolerance,
        )  # fmt: skip


# --- lists of voxels ------------------------------------------------------------------------------------------------


def voxel_inputs(side: int, channels: int, count: int, device: torch.device) -> Inputs:
    """Makes the voxels of a sphere in no order, with features, and points beside them."""
    shell = (sphere(side, device)[..., 0].abs() < 2 / side).nonzero()
    coords = shell[torch.randperm(len(shell), device=device)]
    chosen = coords[torch.randint(len(coords), (count,), device=device)]
    points = (chosen + 0.51 + 0.98 * torch.rand(count, 3, device=device)) / side  # off the faces of cells
    features = torch.randn(len(coords), channels, device=device)
    return Inputs((features, coords), points, torch.randn(count, channels, device=device))


def prepare_voxels(side: int, inputs: Inputs) -> Prepared:
    """Prepares ``sample_voxels``, with an index made before."""
    features, coords = inputs.sources
    index = ops.VoxelIndex(coords, side)
    return passes(lambda f, p: ops.sample_voxels(f, index, p), (features, inputs.points), inputs.values)


def prepare_search(side: int, inputs: Inputs) -> Prepared:
    """Prepares a search for each corner among sorted keys, made before."""
    features, coords = inputs.sources
    keys, order = ((coords[:, 0] * side + coords[:, 1]) * side + coords[:, 2]).sort()
    corners = torch.tensor(list(itertools.product((0, 1), repeat=3)), device=coords.device)

    def sample(rows: Tensor, points: Tensor) -> Tensor:
        place = points * side - 0.5
        first = place.detach().floor()
        total = torch.zeros(len(points), rows.shape[1], dtype=rows.dtype, device=rows.device)
        for upper in corners:
            weight = torch.where(upper == 1, place - first, 1 + first - place).prod(dim=1)
            x, y, z = (first.long() + upper).unbind(1)
            wanted = (x * side + y) * side + z
            at = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
            known = keys[at] == wanted
            total = total + torch.where(known, weight, 0.0)[:, None] * rows[order[at]]
        return total

    return passes(sample, (features, inputs.points), inputs.values)


def voxel_cases(device: torch.device) -> Iterator[Case]:
    """Yields lists of voxels with few and many channels."""
    side, count = 2 * SIDE[device.type], COUNT[device.type]
    for channels, points in itertools.product((8, 32), (count, 8 * count if device.type == "cuda" else 4 * count)):
        make = partial(voxel_inputs, side, channels, points, device)
        alternatives: dict[str, Any] = {
            OURS: partial(prepare_voxels, side),
            "searchsorted": partial(prepare_search, side),
        }
        yield Case(
            "voxels", f"{side}^3 x {channels}", f"{points} points", make,
            alternatives, ("searchsorted",), floor, partial(float64_errors, partial(prepare_search, side)), 1e-3,
        )  # fmt: skip


# --- the run --------------------------------------------------------------------------------------------------------


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every case for a device."""
    yield from distance_cases(device)
    yield from grid_cases(device)
    yield from voxel_cases(device)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs the cases, and prints the tables last."""
    name_missing(PACKAGES)
    run_benchmark("distances", __doc__, cases, RATIOS, arguments)
    name_missing(PACKAGES)


if __name__ == "__main__":
    main()
