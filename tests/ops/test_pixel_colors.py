"""pixel_colors: pixels as the light of their rays, against the formula in float64."""

from __future__ import annotations

import pytest
import reference
import torch
from op_testing import leaves
from tolerances import assert_matches

from voxelfield.ops._internal.color import pixel_colors

both_averages = pytest.mark.parametrize("pixel_averaging", ["linear_light", "encoded"])
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def make(device, rays_per_pixel, dtype=torch.float64, pixels=300):
    """Rays of all opacities and of none, colours down to black: rgb, opacity and a background for each pixel."""
    rays = pixels * rays_per_pixel
    opacity = torch.rand(rays, dtype=torch.float64) * torch.randint(3, (rays,)).clamp(max=1)
    opacity[::7] = 1
    straight = torch.rand(rays, 3, dtype=torch.float64) ** 4
    straight[::5] = 0
    inputs = opacity[:, None] * straight, opacity, torch.rand(pixels, 3, dtype=torch.float64)
    return [x.to(device, dtype) for x in inputs]


@pytest.mark.covering
@each_dtype
@both_averages
@pytest.mark.parametrize("rays_per_pixel", [1, 2, 4, 9])
@pytest.mark.parametrize("common", [False, True])
def test_values(device, dtype, pixel_averaging, rays_per_pixel, common):
    rgb, opacity, background = make(device, rays_per_pixel, dtype)
    background = background[0] if common else background
    colors = pixel_colors(rgb, opacity, background, rays_per_pixel, pixel_averaging=pixel_averaging)
    assert colors.dtype == dtype
    expected = reference.pixel_colors(
        rgb.double(), opacity.double(), background.double(), rays_per_pixel, pixel_averaging
    )
    assert_matches(colors, expected)


def test_light_is_averaged_rather_than_its_encoding(device):
    """Half of a pixel white and half black is half the light: 0.5 encoded."""
    rgb = torch.tensor([[1.0] * 3, [0.0] * 3], device=device)
    opacity, white = torch.ones(2, device=device), torch.ones(3, device=device)
    gray = 1.055 * 0.5 ** (1 / 2.4) - 0.055
    torch.testing.assert_close(pixel_colors(rgb, opacity, white, 2), torch.full((1, 3), gray, device=device))
    half = pixel_colors(rgb, opacity, white, 2, pixel_averaging="encoded")
    torch.testing.assert_close(half, torch.full((1, 3), 0.5, device=device))
    # Where a ray shows nothing, the background is mixed in as it is, as by an image's straight alpha.
    opacity = torch.tensor([1.0, 0.0], device=device)
    color = torch.tensor([[0.8, 0.2, 0.4]], device=device)
    expected = 0.5 * color + 0.5 * white
    torch.testing.assert_close(pixel_colors(torch.cat([color, 0 * color]), opacity, white, 2), expected)


@both_averages
def test_a_single_ray_is_its_pixel(device, pixel_averaging):
    rgb, opacity, background = make(device, 1, torch.float32)
    rgb = 1.5 * rgb - 0.2  # whatever the curve makes of it
    colors = pixel_colors(rgb, opacity, background, 1, pixel_averaging=pixel_averaging)
    assert_matches(colors, (rgb + (1 - opacity)[:, None] * background).double())


def test_equal_rays_are_their_pixel_up_to_rounding(device):
    straight = torch.linspace(-0.1, 1.2, 261, device=device)[:, None].expand(261, 3)
    opacity, background = torch.full((261,), 0.7, device=device), torch.full((3,), 0.25, device=device)
    rays = 0.7 * straight.repeat_interleave(4, 0), opacity.repeat_interleave(4)
    torch.testing.assert_close(pixel_colors(*rays, background, 4), 0.7 * straight + 0.075, rtol=1e-5, atol=1e-5)


@each_dtype
@both_averages
def test_gradients_with_rays_that_show_nothing(device, dtype, pixel_averaging):
    inputs = leaves(*make(device, 4, dtype))
    wide = leaves(*(x.double() for x in inputs))
    colors = pixel_colors(*inputs, 4, pixel_averaging=pixel_averaging)
    grad = torch.randn_like(colors)
    expected = reference.pixel_colors(*wide, 4, pixel_averaging)
    shown = wide[1] > 0
    actual = torch.autograd.grad(colors, inputs, grad)
    wanted = torch.autograd.grad(expected, wide, grad.double())
    assert_matches(actual[0][shown], wanted[0][shown], "rgb")
    assert_matches(actual[1][shown], wanted[1][shown], "opacity")
    assert_matches(actual[2], wanted[2], "background")
    assert 0.2 < shown.double().mean() < 0.8


def test_a_ray_that_shows_nothing_has_the_gradient_of_a_black_one(device):
    rgb, opacity, background = make(device, 2)
    rgb[1::2] = 0
    opacity[0::2] = 0.5
    grads = []
    for faint in (0.0, 1e-12):
        opacity[1::2] = faint
        inputs = leaves(rgb, opacity)
        grads.append(torch.autograd.grad(pixel_colors(*inputs, background, 2).square().sum(), inputs))
    torch.testing.assert_close(*grads, rtol=1e-9, atol=1e-9)


def test_pixels_without_matter_are_background_with_the_gradient_of_values(device):
    background = torch.rand(5, 3, device=device)
    inputs = leaves(torch.zeros(20, 3, device=device), torch.zeros(20, device=device))
    colors = pixel_colors(*inputs, background, 4)
    assert torch.equal(colors, background)
    grad = torch.rand_like(colors)
    d_rgb, d_opacity = torch.autograd.grad(colors, inputs, grad)
    # 12.92 / 12.92: the straight part of the curve both ways.
    torch.testing.assert_close(d_rgb, grad.repeat_interleave(4, 0) / 4)
    torch.testing.assert_close(d_opacity, -(grad * background).sum(1).repeat_interleave(4) / 4)


def test_faint_and_slightly_too_bright_rays_stay_bounded(device):
    """Sums of float32 weights make colours a little over 1, and opacities as small as float32 can represent."""
    opacity = torch.logspace(-44, 0, 177, dtype=torch.float64).to(device, torch.float32).repeat_interleave(2)
    rgb = (opacity[:, None] * (1 + 1e-6)).expand(-1, 3)
    inputs = leaves(rgb, opacity)
    colors = pixel_colors(*inputs, torch.zeros(3, device=device), 2)
    assert ((colors - opacity[::2, None]).abs() <= 1e-5 * opacity[::2, None] + 1e-40).all()
    d_rgb, d_opacity = torch.autograd.grad(colors.sum(), inputs)
    assert (d_rgb - 0.5).abs().max() < 1e-3
    assert d_opacity.abs().max() < 1e-2
    # A dark pixel has the steepest curve: 12.92 times the 2.28 of a bright ray, over k.
    opacity = torch.tensor([1.0, 1e-30], device=device)
    inputs = leaves(torch.tensor([[0.0] * 3, [1e-30] * 3], device=device), opacity)
    d_rgb, _ = torch.autograd.grad(pixel_colors(*inputs, torch.zeros(3, device=device), 2).sum(), inputs)
    torch.testing.assert_close(d_rgb[1], torch.full((3,), 12.92 * 2.4 / 1.055 / 2, device=device))


def test_nan_is_not_hidden(device):
    rgb, opacity, background = make(device, 2, pixels=2)
    opacity[0] = torch.nan
    rgb[3] = torch.nan
    opacity[3] = 0.5
    assert pixel_colors(rgb, opacity, background, 2).isnan().all()
