"""Integrals of grids along rays, their adjoint, and first crossings: what is particular to them."""

from __future__ import annotations

import math
from functools import partial

import pytest
import reference
import torch
from op_contracts import lines
from tolerances import assert_matches

from voxelfield import ops
from voxelfield.ops import _line_derivatives

LARGE = (33, 20, 47)


def rays_of(count, device="cpu", dtype=torch.float32):
    return [x.to(device, dtype) for x in lines(count).values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "labelled"), [(3, False), (3, True), (1, False)])
def test_backprojection_is_the_adjoint(device, dtype, channels, labelled):
    rays = rays_of(5000, device, dtype)
    grid = torch.randn(*LARGE, channels, device=device, dtype=dtype)
    labels = torch.randint(-1, 5, LARGE, device=device) if labelled else None
    options = {"labels": labels, "label_count": 4} if labelled else {}
    integrals = ops.integrate_rays(grid, *rays, **options)
    values = torch.randn_like(integrals)
    summed = ops.backproject_rays(values, *rays, LARGE, labels=labels)
    sides = [(a.double() * b.double()).sum() for a, b in ((integrals, values), (grid, summed))]
    # Relative to the largest that the product of the two could be.
    scale = integrals.double().norm() * values.double().norm()
    assert abs(sides[0] - sides[1]) < (1e-6 if dtype == torch.float32 else 1e-14) * scale
    assert abs(sides[0]) > 1e-4 * scale


def test_many_small_steps_give_the_same(device):
    """The integral is that of samples by ops.sample_trilinear, so many that their sum is as exact."""
    origins, directions = rays_of(50, device, torch.float64)
    grid = torch.rand(9, 5, 12, 2, device=device, dtype=torch.float64)
    t = (torch.arange(20000, device=device) + 0.5) * 2e-4  # the rays of these tests leave the cube before 4
    points = origins[:, None] + t[:, None] * directions[:, None]
    inside = ((points >= 0) & (points <= 1)).all(-1, keepdim=True)
    expected = (ops.sample_trilinear(grid, points) * inside).sum(1) * 2e-4 * directions.norm(dim=1, keepdim=True)
    torch.testing.assert_close(ops.integrate_rays(grid, origins, directions), expected, rtol=1e-3, atol=1e-3)


def pixels_of(device):
    """The rays of two cameras' images (2, 70, 67, 3) along the axes of the cube, some of which miss it."""
    rows, columns = ((torch.arange(n, device=device) + 0.5) * (1.2 / n) - 0.1 for n in (70, 67))
    targets = torch.stack(torch.meshgrid(rows, columns, torch.tensor([0.9, -0.2], device=device), indexing="ij"), -1)
    targets = torch.stack((targets[:, :, 0], targets[:, :, 1].flip(-1)))
    sources = torch.tensor([[0.4, 0.3, 4.0], [3.0, 0.6, 0.5]], device=device)[:, None, None]
    return sources.expand_as(targets), targets - sources


@pytest.mark.parametrize("order", ["rows along x", "rows along z", "rows of different cameras"])
@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_walked_in_any_order(device, order, channels):
    """Pixels are taken in tiles, which end beyond the images: rays are as those of a list, to the bit."""
    rays = [x.transpose(1, 2) if order == "rows along z" else x for x in pixels_of(device)]
    if order == "rows of different cameras":
        rays = [x.flatten(0, 2)[torch.randperm(70)[:, None] * 134 + torch.arange(134)] for x in rays]
    lists = [x.reshape(-1, 3).requires_grad_() for x in rays]
    rays = [x.detach().requires_grad_() for x in rays]
    grid = torch.randn(20, 33, 17, channels, device=device)
    values = torch.randn(*rays[0].shape[:-1], channels, device=device)
    integrals, listed = ops.integrate_rays(grid, *rays), ops.integrate_rays(grid, *lists)
    assert torch.equal(integrals.flatten(0, -2), listed)
    assert 0 < (listed == 0).float().mean() < 1
    gradients = torch.autograd.grad(integrals, rays, values), torch.autograd.grad(listed, lists, values.flatten(0, -2))
    crossings = [ops.first_crossing(grid[..., :1], *some) for some in (rays, lists)]
    for found, expected in (*zip(*gradients, strict=True), *zip(*crossings, strict=True)):
        assert torch.equal(found.reshape(expected.shape), expected)
    summed = ops.backproject_rays(values, *rays, grid.shape[:3])
    exact = ops.backproject_rays(values.double().cpu(), *(x.double().cpu() for x in rays), grid.shape[:3])
    torch.testing.assert_close(summed.double().cpu(), exact, rtol=0, atol=1e-4 * exact.abs().max().item())


