from __future__ import annotations

import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from records import flat_view

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import Evaluation
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import turbo
from voxelfield.rendering.render import View
from voxelfield.rendering.view_pictures import ERROR_MAXIMUM
from voxelfield.report.thumbnails import Thumbnails, ViewPictures, thumbnail_side


def decoded(jpeg: bytes) -> np.ndarray:
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image).astype(float) / 255


def drawn(count: int, view: View, truth: torch.Tensor, mask: torch.Tensor | None = None) -> ViewPictures:
    """Pictures of a view, one of so many."""
    thumbnails = Thumbnails(count)
    thumbnails.add("r_0", view, truth, mask)
    return thumbnails.pictures()["r_0"]


def test_pictures_show_render_truth_error_and_depth(device):
    height, width = 480, 720
    truth = torch.full((height, width, 3), 0.25, device=device)
    depth = torch.linspace(2, 6, width, device=device).expand(height, width).contiguous()
    opacity = torch.ones(height, width, device=device)
    opacity[:, : width // 3] = 0
    rgb = torch.full((height, width, 3), 0.35, device=device)
    shown = drawn(200, View(rgb, opacity, depth), truth)
    assert (shown.width, shown.height) == (240, 160)
    assert decoded(shown.render).shape == (160, 240, 3)
    np.testing.assert_allclose(decoded(shown.render), 0.35, atol=0.02)
    np.testing.assert_allclose(decoded(shown.truth), 0.25, atol=0.02)
    expected = turbo(torch.tensor(0.1 / ERROR_MAXIMUM)).numpy()
    np.testing.assert_allclose(decoded(shown.error)[80, 120], expected, atol=0.04)
    painted = decoded(shown.depth)
    np.testing.assert_allclose(painted[:, :70], 1, atol=0.02)  # nothing is there
    assert painted[80, 100, 2] > painted[80, 100, 0]  # near is blue
    assert painted[80, 230, 0] > painted[80, 230, 2]  # far is red


def test_error_is_that_of_the_whole_image_and_counts_only_where_the_mask_says():
    """Stripes of one pixel vanish in a reduced image; their error does not."""
    stripes = torch.zeros(480, 480, 3)
    stripes[::2] = 0.2
    view, truth = View(stripes, torch.ones(480, 480), torch.ones(480, 480)), torch.full((480, 480, 3), 0.1)
    mask = torch.ones(480, 480, dtype=torch.bool)
    mask[:, 240:] = False
    error = decoded(drawn(200, view, truth, mask).error)
    np.testing.assert_allclose(error[120, 60], turbo(torch.tensor(0.1 / ERROR_MAXIMUM)).numpy(), atol=0.04)
    np.testing.assert_allclose(error[120, 180], turbo(torch.tensor(0.0)).numpy(), atol=0.04)


def test_the_last_pixels_are_means_of_what_is_left_where_no_whole_factor_fits(device):
    height, width = 251, 500
    gray = torch.linspace(0, 1, width, device=device)[None, :, None].expand(height, width, 3).contiguous()
    everywhere = torch.ones(height, width, device=device)
    shown = drawn(200, View(gray, everywhere, everywhere), gray)
    assert (shown.width, shown.height) == (167, 84)
    np.testing.assert_allclose(decoded(shown.truth)[:, -1], gray[0, -2:, 0].mean().item(), atol=0.02)
    np.testing.assert_allclose(decoded(shown.truth)[-1, 80], gray[0, 240:243, 0].mean().item(), atol=0.02)


def test_what_is_not_finite_and_views_of_nothing_are_drawn():
    rgb = torch.full((8, 8, 3), float("nan"))
    depth = torch.full((8, 8), float("inf"))
    drawn(2, View(rgb, torch.ones(8, 8), depth), torch.zeros(8, 8, 3))
    nothing = View(torch.ones(8, 8, 3), torch.zeros(8, 8), torch.zeros(8, 8))
    np.testing.assert_allclose(decoded(drawn(2, nothing, torch.ones(8, 8, 3)).depth), 1, atol=0.02)


def test_the_best_and_the_worst_view_are_drawn_larger_where_there_are_many():
    names, thumbnails = ("r_0", "r_1", "r_2"), Thumbnails(200)
    cameras = Cameras(torch.eye(4).repeat(3, 1, 1), torch.full((3, 4), 480.0), 480, 480)
    split = Split(torch.zeros(3, 480, 480, 4, dtype=torch.uint8), cameras, names)

    def evaluate(split, on_view, **_):
        for name in split.names:
            on_view(name, flat_view(480, 480), torch.zeros(480, 480, 3), None)

    evaluate(split, thumbnails.add)
    thumbnails.enlarge(SimpleNamespace(evaluate=evaluate), split, Evaluation(names, {"psnr": (30.0, 29.0, 31.0)}))
    assert [thumbnails.pictures()[name].width for name in names] == [240, 480, 480]


def test_a_view_takes_the_place_of_one_of_its_name():
    thumbnails = Thumbnails(1)
    for value in (0.0, 1.0):
        thumbnails.add("r_0", flat_view(8, 8, value), torch.zeros(8, 8, 3), None)
    np.testing.assert_allclose(decoded(thumbnails.pictures()["r_0"].render), 1, atol=0.02)


@pytest.mark.parametrize("side", [240, 480])
def test_pictures_of_noise_are_written_too(side):
    noise = torch.rand(side, side, 3)
    view = View(noise, torch.ones(side, side), 1 + noise[..., 0])
    shown = drawn(200 if side == 240 else 1, view, noise.flip(0))
    assert (shown.width, shown.height) == (side, side)
    assert decoded(shown.render).shape == (side, side, 3)


@pytest.mark.parametrize("count", [1, 200, 210, 800, 2000, 100_000])
def test_pictures_become_smaller_where_there_are_many(count):
    side = thumbnail_side(count)
    assert 64 <= side <= 480
    assert side == 64 or count * side**2 <= 1.01 * 200 * 240**2
    assert (side == 480) == (count <= 50)
