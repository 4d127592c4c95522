"""Times integrals along rays, and their gradients, against the packages that people use for them, in one run.

    python benchmarks/line_integrals.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

- "radiographs": cone beams through a smooth volume that vanishes at its faces, 8 of 512 x 512 pixels through 256^3 on a
  GPU and 2 of 64 x 64 through 48^3 on a CPU, next to the renderers of DiffDRR, ``Siddon``, whose voxels are constant,
  and ``Trilinear``, with samples a voxel apart, and ``F.grid_sample`` at such samples of each ray, summed; and on a
  GPU, without gradients, next to the projector ``cuda3d`` of the ASTRA toolbox, with samples a plane of voxels apart.
- "backprojections", on a GPU: the transpose of these radiographs, next to the ASTRA toolbox, which looks up the
  detector for each voxel, so that its result is not quite the transpose of its projections; and "iterations": the
  projections and then their backprojection, which each iteration of SIRT or conjugate gradients consists of.
- "sinogram": parallel beams in a plane, next to the ``linear`` projector of the ASTRA toolbox, on a CPU; its "backward"
  is backprojection alone.

"forward" runs without a graph. "backward" computes the projections and the gradients with respect to the volume and to
the pose of each projection, a matrix from which the rays are computed in the timed call. Ours and ASTRA take all
projections at once; the others store their samples and therefore take one projection after the other. Values and
gradients are compared in the run: sums at samples are within 2 % of the exact integrals. Of gradients in a volume or an
image, that holds for means over blocks of 6 vertices along each axis, away from the faces. Gradients of ``Siddon``,
which are those of constant voxels, are not compared.

The floor is the time to move the volume, the rays and the projections once (backward: the volume three times, as its
gradient is zeroed and written, and the rest twice; backprojections: the volume twice; iterations: the volume three
times and the rest twice) at the copy bandwidth measured in the same run. "L2" is the time to move the sectors that each
16 x 2 pixels touch in each cell that they cross, estimated from some of them, at the bandwidth measured within the L2
cache; what a cell has in common with the one before is counted twice. On a GPU, a second table has the peak memory
above the inputs.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _floors
import _harness as harness
import torch
import torch.nn.functional as F
from _alternatives import OURS, Inputs, Pass, Prepared, as_tuple
from _compare import Case, Errors, Results, installed, name_missing, run_benchmark
from torch import Tensor

from voxelfield import ops

PACKAGES = {"diffdrr": "diffdrr==0.6.1", "astra": "astra-toolbox==2.5.0"}
RATIOS = {
    "radiographs": "best of others / ours",
    "backprojections": "astra / ours",
    "iterations": "astra / ours",
    "sinogram": "astra / ours",
}
TOLERANCE = 0.02  # of sums at samples
_CHECKED = 96  # pixels on a side of the part of each image that is compared with float64

Projector = Callable[[Tensor, Tensor], Tensor]


# --- inputs ---------------------------------------------------------------------------------------------------------


def smooth_volume(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns blobs (..., 1) that vanish at the faces of the unit cube."""
    axes = [torch.linspace(0, 1, n, device=device) if n > 1 else torch.full((1,), 0.5, device=device) for n in size]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1)
    total = torch.zeros_like(points[..., :1])
    for _ in range(6):
        middle, width = 0.3 + 0.4 * torch.rand(3, device=device), 0.12 + 0.05 * torch.rand((), device=device)
        total += torch.exp(-((points - middle) / width).square().sum(-1, keepdim=True))
    inside = [x * (1 - x) for x, n in zip(points.unbind(-1), size, strict=True) if n > 1]
    return total * torch.stack(inside, -1).mul(40).clamp(max=1).prod(-1, keepdim=True)


