"""Times a training step with plain functions against that of the field that they wrap, with the same samples.

    python benchmarks/callbacks.py [--device cpu|cuda] [--threads N] [--quick] [--only SUBSTRING] [--json PATH]

Each kind of field (``model=pyramid``, ``sh``, ``dense`` with their defaults up to a finest level of 256 on a GPU, 64
on a CPU) is rendered in three ways. The forward and backward pass of ``render`` are timed, without an optimizer:

- "field": the ``RadianceField`` itself, as training renders it. A pyramid is marched by a single kernel.
- "class": a class with only the members of ``voxelfield.fields.field.Field``, whose ``sample`` is the field's own. Its
  additional time is the cost of the general path.
- "functions": a ``CallbackField`` of two functions, the field's density and the field's colour. Both of them read the
  grid, so it is read once more in the forward and in the backward pass. The additional time compared with "class" is
  due to this work, which is inherent in the functions, and to the calls.

The scene is a shell of uniform density, so that only some of a ray's candidate samples are visible: rays end in the
front of the shell, and its back is never seen. "room" says whether the host waits for the number of samples or uses a
fixed capacity, as in training on a GPU. Fields read working copies of their grids, float16 on a GPU and float32 on a
CPU, as in training. Colours and the gradients of all parameters are compared in the run. Gradients accumulate over the
calls, so no time is spent on clearing them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import _harness as harness
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.fields.callbacks import CallbackField
from voxelfield.fields.field import Field, RadianceField
from voxelfield.grids.adam import GridAdam
from voxelfield.models.dense import DenseConfig, SoftplusDensityConfig
from voxelfield.models.model_config import ModelConfig
from voxelfield.models.pyramid import ExponentialDensityConfig, PyramidConfig
from voxelfield.models.sh import SHConfig, SHDensityConfig
from voxelfield.ops import PackedSamples
from voxelfield.rendering.march import Capacity, RenderSettings
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.rays import Rays, intersect_aabb
from voxelfield.rendering.render import Rendering, render

BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))
DENSITY = 60.0
SHELL = (0.45, 0.75)  # radii
RAYS = {"cuda": 1 << 14, "cpu": 1 << 11}
FINEST = {"cuda": 256, "cpu": 64}
SH_LEVELS = {"cuda": [32, 64, 128, 256], "cpu": [16, 32, 64]}
# Relative errors of colours and gradients. On a GPU a kernel marches in 16 bits, so samples at thresholds differ.
TOLERANCE = {"cuda": 5e-2, "cpu": 1e-3}


class Members(Field):
    """A field with only the members that rendering requires.

    Args:
        field: The field that it wraps.
    """

    def __init__(self, field: RadianceField) -> None:
        self._field = field

    @property
    def aabb(self) -> Tensor:
        """The field's box."""
        return self._field.aabb

    def density(self, points: Tensor) -> Tensor:
        """Returns the field's density."""
        return self._field.density(points)

    def sample(self, samples: PackedSamples, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the field's density and colour."""
        return self._field.sample(samples, directions)


def functions(field: RadianceField) -> CallbackField:
    """Wraps a field's density and colour as functions that share nothing."""
    return CallbackField(field.density, lambda points, directions: field(points, directions)[1], field.aabb)


def make_fields(device: torch.device) -> Iterator[tuple[str, RadianceField]]:
    """Yields every kind of field, with working copies."""
    models: tuple[ModelConfig, ...] = (
        PyramidConfig(density=ExponentialDensityConfig(initial=DENSITY)),
        SHConfig(resolutions=SH_LEVELS[device.type], density=SHDensityConfig(initial=DENSITY)),
        DenseConfig(density=SoftplusDensityConfig(initial=DENSITY)),
    )
    for model in models:
        field = model.build(torch.tensor(BOX), [FINEST[device.type]], device)
        copies = field.grid.enable_copies(torch.float16 if device.type == "cuda" else torch.float32)
        if device.type == "cuda":  # without an optimizer, copies would be rounded anew after each backward pass
            optimizer = GridAdam(field.grid.levels)
            for level, copy in zip(field.grid.levels, copies, strict=True):
                optimizer.set_working(level, copy)
        yield model.kind, field


def make_shell(device: torch.device) -> OccupancyGrid:
    """Marks the cells of the shell."""
    occupancy = OccupancyGrid(128, BOX).to(device)
    axis = (torch.arange(128, device=device) + 0.5) / 64 - 1
    radius = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij")).norm(dim=0)
    occupancy.occupied.copy_((radius > SHELL[0]) & (radius < SHELL[1]))
    return occupancy


def make_rays(device: torch.device) -> Rays:
    """Casts rays from a sphere around the box through points of the shell's inside."""
    count = RAYS[device.type]
    origins = 4 * F.normalize(torch.randn(count, 3, device=device), dim=-1)
    directions = F.normalize(1.2 * torch.rand(count, 3, device=device) - 0.6 - origins, dim=-1)
    return Rays(origins, directions, *intersect_aabb(origins, directions, torch.tensor(BOX, device=device)))


def step(
    field: Field, rays: Rays, occupancy: OccupancyGrid, settings: RenderSettings, capacity: Capacity | None
) -> Rendering:
    """Renders rays and accumulates the gradients of their squared colours and opacities in the parameters."""
    rendering = render(field, rays, occupancy, settings, capacity=capacity)
    (rendering.rgb.square().sum() + rendering.opacity.square().sum()).backward()
    return rendering


def results(
    field: Field,
    trained: RadianceField,
    rays: Rays,
    occupancy: OccupancyGrid,
    settings: RenderSettings,
    capacity: Capacity | None,
) -> tuple[Rendering, Tensor]:
    """Takes one step; returns the rendering and the gradients of all parameters, flattened."""
    for parameter in trained.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    rendering = step(field, rays, occupancy, settings, capacity)
    return rendering, torch.cat([p.grad.flatten() for p in trained.parameters() if p.grad is not None])


def measure(
    kind: str, field: RadianceField, rays: Rays, occupancy: OccupancyGrid, room: str, session: harness.Session
) -> dict[str, Any]:
    """Compares and times the three variants for one kind of field."""
    device = session.device
    settings = RenderSettings(step=0.8 * 2 / FINEST[device.type])
    forms: dict[str, Field] = {"field": field, "class": Members(field), "functions": functions(field)}
    counted, _ = results(forms["class"], field, rays, occupancy, settings, None)
    assert counted.candidates is not None
    candidates, visible = int(counted.candidates), len(counted.samples.positions)
    capacity = Capacity(candidates * 5 // 4, visible * 5 // 4) if room == "fixed" else None
    row: dict[str, Any] = {"kind": kind, "room": room, "rays": len(rays), "candidates": candidates, "visible": visible}
    arguments = (rays, occupancy, settings, capacity)
    tolerance = TOLERANCE[device.type]
    expected, expected_grads = results(field, field, *arguments)
    for name, form in forms.items():
        rendering, grads = results(form, field, *arguments)
        shown = int(rendering.samples.ray_offsets[-1])
        errors = {
            "samples": abs(shown - visible) / visible,
            "rgb": harness.relative_error(rendering.rgb.detach(), expected.rgb.detach()),
            "gradient": harness.relative_error(grads, expected_grads),
        }
        for what, error in errors.items():
            harness.check(f"{kind}, {room}, {name}: {what}", error, tolerance)
        timing = harness.measure([partial(step, form, *arguments)], device, session.how)
        row[name] = {"samples": shown, "errors": errors, "ms": timing}
    return row


def as_table(rows: list[dict[str, Any]]) -> str:
    """Formats a line for each kind and room; ratios are relative to the field itself."""
    lines = []
    for row in rows:
        times = {name: row[name]["ms"].median for name in ("field", "class", "functions")}
        ratios = [f"{times[name] / times['field']:.2f}x" for name in ("class", "functions")]
        sizes = [str(row[key]) for key in ("rays", "candidates", "visible")]
        shown = [f"{time:.3f}" for time in times.values()]
        lines.append([f"{row['kind']}, {row['room']}", *sizes, *shown, *ratios])
    header = ["kind, room", "rays", "candidates", "visible", "field, ms", "class", "functions", "class", "functions"]
    return harness.table(header, lines)


def main(arguments: list[str] | None = None) -> None:
    """Parses the command line, measures, and prints the table last."""
    options = harness.parser(__doc__).parse_args(arguments)
    session = harness.start(options)
    torch.manual_seed(0)
    occupancy, rays = make_shell(session.device), make_rays(session.device)
    rows = []
    for kind, field in make_fields(session.device):
        for room in ("waited for", "fixed"):
            if options.only in f"{kind}, {room}":
                rows.append(measure(kind, field, rays, occupancy, room, session))
    session.announce()
    print("\n" + as_table(rows))
    if options.json:
        session.write(options.json, "callbacks", __doc__, rows)


if __name__ == "__main__":
    main()
