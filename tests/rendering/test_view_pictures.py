from __future__ import annotations

import pytest
import torch

from voxelfield.rendering.images import turbo
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM, comparison_panel


def test_panel_shows_render_truth_error_depth(device):
    height, width = 5, 7
    rgb, truth = torch.rand(2, height, width, 3, device=device).unbind()
    depth = torch.linspace(2, 6, height * width, device=device).reshape(height, width)
    opacity = torch.ones(height, width, device=device)
    opacity[0, :3] = 0.5
    panel = comparison_panel(rgb.requires_grad_(), truth, depth, opacity, (2.0, 6.0))
    assert panel.shape == (height, 4 * width, 3)
    assert not panel.requires_grad
    first, second, third, fourth = panel.split(width, dim=1)
    assert torch.equal(first, rgb)
    assert torch.equal(second, truth)
    torch.testing.assert_close(third, turbo((rgb - truth).abs().mean(-1) / ERROR_MAXIMUM).detach())
    assert (fourth[0, :3] == 1).all()
    torch.testing.assert_close(fourth[1:], turbo((depth[1:] - 2) / 4))


def test_panel_error_scale_does_not_depend_on_the_picture():
    truth, flat = torch.zeros(4, 4, 3), torch.ones(4, 4)
    for error in (0.01, 0.1, ERROR_MAXIMUM, 0.9):
        column = comparison_panel(truth + error, truth, flat, flat)[:, 8:12]
        torch.testing.assert_close(column, turbo(torch.full((4, 4), min(error / ERROR_MAXIMUM, 1.0))))


def test_panel_depth_ignores_outliers_and_empty_pixels():
    depth = torch.linspace(2, 4, 10_000).reshape(100, 100)
    opacity = torch.ones(100, 100)
    plain = comparison_panel(torch.zeros(100, 100, 3), torch.zeros(100, 100, 3), depth, opacity)[:, 300:]
    wild = depth.clone()
    wild[50, :10] = 1e6
    wild[60, :10] = float("nan")
    wild[0] = 0.0
    opacity[0] = 0.0
    panel = comparison_panel(torch.zeros(100, 100, 3), torch.zeros(100, 100, 3), wild, opacity)[:, 300:]
    assert (panel[0] == 1).all()
    assert (panel[60, :10] == 1).all()
    torch.testing.assert_close(panel[70:], plain[70:], atol=0.1, rtol=0)
    torch.testing.assert_close(plain[0, 0], turbo(torch.tensor(0.0)))
    torch.testing.assert_close(plain[-1, -1], turbo(torch.tensor(1.0)))


def test_panel_of_nothing_and_of_a_flat_wall():
    black = torch.zeros(3, 3, 3)
    empty = comparison_panel(black, black, torch.zeros(3, 3), torch.zeros(3, 3))
    assert (empty[:, 9:] == 1).all()
    wall = comparison_panel(black, black, torch.full((3, 3), 2.5), torch.ones(3, 3))
    assert wall.isfinite().all()


def test_panel_names_wrong_arguments():
    rgb, flat = torch.zeros(3, 4, 3), torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"rgb must have shape \(H, W, 3\)"):
        comparison_panel(rgb[..., :2], rgb, flat, flat)
    with pytest.raises(ValueError, match=r"truth must have shape \(3, 4, 3\), got \(2, 4, 3\)"):
        comparison_panel(rgb, rgb[:2], flat, flat)
    with pytest.raises(ValueError, match=r"depth must have shape \(3, 4\)"):
        comparison_panel(rgb, rgb, flat.T, flat)
    with pytest.raises(ValueError, match=r"opacity must have shape \(3, 4\)"):
        comparison_panel(rgb, rgb, flat, flat[..., None])
    with pytest.raises(ValueError, match="near_far must be increasing"):
        comparison_panel(rgb, rgb, flat, flat, (2.0, 2.0))
