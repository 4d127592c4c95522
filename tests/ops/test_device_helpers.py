"""Functions that kernels of host and device share, compiled for the host, each against a float64 reference."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import subprocess
from pathlib import Path

import pytest
import reference
import torch
from test_lens import LENSES
from test_lens import make as make_lens
from torch import Tensor

from voxelfield._build.sources import source_root

SOURCE = Path(__file__).parents[1] / "device_helpers.cpp"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def helpers(tmp_path_factory):
    """Calls a function of the C++ file with tensors, numbers and None for a null pointer."""
    path = tmp_path_factory.mktemp("device_helpers") / "device_helpers.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-shared", "-fPIC", f"-I{source_root()}"]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))

    def call(name: str, *arguments: Tensor | int | None) -> None:
        pointers = [ctypes.c_void_p(x.data_ptr()) if isinstance(x, Tensor) else x for x in arguments]
        getattr(library, name)(*(ctypes.c_int64(x) if isinstance(x, int) else x for x in pointers))

    return call


# --- trilinear.h


def positions(size: tuple[int, ...]) -> Tensor:
    """Vertices, corners, points of faces and just beyond, between vertices, far outside, and not finite."""
    vertices = torch.cartesian_prod(*(torch.arange(n).double() / max(n - 1, 1) for n in size))
    corners = torch.tensor([*itertools.product((0.0, 1.0), repeat=3)], dtype=torch.float64)
    around = torch.rand(300, 3, dtype=torch.float64) * 2 - 0.5
    faces = around.clone()
    faces[torch.arange(300), torch.arange(300) % 3] = torch.tensor([0.0, 1.0, -1e-9, 1 + 1e-9]).double().repeat(75)
    odd = torch.full((6, 3), 0.4, dtype=torch.float64)
    odd[range(6), [0, 1, 2] * 2] = torch.tensor([math.nan, math.inf, -math.inf, 7.3, -5.2, 30.1]).double()
    return torch.cat((vertices, corners, around, faces, odd))


LOOKUPS = [
    (form, padding, aligned, mode)
    for padding in ("border", "zeros", "reflection", "periodic")
    for aligned in (True, False)
    for mode in ("linear", "nearest")
    for form in ((0,) if padding == "periodic" else (0, 1))
]
LOOKUPS += [(2, "border", True, "linear"), (2, "zeros", True, "linear")]


def sums(helpers, form: int, points: Tensor, values: Tensor, *options: object) -> Tensor:
    """The sums of values with the seven weights of the corners around points (N, 7)."""
    offsets, weights = torch.empty(len(points), 8, dtype=torch.int64), torch.empty(len(points), 8, 7).double()
    helpers("stencils", form, points, len(points), *options, offsets, weights)
    assert bool(((offsets >= 0) & (offsets < values.numel())).all())
    return (values.view(-1)[offsets][..., None] * weights).sum(1)


@pytest.mark.parametrize("size", [(5, 4, 7), (2, 2, 2), (1, 3, 1)], ids=str)
@pytest.mark.parametrize(("form", "padding", "aligned", "mode"), LOOKUPS)
def test_weights_and_their_derivatives_sample_as_the_reference(helpers, form, padding, aligned, mode, size):
    # Off the ties, of which either vertex is the nearest.
    points = positions(size) + 1e-6 * (mode == "nearest")
    values = torch.randn(*size, dtype=torch.float64)
    number = ("border", "zeros", "reflection", "periodic").index(padding)
    options = torch.tensor(size, dtype=torch.int32), number, int(aligned), int(mode == "nearest")
    found = sums(helpers, form, points, values, *options)
    points.requires_grad_()
    value = reference.sample_grid(values[..., None], points, padding, aligned, mode)[:, 0]
    assert_derivatives(found, value, points)


def assert_derivatives(found: Tensor, value: Tensor, points: Tensor) -> None:
    """The seven sums (N, 7) are the value (N,), its three slopes and its three mixed derivatives."""

    def slopes_of(values: Tensor) -> Tensor:
        if not values.requires_grad:
            return torch.zeros_like(points)
        (slopes,) = torch.autograd.grad(values.sum(), points, create_graph=True, allow_unused=True)
        return torch.zeros_like(points) if slopes is None else slopes

    slopes = slopes_of(value)
    along_x, along_y = slopes_of(slopes[:, 0]), slopes_of(slopes[:, 1])
    expected = torch.stack((value, *slopes.mT, along_x[:, 1], along_x[:, 2], along_y[:, 2]), dim=1).detach()
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


# --- ray_walk.h

# Cells of half a unit, so that positions on faces, edges and corners are exact in float32.
LOW, SIZE, STEP = (-1.0, 0.0, 2.0), (9, 6, 5), 0.125
STARTS = [(-3.0, 1.25, 3.25), (-3.0, 1.5, 3.0), (-1.0, 0.0, 2.0), (-2.0, -1.0, 1.0), (0.75, 3.25, 1.0)]  # outside
STARTS += [(0.75, 1.25, 3.25), (0.5, 1.5, 3.0)]  # in a cell, on a corner of cells
WAYS = [*itertools.product((-1.0, 0.0, 1.0), repeat=3), (1.0, 0.5, 0.25), (-0.25, 1.0, -0.5)]


def assert_hits_are_sampled_cells(helpers, ray: Tensor, occupied: Tensor, aabb: Tensor, rounding: float) -> int:
    """Returns the number of hits; positions within rounding of a face, in cells, may be in either cell."""
    size = torch.tensor(occupied.shape, dtype=torch.int32)
    origin, direction, (near, far, offset, step) = ray.double().split([3, 3, 4])
    t = near + (torch.arange(1024) + offset) * step
    cells = (origin + t[:, None] * direction - aabb[0].double()) / (aabb[1] - aabb[0]).double() * size
    counts = (t < far) & ((cells >= 0) & (cells <= size)).all(-1)
    x, y, z = cells.floor().long().clamp(min=0).minimum(size - 1).unbind(-1)
    sure = ((cells - cells.round()).abs() >= rounding).all(-1)
    apart = torch.cartesian_prod(*map(torch.arange, occupied.shape))[:, None] - occupied.nonzero()
    distances = apart.abs().amax(-1).amin(-1).clamp(max=3).to(torch.uint8)
    for empty_distances, piece in ((None, 1024), (None, 5), (distances, 1024)):
        walked, sampled = torch.zeros(2, 1024, dtype=torch.uint8)
        helpers("hits", ray, occupied, empty_distances, size, aabb, piece, walked, sampled)
        assert torch.equal(walked, sampled)
        assert torch.equal(walked[sure], (counts & occupied[x, y, z])[sure].byte())
    return int(walked.sum())


@pytest.mark.parametrize("fill", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("start", STARTS, ids=str)
def test_a_walk_along_axes_faces_and_through_corners(helpers, start, fill):
    occupied = torch.rand(SIZE) < fill
    occupied[0, 0, 0] = True
    aabb = torch.tensor([LOW, [low + n / 2 for low, n in zip(LOW, SIZE, strict=True)]])
    for way in WAYS:
        for near, far, offset in ((0.0, 20.0, 0.0), (0.0, 20.0, 0.5), (1.5, 3.0, 0.0), (3.0, 1.0, 0.0)):
            ray = torch.tensor([*start, *way, near, far, offset, STEP])
            assert_hits_are_sampled_cells(helpers, ray, occupied, aabb, 0.0)


def test_a_walk_in_any_direction(helpers):
    aabb, occupied = torch.tensor([[-0.7, 0.1, 1.3], [1.9, 0.8, 3.1]]), torch.rand(13, 4, 9) < 0.1
    found = 0
    for target in aabb[0] + torch.rand(200, 3) * (aabb[1] - aabb[0]):
        origin = target + torch.randn(3)
        direction = torch.nn.functional.normalize(target - origin, dim=0)
        ray = torch.tensor([*origin, *direction, 0.1, 9.0, float(torch.rand(())), 0.013])
        found += assert_hits_are_sampled_cells(helpers, ray, occupied, aabb, 1e-4)
    assert found > 1000


# --- lens.h


@pytest.mark.parametrize("lens", [lens for lens in LENSES if "fold" not in lens])
def test_a_lens_images_rays_as_the_formula_and_its_inverse_finds_them(helpers, lens):
    rays, expected, row = make_lens(lens, 500)
    row = None if lens == "none" else row
    points, found = torch.empty(500, 2), torch.empty(500, 3)
    helpers("lens", 0, row, (3 * rays).float(), 500, points)  # of any length
    torch.testing.assert_close(points.double(), expected, rtol=1e-5, atol=1e-5)
    helpers("lens", 1, row, expected.float(), 500, found)
    torch.testing.assert_close(torch.nn.functional.normalize(found.double(), dim=1), rays, rtol=0, atol=1e-5)
    far = 1e3 * torch.randn(500, 2)
    helpers("lens", 1, row, far, 500, found)
    assert found.isfinite().all(), "points that no ray is imaged at have a ray all the same"
