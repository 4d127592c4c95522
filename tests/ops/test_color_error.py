"""Errors of pixels' and samples' colours, against plain torch in float64."""

from __future__ import annotations

import pytest
import torch
from op_testing import leaves
from tolerances import assert_matches

from voxelfield.ops._internal.color import pixel_color_error, sample_color_error

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
# One block of a kernel and less, several, and more rows than all blocks of a launch take at once.
each_count = pytest.mark.parametrize("rows", [1, 200, 5000, 1_100_000])


def make_samples(device, rows, dtype=torch.float64, pixels=40, rays_per_pixel=4):
    weights, colors, truth = (
        torch.rand(shape, device=device, dtype=dtype) for shape in ((rows,), (rows, 3), (pixels, 3))
    )
    index = torch.randint(pixels * rays_per_pixel, (rows,), device=device)
    return weights, colors, index, truth


def expected_of_samples(weights, colors, index, truth, rays_per_pixel, rays):
    off = colors.double() - truth.double()[index // rays_per_pixel]
    return (weights.double()[:, None] * off.square()).sum() / rays


@each_dtype
@each_count
@pytest.mark.parametrize("rays_kept", [None, 100])
def test_samples(device, dtype, rows, rays_kept):
    weights, colors, index, truth = make_samples(device, rows, dtype)
    colors.requires_grad_()
    count = None if rays_kept is None else torch.tensor(rays_kept, device=device)
    error = sample_color_error(weights, colors, index, truth, 4, rays_kept=count)
    assert error.shape == ()
    assert error.dtype == dtype
    (wide,) = leaves(colors.double())
    expected = expected_of_samples(weights, wide, index, truth, 4, rays_kept or 160)
    assert_matches(error.detach(), expected.detach())
    factor = torch.tensor(-3.5, device=device, dtype=dtype)
    (grad,) = torch.autograd.grad(error, colors, factor)
    assert_matches(grad, torch.autograd.grad(expected, wide, factor.double())[0], "gradient")


@pytest.mark.covering
@each_dtype
@each_count
@pytest.mark.parametrize("part", [None, 0.0, 0.3, 1.0])
def test_pixels(device, dtype, rows, part):
    colors, truth = torch.rand(2, rows, 3, device=device, dtype=dtype)
    colors.requires_grad_()
    rays = 4 * rows if part is None else int(part * 4 * rows)
    counted = rays // 4
    with torch.no_grad():
        colors[counted:] = torch.nan
    count = None if part is None else torch.tensor(rays, device=device)
    error = pixel_color_error(colors, truth, rays_per_pixel=4, rays_kept=count)
    assert error.shape == ()
    assert error.dtype == dtype
    (wide,) = leaves(colors[:counted].double())
    expected = (wide - truth[:counted]).square().sum() / (3 * max(counted, 1))
    assert_matches(error.detach(), expected.detach())
    (grad,) = torch.autograd.grad(error, colors)
    assert_matches(grad[:counted], torch.autograd.grad(expected, wide)[0], "gradient")
    assert not grad[counted:].any()


def test_a_pixel_counts_whole_or_not_at_all(device):
    colors, truth = torch.tensor([[1.0] * 3, [3.0] * 3], device=device), torch.zeros(2, 3, device=device)
    for rays_kept, expected in ((0, 0.0), (3, 0.0), (4, 1.0), (7, 1.0), (8, 5.0), (9, 5.0), (-1, 0.0)):
        error = pixel_color_error(colors, truth, rays_per_pixel=4, rays_kept=torch.tensor(rays_kept, device=device))
        assert error.item() == expected, rays_kept


def test_samples_without_weight_count_for_nothing_whatever_their_colour(device):
    weights, colors, index, truth = make_samples(device, 50)
    expected = sample_color_error(weights, colors, index, truth, 4)
    rest = torch.full((7, 3), torch.nan, device=device, dtype=torch.float64)
    more = (
        torch.cat([weights, weights.new_zeros(7)]),
        torch.cat([colors, rest]).requires_grad_(),
        torch.cat([index, index.new_full((7,), 159)]),
        truth,
    )
    error = sample_color_error(*more, 4)
    torch.testing.assert_close(error.detach(), expected, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(error, more[1])
    assert not grad[50:].any()
    weights[3] = torch.nan
    assert sample_color_error(weights, colors, index, truth, 4).isnan()


def test_only_colours_move(device):
    weights, colors, index, truth = make_samples(device, 50)
    weights, colors, truth = leaves(weights, colors, truth)
    sample_color_error(weights, colors, index, truth, 4).backward()
    assert colors.grad is not None
    assert weights.grad is None
    assert truth.grad is None


def test_the_same_bits_every_time(device):
    given = make_samples(device, 300_000, torch.float32)
    first = sample_color_error(*given, 4)
    assert all(torch.equal(sample_color_error(*given, 4), first) for _ in range(5))
