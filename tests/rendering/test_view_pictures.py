from __future__ import annotations

import pytest
import torch

from voxelfield.rendering.pixels import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM, comparison_panel, depth_colors


def test_panel_shows_render_truth_error_depth(device):
    height, width = 80, 100
    rgb, truth = torch.rand(2, height, width, 3, device=device).unbind()
    depth = torch.linspace(2, 6, height * width, device=device).reshape(height, width)
    opacity = torch.ones(height, width, device=device)
    panel = comparison_panel(View(rgb, opacity, depth), truth)
    assert panel.shape == (8 * height, 8 * width, 3), "400 columns each"
    shown = [picture for row in panel.split(4 * height) for picture in row.split(4 * width, dim=1)]
    error = turbo((rgb - truth).abs().mean(-1) / ERROR_MAXIMUM)
    corners = []
    for picture, expected in zip(shown, (rgb, truth, error, depth_colors(depth, opacity)), strict=True):
        torch.testing.assert_close(picture[height::4, ::4], expected[height // 4 :], msg="below the words")
        ink = (picture[:height] - expected.repeat_interleave(4, 0).repeat_interleave(4, 1)[:height]).abs() > 1e-4
        corners.append(ink.any(dim=-1))
    assert all(0.01 < float(corner.float().mean()) < 0.2 for corner in corners)
    assert not any(torch.equal(corners[0], other) for other in corners[1:]), "each has its own word"


@pytest.mark.parametrize(("size", "factor"), [(800, 1), (401, 1), (200, 2), (150, 2)])
def test_panels_of_small_pictures_are_magnified(size, factor):
    flat, truth = torch.ones(size, 9), torch.ones(size, 9, 3)
    assert comparison_panel(View(truth, flat, flat), truth).shape == (2 * factor * size, 2 * factor * 9, 3)


def test_panel_error_scale_does_not_depend_on_the_picture():
    truth, flat = torch.zeros(4, 4, 3), torch.ones(4, 4)
    for error in (0.01, 0.1, ERROR_MAXIMUM, 0.9):
        below = comparison_panel(View(truth + error, flat, flat), truth)[600:800, :400]
        torch.testing.assert_close(below, turbo(torch.full((200, 400), min(error / ERROR_MAXIMUM, 1.0))))


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