@pytest.mark.parametrize("labelled", [False, True])
def test_images_with_limits_in_a_batch(device, labelled):
    rays = [*pixels_of(device), torch.rand(2, 70, 67, device=device), 1 + torch.rand(2, 70, 67, device=device)]
    lists = [x.flatten(1, 2) for x in rays]
    grid = torch.randn(2, 20, 33, 17, 1, device=device)
    labels = torch.randint(-1, 3, (20, 33, 17), device=device) if labelled else None
    options = {"labels": labels, "label_count": 3} if labelled else {}
    integrals = ops.integrate_rays(grid, *rays, **options)
    assert torch.equal(integrals.flatten(1, 2), ops.integrate_rays(grid, *lists, **options))
    summed, listed = (
        ops.backproject_rays(values, *some[:2], (20, 33, 17), *some[2:], labels=labels, batched=True)
        for values, some in ((integrals, rays), (integrals.flatten(1, 2), lists))
    )
    torch.testing.assert_close(summed, listed, rtol=0, atol=1e-5 * listed.abs().max().item())


@pytest.mark.parametrize("columns", [0, -2, 7])
def test_rows_must_divide_the_rays(device, columns):
    grid, rays = torch.rand(3, 3, 3, 1, device=device), rays_of(20, device)
    with pytest.raises(RuntimeError, match=f"columns must be positive and divide the number of rays, got {columns}"):
        torch.ops.voxelfield.integrate_rays(grid, *rays, None, None, columns, None, 1)


# origin, direction, and the integral through a grid of ones
SPECIAL = {
    "misses": ((2.0, 2.0, 2.0), (1.0, 0.1, 0.1), 0.0),
    "points away": ((0.5, 0.5, -1.0), (0.0, 0.0, -1.0), 0.0),
    "parallel and outside": ((-1.0, 1.5, 0.5), (1.0, 0.0, 0.0), 0.0),
    "parallel": ((-1.0, 0.5, 0.3), (1.0, 0.0, 0.0), 1.0),
    "backwards": ((0.4, 3.0, 0.3), (0.0, -2.0, 0.0), 1.0),
    "in a lower face": ((0.0, -1.0, 0.3), (0.0, 1.0, 0.0), 1.0),
    "in an upper face": ((1.0, -1.0, 0.3), (0.0, 1.0, 0.0), 1.0),
    "along an edge": ((1.0, 1.0, 3.0), (0.0, 0.0, -0.5), 1.0),
    "through vertices": ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0), math.sqrt(3)),
    "through vertices, down": ((2.0, -1.0, 2.0), (-4.0, 4.0, -4.0), math.sqrt(3)),
    "from inside": ((0.25, 0.5, 0.5), (0.0, 0.0, 7.0), 0.5),
    "from a face, inwards": ((0.0, 0.5, 0.5), (0.1, 0.0, 0.0), 1.0),
    "from a face, outwards": ((0.0, 0.5, 0.5), (-0.1, 0.0, 0.0), 0.0),
    "from far away": ((0.5, 0.5, -1e4), (0.0, 0.0, 1e4), 1.0),
    "short direction": ((0.5, 0.5, -1.0), (0.0, 0.0, 1e-12), 1.0),
    "nearly parallel": ((-1.0, 0.5, 0.3), (1.0, 1e-25, -1e-12), 1.0),
    "no direction": ((0.5, 0.5, 0.5), (0.0, 0.0, 0.0), 0.0),
    **{
        f"{what} {name}": ((number, 0.5, -1.0), (0.0, 0.0, 1.0), 0.0)
        if what == "origin"
        else ((0.5, 0.5, -1.0), (0.0, number, 1.0), 0.0)
        for what in ("origin", "direction")
        for name, number in (("nan", math.nan), ("inf", math.inf))
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("size", [(4, 5, 3), (1, 4, 1), (2, 2, 2)])
def test_special_rays(device, dtype, size, channels):
    """Others are as if these were not there, and nothing that is not finite comes back."""
    origins, directions, lengths = (torch.tensor(x, device=device) for x in zip(*SPECIAL.values(), strict=True))
    rays = [x.to(dtype).requires_grad_() for x in (origins, directions)]
    grid = torch.ones(*size, channels, device=device, dtype=dtype, requires_grad=True)
    integrals = ops.integrate_rays(grid, *rays)
    for name, integral, length in zip(SPECIAL, integrals, lengths, strict=True):
        torch.testing.assert_close(integral, length.to(dtype).expand(channels), rtol=0, atol=3e-6, msg=name)
    for gradient in torch.autograd.grad(integrals.sum(), [grid, *rays]):
        assert gradient.isfinite().all()
    values = torch.ones_like(integrals)
    values[lengths == 0] = math.inf
    summed = ops.backproject_rays(values, *rays, size)
    assert_matches(summed.sum((0, 1, 2)).cpu() / 16, integrals.sum(0).detach().cpu().double() / 16)
    t, hit = ops.first_crossing(grid[..., :1].detach(), *rays, level=1.0)
    assert hit.tolist() == [length > 0 for *_, length in SPECIAL.values()], "all of the grid is on the level"
    assert (t[hit] >= 0).all()


def test_limits_and_shapes(device):
    """Numbers or tensors; one source of many rays; expanded batches; any number of leading dimensions."""
    grid = torch.rand(4, 5, 6, 1, device=device)
    source, pixels = torch.tensor([0.3, 0.4, -1.0], device=device), torch.rand(3, 7, 3, device=device)
    whole = ops.integrate_rays(grid, source, pixels - source)
    assert whole.shape == (3, 7, 1)
    before = ops.integrate_rays(grid, source, pixels - source, far=1)
    after = ops.integrate_rays(grid, source, pixels - source, torch.ones(7, device=device))
    torch.testing.assert_close(before + after, whole)
    opposite = ops.integrate_rays(grid, pixels, source - pixels, -math.inf, 0)
    torch.testing.assert_close(opposite, after)
    batch = grid.expand(3, *grid.shape)
    torch.testing.assert_close(ops.integrate_rays(batch, source, pixels - source), whole)
    separate = ops.backproject_rays(whole, source, pixels - source, (4, 5, 6), batched=True)
    together = ops.backproject_rays(whole, source, pixels - source, (4, 5, 6))
    torch.testing.assert_close(separate.sum(0), together)
    half = ops.integrate_rays(grid.half(), source, pixels - source)
    assert half.dtype == torch.float16
    torch.testing.assert_close(half.float(), whole, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(33, 20), (1, 7), (7, 1), (2, 2)])
