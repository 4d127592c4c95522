from __future__ import annotations

import torch

from voxelfield.rendering.pixels import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM, comparison_panel, depth_colors


def test_panel_shows_render_truth_error_depth(device):
    height, width = 5, 7
    rgb, truth = torch.rand(2, height, width, 3, device=device).unbind()
    depth = torch.linspace(2, 6, height * width, device=device).reshape(height, width)
    opacity = torch.ones(height, width, device=device)
    panel = comparison_panel(View(rgb, opacity, depth), truth)
    assert panel.shape == (height, 4 * width, 3)
    first, second, third, fourth = panel.split(width, dim=1)
    assert torch.equal(first, rgb)
    assert torch.equal(second, truth)
    torch.testing.assert_close(third, turbo((rgb - truth).abs().mean(-1) / ERROR_MAXIMUM))
    assert torch.equal(fourth, depth_colors(depth, opacity))


def test_panel_error_scale_does_not_depend_on_the_picture():
    truth, flat = torch.zeros(4, 4, 3), torch.ones(4, 4)
    for error in (0.01, 0.1, ERROR_MAXIMUM, 0.9):
        column = comparison_panel(View(truth + error, flat, flat), truth)[:, 8:12]
        torch.testing.assert_close(column, turbo(torch.full((4, 4), min(error / ERROR_MAXIMUM, 1.0))))


def test_depth_is_shown_by_its_inverse(device):
    depth, opacity = torch.rand(4, 5, device=device) * 4 + 2, torch.ones(4, 5, device=device)
    opacity[0, :3] = 0.5
    colors = depth_colors(depth, opacity, (2.0, 6.0))
    assert (colors[0, :3] == 1).all()
    torch.testing.assert_close(colors[1:], turbo(1 - (1 / depth[1:] - 1 / 6) / (1 / 2 - 1 / 6)))


def test_depth_colors_ignore_outliers_and_empty_pixels():
    depth = torch.linspace(2, 4, 10_000).reshape(100, 100)
    opacity = torch.ones(100, 100)
    plain = depth_colors(depth, opacity)
    wild = depth.clone()
    wild[50, :10] = 1e6
    wild[60, :10] = float("nan")
    wild[0] = 0.0
    opacity[0] = 0.0
    colors = depth_colors(wild, opacity)
    assert (colors[0] == 1).all()
    assert (colors[60, :10] == 1).all()
    torch.testing.assert_close(colors[70:], plain[70:], atol=0.1, rtol=0)
    torch.testing.assert_close(plain[0, 0], turbo(torch.tensor(0.0)))
    torch.testing.assert_close(plain[-1, -1], turbo(torch.tensor(1.0)))


def test_depth_colors_of_nothing_and_of_a_flat_wall():
    assert (depth_colors(torch.zeros(3, 3), torch.zeros(3, 3)) == 1).all()
    assert depth_colors(torch.full((3, 3), 2.5), torch.ones(3, 3)).isfinite().all()