def poses_around(count: int, device: torch.device) -> Tensor:
    """Returns matrices (V, 3, 4) from a detector's coordinates to those of the unit cube, on an arc around it."""
    angles = 0.3 + torch.arange(count, device=device) * (math.pi / count) + 0.01 * torch.rand(count, device=device)
    ahead = torch.stack((angles.cos(), angles.sin(), 0.1 * torch.ones_like(angles)), dim=-1)
    ahead = F.normalize(ahead, dim=-1)
    right = F.normalize(torch.linalg.cross(ahead, torch.tensor([[0.0, 0.0, 1.0]], device=device)), dim=-1)
    rotation = torch.stack((right, torch.linalg.cross(ahead, right), ahead), dim=-1)
    return torch.cat((rotation, 0.5 - 2.5 * ahead[:, :, None]), dim=-1)


def pixels_of(side: int, device: torch.device) -> Tensor:
    """Returns the pixels (side^2, 3) of a detector, 5 away from the source, in its coordinates."""
    along = (torch.arange(side, device=device) + 0.5) / side - 0.5
    x, y = torch.meshgrid(3 * along, 3 * along, indexing="xy")
    return torch.stack((x, y, torch.full_like(x, 5.0)), dim=-1).flatten(0, 1)


def rays_of(pose: Tensor, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Returns sources (..., 1, 3) and targets (..., N, 3)."""
    source = pose[..., 3].unsqueeze(-2)
    return source, source + pixels @ pose[..., :3].mT


def radiograph_inputs(size: int, side: int, count: int, device: torch.device) -> Inputs:
    """Makes a volume, poses, and the gradient of the projections (V, side^2, 1)."""
    values = torch.rand(count, side * side, 1, device=device)
    return Inputs((smooth_volume((size,) * 3, device),), poses_around(count, device), values)


# --- alternatives ---------------------------------------------------------------------------------------------------


def image_rays(pixels: Tensor, columns: int, pose: Tensor) -> tuple[Tensor, Tensor]:
    """Returns origins (..., 1, 1, 3) and directions (..., rows, columns, 3) as our ops take images."""
    source, target = rays_of(pose, pixels)
    return source.unsqueeze(-2), (target - source).unflatten(-2, (-1, columns))


def project(pixels: Tensor, columns: int, grid: Tensor, pose: Tensor) -> Tensor:
    """Integrates with our op."""
    return ops.integrate_rays(grid, *image_rays(pixels, columns, pose)).flatten(-3, -2)


def project_samples(pixels: Tensor, grid: Tensor, pose: Tensor) -> Tensor:
    """Sums samples of each ray within the cube, at most a voxel apart."""
    source, target = rays_of(pose, pixels)
    direction = target - source
    ends = torch.stack(((0 - source) / direction, (1 - source) / direction))
    first, last = ends.amin(0).amax(-1, keepdim=True), ends.amax(0).amin(-1, keepdim=True)
    length = (last - first).clamp(min=0)
    steps = math.ceil(math.sqrt(3) * grid.shape[0])
    t = first + length * ((torch.arange(steps, device=grid.device) + 0.5) / steps)
    points = source[..., None, :] + t[..., None] * direction[..., None, :]
    volume = grid.movedim(-1, 0)[None]
    sampled = F.grid_sample(volume, (2 * points - 1).flip(-1)[None, None], align_corners=True, padding_mode="zeros")
    return sampled[0, 0, 0].sum(-1, keepdim=True) * length / steps * direction.norm(dim=-1, keepdim=True)


def project_diffdrr(renderer: str, pixels: Tensor, grid: Tensor, pose: Tensor) -> Tensor:
    """Integrates with a renderer of DiffDRR, whose coordinates are voxels."""
    module: Any = getattr(importlib.import_module("diffdrr.renderers"), renderer)()
    source, target = rays_of(pose[None], pixels)
    length = (target - source).norm(dim=-1)[:, None]
    last = grid.shape[0] - 1
    options: dict[str, Any] = {}
    if renderer == "Trilinear":
        # Between the faces of the ball around the cube.
        near, far = ((2.5 + sign * math.sqrt(3) / 2) / 5.9 for sign in (-1, 1))
        options = {"alphamin": near, "alphamax": min(far * 1.2, 1.0)}
        options["n_points"] = math.ceil((options["alphamax"] - near) * 5.9 * last)
    image: Tensor = module(grid[..., 0], source * last, target * last, length, **options)
    return image[0, 0, :, None]


def compared(result: Results) -> Results:
    """Returns what is compared of gradients: means over blocks of the volume away from its faces, and the others."""
    return F.avg_pool3d(result[0][1:-1, 1:-1, 1:-1].movedim(-1, 0), 6), *result[1:]


def prepare_at_once(op: Projector, inputs: Inputs) -> Prepared:
    """Prepares an op that takes all projections in one call."""
    leaves = [x.detach().requires_grad_() for x in (inputs.sources[0], inputs.points)]

    def train() -> tuple[Tensor, ...]:
        with torch.enable_grad():
            return torch.autograd.grad(op(*leaves), leaves, inputs.values)

    return {"forward": Pass(partial(op, inputs.sources[0], inputs.points)), "backward": Pass(train, compared)}


def prepare_one_by_one(op: Projector, comparable: bool, inputs: Inputs) -> Prepared:
    """Prepares an op that takes one projection after the other; gradients are ours if they are ``comparable``."""
    (grid,), poses, values = inputs

    def forward() -> Tensor:
        return torch.stack([op(grid, pose) for pose in poses])

    def train() -> tuple[Tensor, ...]:
        volume, each = grid.detach().requires_grad_(), []
        for pose, value in zip(poses, values, strict=True):
            leaf = pose.detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(op(volume, leaf), value)
            each.append(leaf.grad)
        assert volume.grad is not None
        return volume.grad, torch.stack([x for x in each if x is not None])

    shown: Callable[[Any], Results] = compared if comparable else (lambda result: ())
    return {"forward": Pass(forward), "backward": Pass(train, shown)}


def astra_projector(inputs: Inputs) -> Any:
    """Returns ASTRA's projector on a GPU for the radiographs of :func:`radiograph_inputs`."""
    astra: Any = importlib.import_module("astra")
    (grid,), poses, values = inputs
    size, side = grid.shape[0], math.isqrt(values.shape[1])
    half = 0.5 * size / (size - 1)  # its voxels are around our vertices
    volume = astra.create_vol_geom(size, size, size, *[-half, half] * 3)
    right, down, ahead, source = (poses.double() - poses.new_tensor([0, 0, 0, 0.5])).cpu().unbind(-1)
    cones = torch.cat((source, source + 5 * ahead, 3 / side * right, 3 / side * down), dim=-1)
    return astra.create_projector("cuda3d", astra.create_proj_geom("cone_vec", side, side, cones.numpy()), volume)


def prepare_astra_radiographs(inputs: Inputs) -> Prepared:
    """Prepares ASTRA's projections of a volume, whose axes are in the opposite order."""
    project_into = importlib.import_module("astra.experimental").direct_FP3D
    projector, volume = astra_projector(inputs), inputs.sources[0][..., 0].permute(2, 1, 0).contiguous()
    count, side = len(inputs.points), math.isqrt(inputs.values.shape[1])

    def forward() -> Tensor:
        images = volume.new_empty(side, count, side)
        project_into(projector, volume, images)
        return images

    return {"forward": Pass(forward, lambda images: (images.permute(1, 0, 2).reshape(count, -1, 1),))}


def prepare_astra_backprojections(project_too: bool, inputs: Inputs) -> Prepared:
    """Prepares ASTRA's backprojection of given values, or of the radiographs, which are projected in the call."""
    calls: Any = importlib.import_module("astra.experimental")
    projector, volume = astra_projector(inputs), inputs.sources[0][..., 0].permute(2, 1, 0).contiguous()
    count, side = len(inputs.points), math.isqrt(inputs.values.shape[1])
    given = inputs.values.view(count, side, side).permute(1, 0, 2).contiguous()

    def forward() -> Tensor:
        images, sums = torch.empty_like(given) if project_too else given, torch.empty_like(volume)
        if project_too:
            calls.direct_FP3D(projector, volume, images)
        calls.direct_BP3D(projector, sums, images)
        return sums

    return {"forward": Pass(forward, lambda sums: compared((sums.permute(2, 1, 0)[..., None],)))}


def prepare_backprojections(pixels: Tensor, project_too: bool, inputs: Inputs) -> Prepared:
    """Prepares our backprojection of given values, or of the radiographs, which are projected in the call."""
    (grid,), side = inputs.sources, math.isqrt(inputs.values.shape[1])
    rays = image_rays(pixels.to(inputs.points.dtype), side, inputs.points)
    given = inputs.values.unflatten(1, (side, side))

    def forward() -> Tensor:
        values = ops.integrate_rays(grid, *rays) if project_too else given
        return ops.backproject_rays(values, *rays, grid.shape[:3])

    return {"forward": Pass(forward, lambda sums: compared((sums,)))}


def prepare_astra(size: int, detectors: int, inputs: Inputs) -> Prepared:
    """Prepares the ``linear`` projector of ASTRA in a plane; pixels of its volume are our vertices."""
    astra: Any = importlib.import_module("astra")
    (grid,), angles, values = inputs
    # Our x, y are its columns, and its rows from the last one.
    geometry = astra.create_vol_geom(size, size, *([-0.5 * size / (size - 1), 0.5 * size / (size - 1)] * 2))
    beams = astra.create_proj_geom("parallel", 1.0 / detectors, detectors, angles.double().numpy())
    projector = astra.create_projector("linear", beams, geometry)
    image = grid[:, :, 0, 0].T.flip(0).contiguous().numpy()
    rows = values.view(len(angles), detectors).contiguous().numpy()

    def run(call: Callable[..., Any], data: Any) -> Any:
        number, result = call(data, projector)
        astra.data2d.delete(number)
        return result

    def summed(result: Any) -> Results:
        return means(torch.from_numpy(result).flip(0).T)

    return {
        "forward": Pass(partial(run, astra.create_sino, image), lambda x: (torch.from_numpy(x).flatten()[:, None],)),
        "backward": Pass(partial(run, astra.create_backprojection, rows), summed),
    }


def prepare_sinogram(detectors: int, inputs: Inputs) -> Prepared:
    """Prepares our ops for parallel beams in a plane."""
    (grid,), angles, values = inputs
    along = torch.stack((-angles.sin(), angles.cos(), torch.zeros_like(angles)), dim=-1)[:, None]
    across = torch.stack((angles.cos(), angles.sin(), torch.zeros_like(angles)), dim=-1)[:, None]
    offsets = (torch.arange(detectors) + 0.5) / detectors - 0.5
    origins = (0.5 + offsets[:, None] * across).flatten(0, 1)
    directions = along.expand(-1, detectors, -1).flatten(0, 1)
    backward = partial(ops.backproject_rays, values, origins, directions, grid.shape[:3], -math.inf)
    return {
        "forward": Pass(partial(ops.integrate_rays, grid, origins, directions, -math.inf)),
        "backward": Pass(backward, lambda summed: means(summed[:, :, 0, 0])),
    }


def means(image: Tensor) -> Results:
    """Returns what is compared of a backprojection: means over blocks away from the edges."""
    return (F.avg_pool2d(image[None, 1:-1, 1:-1], 6),)


# --- cases ----------------------------------------------------------------------------------------------------------


def float64_errors(pixels: Tensor, inputs: Inputs, results: dict[str, Results]) -> Errors:
    """Compares our values in a part of each image, and the gradients of these alone, with float64."""
    (grid,), poses, _ = Inputs(tuple(x.double() for x in inputs.sources), *(x.double() for x in inputs[1:]))
    side = math.isqrt(len(pixels))
    width = min(_CHECKED, side)
    first = torch.randint(side - width + 1, (2,), device=pixels.device)
    rows, columns = first[:, None] + torch.arange(width, device=pixels.device)
    some = (rows[:, None] * side + columns).flatten()
    exact = prepare_at_once(
        partial(project, pixels[some].double(), width), Inputs((grid,), poses, inputs.values[:, some].double())
    )
    again = prepare_at_once(
        partial(project, pixels[some], width), Inputs(inputs.sources, inputs.points, inputs.values[:, some])
    )
    pairs = zip(again["backward"].call(), exact["backward"].call(), strict=True)
    return {
        "forward": harness.relative_error(
            results["forward"][0][:, some].double(), as_tuple(exact["forward"].call())[0]
        ),
        "backward": max(harness.relative_error(ours.double(), right) for ours, right in pairs),
    }


def touched_bytes(pixels: Tensor, inputs: Inputs) -> int:
    """Estimates from some rays the sectors that each 16 x 2 pixels touch in all cells that they cross."""
    (grid,), poses, _ = inputs
    size, count, side = grid.shape[0], len(pixels), math.isqrt(len(pixels))
    warps, place = torch.randint(count // 32, (64, 1), device=grid.device), torch.arange(32, device=grid.device)
    rows, columns = warps // (side // 2) * 16 + place // 2, warps % (side // 2) * 2 + place % 2
    some = (rows * side + columns).flatten()
    granule, total = harness.granule(grid.device), 0
    for pose in poses:
        source, target = rays_of(pose, pixels[some])
        direction = F.normalize(target - source, dim=-1)
        ends = torch.stack(((0 - source) / direction, (1 - source) / direction))
        first, last = ends.amin(0).amax(-1), ends.amax(0).amin(-1)
        crossed = ((last - first).clamp(min=0) * direction.abs().sum(-1) * (size - 1)).ceil()
        steps = int(crossed.max())
        t = first + (last - first).clamp(min=0) * ((torch.arange(steps, device=grid.device)[:, None] + 0.5) / steps)
        points = source + t[..., None] * direction
        cell = (points * (size - 1)).floor().long().clamp(0, size - 2)
        vertex = (cell[..., 0] * size + cell[..., 1]) * size + cell[..., 2]
        corners = [(i * size + j) * size + k for i in (0, 1) for j in (0, 1) for k in (0, 1)]
        sectors = torch.stack([(vertex + corner) * grid.element_size() // granule for corner in corners], dim=-1)
        sectors = torch.where((last > first)[:, None], sectors, -1).view(steps, len(warps), 32 * 8).sort(dim=-1).values
        distinct = (sectors[..., 1:] != sectors[..., :-1]).sum() + (sectors[..., 0] >= 0).sum()
        total += int(distinct) * granule * (count // 32) // len(warps)
    return total


def radiograph_case(size: int, side: int, count: int, device: torch.device) -> Case:
    """Describes radiographs of a volume."""
    pixels = pixels_of(side, device)
    others: dict[str, Callable[[Inputs], Prepared]] = {}
    if installed("diffdrr"):
        others["DiffDRR siddon"] = partial(prepare_one_by_one, partial(project_diffdrr, "Siddon", pixels), False)
        others["DiffDRR trilinear"] = partial(prepare_one_by_one, partial(project_diffdrr, "Trilinear", pixels), True)
    others["grid_sample"] = partial(prepare_one_by_one, partial(project_samples, pixels), True)
    if device.type == "cuda" and installed("astra"):
        others["astra"] = prepare_astra_radiographs

    def floor(inputs: Inputs) -> _floors.Floor:
        (grid,), _, values = inputs
        streams = 7 * values.nbytes  # origins, directions and the integral
        cached = streams + touched_bytes(pixels, inputs) if grid.is_cuda else None
        return _floors.Floor(streams + grid.nbytes, 2 * streams + 3 * grid.nbytes, cached=cached)

    return Case(
        "radiographs",
        f"{count} x {side}^2 through {size}^3",
        "",
        partial(radiograph_inputs, size, side, count, device),
        {OURS: partial(prepare_at_once, partial(project, pixels, side)), **others},
        tuple(others),
        floor,
        partial(float64_errors, pixels),
        TOLERANCE,
    )


def backprojection_case(size: int, side: int, count: int, project_too: bool, device: torch.device) -> Case:
    """Describes the transpose of radiographs, or what an iteration of a reconstruction computes."""
    prepare = partial(prepare_backprojections, pixels_of(side, device), project_too)

    def errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
        wide = Inputs((inputs.sources[0].double(),), inputs.points.double(), inputs.values.double())
        exact = prepare(wide)["forward"]
        return {"forward": harness.relative_error(results["forward"][0].double(), exact.to_ours(exact.call())[0])}

    def floor(inputs: Inputs) -> _floors.Floor:
        moved = 7 * inputs.values.nbytes + 2 * inputs.sources[0].nbytes
        moved += project_too * (7 * inputs.values.nbytes + inputs.sources[0].nbytes)
        return _floors.Floor(moved, moved)

    return Case(
        "iterations" if project_too else "backprojections",
        f"{count} x {side}^2 into {size}^3",
        "",
        partial(radiograph_inputs, size, side, count, device),
        {OURS: prepare, "astra": partial(prepare_astra_backprojections, project_too)},
        ("astra",),
        floor,
        errors,
        TOLERANCE,
    )


def sinogram_case(size: int, detectors: int, views: int, device: torch.device) -> Case:
    """Describes a sinogram of an image."""

    def make() -> Inputs:
        angles = 0.01 + torch.arange(views) * (math.pi / views)
        return Inputs((smooth_volume((size, size, 1), device),), angles, torch.rand(views * detectors, 1))

    def errors(inputs: Inputs, results: dict[str, Results]) -> Errors:
        wide = Inputs((inputs.sources[0].double(),), inputs.points.double(), inputs.values.double())
        exact = prepare_sinogram(detectors, wide)
        return {
            what: harness.relative_error(results[what][0].double(), timed.to_ours(timed.call())[0])
            for what, timed in exact.items()
        }

    def floor(inputs: Inputs) -> _floors.Floor:
        moved = 7 * inputs.values.nbytes + inputs.sources[0].nbytes
        return _floors.Floor(moved, moved)

    return Case(
        "sinogram",
        f"{views} x {detectors} of {size}^2",
        "",
        make,
        {OURS: partial(prepare_sinogram, detectors), "astra": partial(prepare_astra, size, detectors)},
        ("astra",),
        floor,
        errors,
        TOLERANCE,
    )


def cases(device: torch.device) -> Iterator[Case]:
    """Yields every case for a device."""
    if device.type == "cuda":
        yield radiograph_case(256, 512, 8, device)
        if installed("astra"):
            for project_too in (False, True):
                yield backprojection_case(256, 512, 8, project_too, device)
    else:
        yield radiograph_case(48, 64, 2, device)
        if installed("astra"):
            yield sinogram_case(128, 192, 90, device)


@torch.no_grad()
def print_memory(device: torch.device) -> None:
    """Prints the peak memory of each alternative, above its inputs."""
    lines = []
    for case in cases(device):
        inputs = case.make()
        for name, prepare in case.alternatives.items():
            if name == "astra":  # it allocates its memory without torch
                continue
            prepared = prepare(inputs)
            row = [f"{case.op}, {name}"]
            for timed in prepared.values():
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                timed.call()
                row.append(f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.0f}")
            row += [""] * (3 - len(row))
            lines.append(row)
    print("\n" + harness.table(["peak memory, MiB", "forward", "backward"], lines))


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, runs the cases, and prints the tables last."""
    name_missing(PACKAGES)
    run_benchmark("line_integrals", __doc__, cases, RATIOS, arguments)
    device = harness.start(harness.parser(__doc__).parse_args(arguments)).device
    if device.type == "cuda":
        print_memory(device)


if __name__ == "__main__":
    main()
