"""The public classes: what they are made of, and what they compute, against plain formulas in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import reference
import torch
from fuzz_marching import boxes, occupied_cells
from fuzz_property import Subject, same_integers
from fuzz_values import all_placed, devices, numbers, seeds
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import voxelfield
from voxelfield import ops
from voxelfield.fields.decoders import SHDecoder
from voxelfield.fields.density import DensityActivation
from voxelfield.rendering.lens import LENS_TERMS

_SIZES = st.sampled_from([1, 2, 3, 5, 8])
_PADDINGS = st.sampled_from(["border", "zeros", "reflection"])
_COUNTS = st.sampled_from([0, 1, 2, 9])


@st.composite
def _places(draw: st.DrawFn, box: Tensor, count: int) -> Tensor:
    """World positions in and about a box."""
    unit = draw(numbers((count, 3), torch.float64, -0.4, 1.4))
    return (box[0] + unit * (box[1] - box[0])).float()


def _in_unit_cube(points: Tensor, aabb: Tensor) -> Tensor:
    low, high = aabb.float().double()
    return (points - low) / (high - low)


def _sampled(features: Tensor, unit: Tensor, padding: str) -> Tensor:
    """Samples at points (..., 3): modules take any number of dimensions before the last, the reference just one."""
    assert unit.shape[-1] == 3
    values = reference.sample_grid(features.detach().double(), unit.reshape(-1, 3), padding)
    return values.reshape(*unit.shape[:-1], values.shape[1])


def device_of(x: Any) -> torch.device:
    """The device that goes with an argument, which may be anything."""
    return x.device if isinstance(x, Tensor) and not x.is_meta else torch.device("cpu")


# --- grids


@st.composite
def _grid_arguments(draw: st.DrawFn) -> dict[str, Any]:
    box, device = draw(boxes()), draw(devices)
    resolution = draw(st.sampled_from([draw(_SIZES), (draw(_SIZES), draw(_SIZES), draw(_SIZES))]))
    arguments: dict[str, Any] = {
        "resolution": resolution,
        "channels": draw(st.sampled_from([1, 3, 4, 33])),
        "aabb": box,
    }
    arguments |= {
        "padding": draw(_PADDINGS),
        "fill": draw(st.sampled_from([0.0, 1.5])),
        "points": draw(_places(box, draw(_COUNTS))),
    }
    return draw(all_placed(arguments, device))


def _grid(points: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)  # of the CPU's generator, as for the reference
    return voxelfield.VoxelGrid(**options, init_std=1.0).to(device_of(points))(points)


def _grid_reference(points: Tensor, aabb: Tensor, padding: str, **options: Any) -> Tensor:
    torch.manual_seed(3)
    grid = voxelfield.VoxelGrid(aabb=aabb, padding=padding, **options, init_std=1.0)
    return _sampled(grid.features, _in_unit_cube(points, aabb), padding)


@st.composite
def _pyramid_arguments(draw: st.DrawFn) -> dict[str, Any]:
    box, device = draw(boxes()), draw(devices)
    resolutions = draw(st.sampled_from([(2,), (2, 4), (3, 6, 12), (4, 8)]))
    arguments: dict[str, Any] = {"resolutions": resolutions, "channels": draw(st.sampled_from([1, 2, 4])), "aabb": box}
    arguments |= {"reduce": draw(st.sampled_from(["concat", "sum"])), "padding": draw(_PADDINGS)}
    arguments |= {"init_range": draw(st.sampled_from([0.5, 1.0])), "points": draw(_places(box, draw(_COUNTS)))}
    return draw(all_placed(arguments, device))


def _pyramid(points: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(3)  # of the CPU's generator, as for the reference
    return voxelfield.VoxelPyramid(**options).to(device_of(points))(points)


def _pyramid_reference(points: Tensor, aabb: Tensor, padding: str, reduce: str, **options: Any) -> Tensor:
    torch.manual_seed(3)
    pyramid = voxelfield.VoxelPyramid(aabb=aabb, padding=padding, reduce=reduce, **options)
    unit = _in_unit_cube(points, aabb)
    each = [_sampled(level, unit, padding) for level in pyramid.levels]
    return torch.stack(each).sum(0) if reduce == "sum" else torch.cat(each, dim=-1)


# --- optimizer


@st.composite
def _adam_arguments(draw: st.DrawFn) -> dict[str, Any]:
    shape = (draw(_SIZES), draw(_SIZES), draw(_SIZES), draw(st.sampled_from([1, 3, 4, 33])))
    arguments: dict[str, Any] = {
        "values": draw(numbers(shape, torch.float32)).to(draw(devices)),
        "lr": draw(st.sampled_from([0.0, 1e-3, 0.1])),
        "betas": draw(st.sampled_from([(0.9, 0.999), (0.0, 0.5)])),
        "eps": draw(st.sampled_from([1e-8, 1e-4])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1])),
        "l2_penalty": draw(st.sampled_from([0.0, 0.1])),
    }
    return arguments


def _adam(values: Tensor, **options: Any) -> Tensor:
    param = values.clone() if isinstance(values, Tensor) else [values]
    optimizer = voxelfield.GridAdam([param], **options)
    for _ in range(2):
        param.grad = (3 * param.detach()).sin()
        optimizer.step()
    return param.detach()


def _adam_reference(values: Tensor, **options: Any) -> Tensor:
    param, m, v = values, torch.zeros_like(values), torch.zeros_like(values)
    for step in (1, 2):
        param, m, v = reference.adam_step(param, m, v, (3 * param).sin(), step=step, **options)
    return param


# --- cameras


@st.composite
def _camera_arguments(draw: st.DrawFn) -> dict[str, Any]:
    count, box = draw(st.sampled_from([1, 2, 4])), draw(boxes())
    generator = torch.Generator().manual_seed(draw(seeds))
    rotations, _ = torch.linalg.qr(torch.randn(count, 3, 3, generator=generator, dtype=torch.float64))
    c2w = torch.eye(4, dtype=torch.float64).repeat(count, 1, 1)
    c2w[:, :3, :3], c2w[:, :3, 3] = rotations, torch.randn(count, 3, generator=generator, dtype=torch.float64)
    rays = draw(_COUNTS)
    arguments: dict[str, Any] = {
        "c2w": c2w.float(),
        "intrinsics": draw(numbers((count, 4), torch.float32, 3.0, 9.0)),
        "width": draw(_SIZES),
        "height": draw(_SIZES),
        "camera_index": torch.randint(0, count, (rays,), generator=generator),
        "pixels": draw(numbers((rays, 2), torch.float32, 0.0, 8.0)),
        "aabb": box,
    }
    return draw(all_placed(arguments, draw(devices)))


def _cast(camera_index: Tensor, pixels: Tensor, aabb: Tensor, **options: Any) -> tuple[Tensor, ...]:
    rays = voxelfield.Cameras(**options).rays(camera_index, pixels, aabb)
    return rays.origins, rays.directions


def _cast_reference(
    c2w: Tensor, intrinsics: Tensor, camera_index: Tensor, pixels: Tensor, **rest: Any
) -> tuple[Tensor, ...]:
    assert c2w.shape[1:] == (4, 4)
    pose, lens = c2w[camera_index], intrinsics[camera_index]
    x, y = ((pixels - lens[:, 2:]) / lens[:, :2]).unbind(-1)
    local = torch.stack((x, -y, -torch.ones_like(x)), dim=-1)
    return pose[:, :3, 3], F.normalize((pose[:, :3, :3] @ local[..., None])[..., 0], dim=-1)


@st.composite
def _lens_arguments(draw: st.DrawFn) -> dict[str, Any]:
    count = draw(st.sampled_from([1, 3]))
    # So little of it that no polynomial turns down within the image.
    coefficients = draw(numbers((1, 6), torch.float32, -0.02, 0.02))
    arguments = {
        "model": draw(st.sampled_from(["perspective", "fisheye", "rational", "fisheye624"])),
        "coefficients": coefficients,
        "pixels": draw(numbers((count, 2), torch.float32, 1.0, 7.0)),
    }
    return draw(all_placed(arguments, draw(devices)))


def _through_lens(model: str, coefficients: Tensor, pixels: Tensor) -> Tensor:
    lens = voxelfield.Lens(model, coefficients)
    device = device_of(pixels)
    camera = torch.eye(4, device=device)[None], torch.tensor([[8.0, 8.0, 4.0, 4.0]], device=device), 8, 8
    index = torch.zeros(
        len(pixels) if isinstance(pixels, Tensor) and pixels.dim() else 1, dtype=torch.int64, device=device
    )
    box = torch.tensor([[-1.0] * 3, [1.0] * 3], device=device)
    return voxelfield.Cameras(*camera, lens).rays(index, pixels, box).directions


def _same_pixels_through_lens(arguments: dict[str, Any], actual: Any, expected: Any) -> None:
    """The other way round, from rays to pixels, the formulas are closed."""
    right, up, backward = actual[0].detach().cpu().double().unbind(-1)
    rays = torch.stack((right, -up, -backward), dim=-1)
    terms = dict(zip(LENS_TERMS[arguments["model"]], arguments["coefficients"][0].tolist(), strict=False))
    pixels = 8 * reference.lens_points(rays, arguments["model"], terms) + 4
    torch.testing.assert_close(pixels, expected[0], rtol=0, atol=1e-3)


def _pixels_of(model: str, coefficients: Tensor, pixels: Tensor) -> Tensor:
    assert coefficients.shape[0] == 1
    assert pixels.dim() == 2
    return pixels


# --- occupied space


@st.composite
def _occupancy_arguments(draw: st.DrawFn) -> dict[str, Any]:
    cells = draw(occupied_cells())
    return {"resolution": tuple(cells.shape), "aabb": draw(boxes()), "allowed": cells.to(draw(devices))}


def _restricted(resolution: Any, aabb: Tensor, allowed: Tensor) -> tuple[Tensor, ...]:
    occupancy = voxelfield.OccupancyGrid(resolution, aabb)
    occupancy = occupancy.to(device_of(allowed))
    occupancy.restrict(allowed, occupancy.aabb)
    words, (x, y, z) = occupancy.bits
    assert words.shape == tuple(-(-n // 4) for n in (x, y, z))
    return occupancy.occupied, occupancy.empty_distance


def _restricted_reference(resolution: Any, aabb: Tensor, allowed: Tensor) -> tuple[Tensor, ...]:
    assert tuple(allowed.shape) == ((resolution,) * 3 if isinstance(resolution, int) else tuple(resolution))
    return allowed, reference.empty_distance(allowed, 32)


# --- fields and what draws them


@st.composite
def _field_arguments(draw: st.DrawFn) -> dict[str, Any]:
    box = draw(boxes())
    count = draw(_COUNTS)
    arguments: dict[str, Any] = {
        "degree": draw(st.integers(0, 3)),
        "resolution": draw(_SIZES),
        "aabb": box,
        "points": draw(_places(box, count)),
        "directions": F.normalize(draw(numbers((count, 3), torch.float32)), dim=-1),
    }
    return draw(all_placed(arguments, draw(devices)))


def _make_field(degree: int, resolution: int, aabb: Tensor, device: Any = "cpu") -> Any:
    torch.manual_seed(4)
    decoder = SHDecoder(degree, DensityActivation(scale=5.0, initial=1.0))
    return voxelfield.RadianceField(voxelfield.VoxelGrid(resolution, decoder.channels, aabb, init_std=1.0), decoder).to(
        device
    )


def _evaluate(points: Tensor, directions: Tensor, **options: Any) -> tuple[Tensor, ...]:
    device = device_of(points)
    return _make_field(**options, device=device)(points, directions)


def _evaluate_reference(points: Tensor, directions: Tensor, **options: Any) -> tuple[Tensor, ...]:
    field = _make_field(**options)
    features = reference.sample_grid(field.grid.features.detach().double(), _in_unit_cube(points, options["aabb"]))
    density, rgb = field.decoder.double()(features, directions, torch.arange(len(points)))
    return density.double(), rgb.double()


@st.composite
def _callback_arguments(draw: st.DrawFn) -> dict[str, Any]:
    box = draw(boxes())
    return draw(all_placed({"aabb": box, "points": draw(_places(box, draw(_COUNTS)))}, draw(devices)))


def _ask_callback(aabb: Tensor, points: Tensor) -> Tensor:
    def density(points: Tensor) -> Tensor:
        return points.square().sum(-1)

    def color(points: Tensor, directions: Tensor) -> Tensor:
        return points.abs()

    return voxelfield.CallbackField(density, color, aabb).density(points)


@st.composite
def _view_arguments(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "step": draw(st.sampled_from([0.11, 0.4])),
        "min_transmittance": draw(st.sampled_from([0.0, 1e-4, 0.2])),
        "min_weight": 0.0,
        "background": draw(numbers((3,), torch.float32, 0.0)).to(draw(devices)),
        "supersampling": draw(st.sampled_from([1, 2])),
        "pixel_averaging": draw(st.sampled_from(["linear_light", "encoded"])),
        "chunk": draw(st.sampled_from([1, 7, 1000])),
        "camera": draw(st.integers(0, 1)),
    }


_BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


def _two_cameras() -> tuple[Tensor, Tensor]:
    c2w = torch.eye(4).repeat(2, 1, 1)
    c2w[:, 2, 3] = torch.tensor([2.5, 0.3])
    return c2w, torch.tensor([[6.0, 6.0, 2.3, 1.6], [3.0, 4.0, 2.0, 1.5]])


def _draw_view(
    step: float, min_transmittance: float, min_weight: float, background: Tensor, camera: int, **options: Any
) -> Tensor:
    device = device_of(background)
    field, occupancy = _make_field(1, 4, _BOX, device), voxelfield.OccupancyGrid(3, _BOX).to(device)
    settings = voxelfield.RenderSettings(step, min_transmittance, min_weight)
    renderer = voxelfield.FieldRenderer(field, occupancy, settings, background, **options)
    return renderer.view(voxelfield.Cameras(*_two_cameras(), 5, 3).to(device), camera).rgb


def _draw_view_reference(
    step: float,
    min_transmittance: float,
    min_weight: float,
    background: Tensor,
    supersampling: int,
    pixel_averaging: str,
    camera: int,
    chunk: int,
) -> Tensor:
    field = _make_field(1, 4, _BOX)
    cameras = voxelfield.Cameras(*_two_cameras(), 5, 3).enlarged(supersampling)
    cameras = replace(cameras, across=supersampling)
    rays = cameras.image_rays(camera, field.aabb)
    walk = (rays.origins, rays.directions, rays.near, rays.far, torch.ones(3, 3, 3, dtype=torch.bool), field.aabb, step)
    positions, t, dt, index, offsets, _ = ops.march_rays(*walk)
    density, rgb = field(positions, rays.directions[index])
    samples = [x.detach().double() for x in (density, rgb, t, dt)]
    color, opacity, *_ = reference.composite(*samples, offsets, min_transmittance)
    side, height, width = supersampling, cameras.height // supersampling, cameras.width // supersampling
    if side == 1:
        return (color + (1 - opacity)[:, None] * background).view(height, width, 3)
    tiles = [
        x.view(height, side, width, side, -1).transpose(1, 2).reshape(height * width * side**2, -1)
        for x in (color, opacity)
    ]
    return reference.pixel_colors(tiles[0], tiles[1][:, 0], background, side**2, pixel_averaging).view(height, width, 3)


def _same_pixels(arguments: dict[str, Any], actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0].cpu().double(), expected[0], rtol=1e-3, atol=2e-3)


MODULES = {
    "VoxelGrid": Subject(_grid, _grid_arguments(), _grid_reference, extreme=("points", "aabb"), rows=("points",)),
    "VoxelPyramid": Subject(
        _pyramid,
        _pyramid_arguments(),
        _pyramid_reference,
        extreme=("points", "aabb"),
        rows=("points",),
        names=("resolution",),
    ),
    "GridAdam": Subject(
        _adam,
        _adam_arguments(),
        _adam_reference,
        extreme=("values",),
        rows=("values",),
        names=("params", "optimizer", "param_groups"),
    ),
    "Cameras": Subject(
        _cast,
        _camera_arguments(),
        _cast_reference,
        extreme=("c2w", "intrinsics", "pixels", "aabb"),
        names=("Cameras",),
    ),
    "Lens": Subject(
        _through_lens,
        _lens_arguments(),
        _pixels_of,
        compare=_same_pixels_through_lens,
        extreme=("coefficients", "pixels"),
        rows=("pixels",),
        names=("Lens", "camera_index"),
    ),
    "OccupancyGrid": Subject(
        _restricted, _occupancy_arguments(), _restricted_reference, compare=same_integers, extreme=("aabb",)
    ),
    "RadianceField": Subject(
        _evaluate,
        _field_arguments(),
        _evaluate_reference,
        extreme=("points", "directions"),
        rows=("points", "directions"),
    ),
    "CallbackField": Subject(
        _ask_callback,
        _callback_arguments(),
        lambda aabb, points: points.square().sum(-1),
        extreme=("points", "aabb"),
        rows=("points",),
    ),
    "FieldRenderer": Subject(
        _draw_view,
        _view_arguments(),
        _draw_view_reference,
        compare=_same_pixels,
        extreme=("background",),
        names=("index",),
    ),
}
"""By public name; ``RenderSettings`` is an argument of ``FieldRenderer``."""