def test_images(device, dtype, size):
    """One vertex along z, for which the CPU has kernels of its own: the same as two equal ones, and the adjoint."""
    image = torch.rand(2, *size, 1, 1, dtype=dtype, device=device)
    origins, directions = (x.unflatten(0, (2, 200)) for x in rays_of(400, device, dtype))
    axes = torch.eye(3, dtype=dtype, device=device)
    origins[:, :3], directions[:, :6] = 0.3 - 2 * axes, torch.cat((axes, -axes))
    origins[:, 3:6] = 0.7 + axes  # backwards along each axis; of the others, some lie in a plane
    origins[..., 6:50, 2], directions[..., 6:50, 2] = 0.4, 0.0
    integrals = ops.integrate_rays(image, origins, directions, -1, 2)
    torch.testing.assert_close(integrals, ops.integrate_rays(image.repeat(1, 1, 1, 2, 1), origins, directions, -1, 2))
    values = torch.rand_like(integrals)
    summed = ops.backproject_rays(values, origins, directions, (*size, 1), -1, 2, batched=True)
    torch.testing.assert_close((integrals * values).sum(), (image * summed).sum(), rtol=1e-6, atol=0)
    volume = ops.backproject_rays(values, origins, directions, (*size, 2), -1, 2, batched=True)
    torch.testing.assert_close(summed, volume.sum(3, keepdim=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["whole", "limits", "labels", "batch", "adjoint"])
def test_second_derivatives(device, monkeypatch, case):
    """In grids, rays and limits, whatever the blocks in which rays are differentiated."""
    monkeypatch.setattr(_line_derivatives, "_SAMPLES", 48)  # two rays of this grid
    shape = (2, 3, 1, 5, 2) if case == "batch" else (3, 4, 5, 2)
    grid = torch.rand(shape, device=device, dtype=torch.float64)
    rays = [x.unflatten(0, (2, 3)) if case == "batch" else x for x in rays_of(6, device, torch.float64)]
    rays[0][..., :1, :] += 4 * (case == "whole")  # misses the grid
    limits = [torch.full((6,), x, device=device, dtype=torch.float64) for x in (0.1, 0.7)]
    arguments = [grid, *rays, *(limits if case in ("limits", "labels", "adjoint") else [])]
    function = ops.integrate_rays
    if case == "labels":
        labels = torch.randint(3, (3, 4, 5), device=device)
        function = partial(ops.integrate_rays, labels=labels, label_count=2)
    elif case == "adjoint":
        arguments[0] = torch.rand(6, 2, device=device, dtype=torch.float64)
        function = lambda *given: ops.backproject_rays(*given[:3], (3, 4, 5), *given[3:])  # noqa: E731
    leaves = [x.requires_grad_() for x in arguments]
    assert torch.autograd.gradgradcheck(function, leaves, nondet_tol=1e-12)


@pytest.mark.parametrize(
    ("direction", "limits"),
    [((1, 6e-17, 0), ()), ((1, 1e-14, 0.1), ()), ((0, 0, 0), (0, 1)), ((math.nan, 0, 1), (0, 1))],
)
def test_second_derivatives_of_special_rays_are_finite(device, direction, limits):
    origins = torch.tensor([[-1.0, 0.3, 0.4], [0.5, 0.3, 0.4], [math.nan, 0.3, 0.4]], device=device)
    directions = torch.tensor(direction, device=device).float().repeat(3, 1)
    rays = [origins.requires_grad_(), directions.requires_grad_()]
    grid = torch.rand(4, 5, 6, 2, device=device, requires_grad=True)
    first = torch.autograd.grad(ops.integrate_rays(grid, *rays, *limits).sum(), rays, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first), [grid, *rays])
    assert all(x.isfinite().all() for x in second)


def test_second_derivatives_of_no_grids(device):
    grid = torch.rand(0, 4, 4, 4, 2, device=device, requires_grad=True)
    rays = [torch.rand(0, 3, 3, device=device, requires_grad=True) for _ in range(2)]
    first = torch.autograd.grad(ops.integrate_rays(grid, *rays).sum(), rays, create_graph=True)
    second = torch.autograd.grad(sum(x.sum() for x in first), [grid, *rays])
    assert [x.shape for x in second] == [x.shape for x in (grid, *rays)]


def test_an_image_of_more_vertices_than_float32_counts(device):
    grid = torch.ones((1 << 24) + 9, 1, 1, 1, device=device)
    rays = torch.tensor([[-0.5, 0.5, 0.5]], device=device), torch.tensor([[1.0, 0, 0]], device=device)
    torch.testing.assert_close(ops.integrate_rays(grid, *rays), grid.new_ones(1, 1), rtol=1e-3, atol=0)
    # Half of these would be left out, but so many terms have rounding errors of their sum.
    grid = torch.linspace(0, 1, (1 << 25) + 9, device=device).view(-1, 1, 1, 1)
    torch.testing.assert_close(ops.integrate_rays(grid, *rays), grid.new_full((1, 1), 0.5), rtol=0.05, atol=0)


def test_third_derivatives_in_rays_are_refused(device):
    rays = [x.requires_grad_() for x in rays_of(6, device, torch.float64)]
    integrals = ops.integrate_rays(torch.rand(3, 4, 5, 1, device=device, dtype=torch.float64), *rays)
    (first,) = torch.autograd.grad(integrals.square().sum(), rays[0], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), rays[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="a third derivative"):
        torch.autograd.grad(second.sum(), rays[0])


def test_thin_walls_are_found(device):
    """Both roots within one cell, seen from either side, and the first of them only."""
    grid = torch.ones(2, 2, 2, 1, device=device, dtype=torch.float64)
    grid[0, 0, 0] = grid[1, 1, 1] = -1.2
    origins = torch.tensor([[-1.0, 0.05, 0.05], [2.0, 0.95, 0.95], [-1.0, 0.9, 0.1]], device=device).double()
    directions = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], device=device).double()
    t, hit = ops.first_crossing(grid, origins, directions, -0.5)
    assert hit.tolist() == [True, True, False]
    assert t[2] == math.inf
    torch.testing.assert_close(t[:2], t[:1].expand(2))
    saddle = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -20.0], device=device).double().view(2, 2, 2, 1)
    # Along this diagonal the value is 1 - 21 s (1 - s) s: below zero in the middle of the cell only.
    start = torch.tensor([[-1.0, 2.0, -1.0]], device=device).double()
    along = torch.tensor([[1.0, -1.0, 1.0]], device=device).double()
    t, hit = ops.first_crossing(saddle, start, along)
    s = float(t) - 1
    assert bool(hit)
    assert abs(1 - 21 * s * s * (1 - s)) < 1e-12
    assert s < 2 / 3


def test_a_crossing_is_on_the_level(device):
    """In float32, through many cells; the nearest one of a reference that samples the rays."""
    grid = torch.randn(*LARGE, 1, device=device).cumsum(0) + 3
    origins, directions = rays_of(300, device)
    t, hit = ops.first_crossing(grid, origins, directions)
    where = origins + t.nan_to_num(posinf=0.0)[:, None] * directions
    assert ops.sample_trilinear(grid, where)[hit].abs().max() < 2e-3
    expected = reference.first_crossing(grid.cpu().double(), origins.cpu().double(), directions.cpu().double(), 0.0)
    found = torch.where(hit, t, 7.0).cpu().double()
    assert ((found - expected.detach()).abs() < 1e-3).double().mean() > 0.98  # it may step over thin parts
    assert bool((found < expected.detach() + 1e-3).all())
