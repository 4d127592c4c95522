"""Views evaluated with a fitted exposure: no pixel has a say in its own correction."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import Evaluation, evaluate_split
from voxelfield.evaluation.metrics import cross_fitted
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.render import View

HEIGHT, WIDTH = 14, 26
LEFT, RIGHT = slice(None, WIDTH // 2), slice(WIDTH // 2, None)
GAIN, OFFSET = torch.tensor([0.7, 0.9, 1.2]), torch.tensor([0.05, 0.0, -0.04])


@pytest.fixture
def view(device) -> tuple[Tensor, Tensor, Tensor]:
    """Colours over a grey background, opacity, and the background."""
    opacity = torch.rand(HEIGHT, WIDTH, device=device)
    opacity[:, ::3] = 1
    background = torch.full((3,), 0.5, device=device)
    emitted = (0.1 + 0.5 * torch.rand(HEIGHT, WIDTH, 3, device=device)) * opacity[..., None]
    return emitted + (1 - opacity[..., None]) * background, opacity, background


def exposed(rgb: Tensor, opacity: Tensor, background: Tensor) -> Tensor:
    behind = (1 - opacity[..., None]) * background
    return GAIN.to(rgb) * (rgb - behind) + OFFSET.to(rgb) * opacity[..., None] + behind


def test_an_exposure_is_found(view):
    rgb, opacity, background = view
    truth = exposed(rgb, opacity, background)
    found = cross_fitted(rgb, opacity, truth, background)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, truth, atol=1e-4, rtol=0)
    assert (rgb - truth).abs().max() > 0.1


@pytest.mark.parametrize(("own", "other"), [(LEFT, RIGHT), (RIGHT, LEFT)])
def test_a_half_has_no_say_in_its_own_correction(view, own, other):
    rgb, opacity, background = view
    truth = exposed(rgb, opacity, background)
    before = cross_fitted(rgb, opacity, truth, background)
    truth[:, own] = torch.rand_like(truth[:, own])
    after = cross_fitted(rgb, opacity, truth, background)
    assert torch.equal(after[:, own], before[:, own])
    assert (after[:, other] - before[:, other]).abs().mean() > 0.05


def test_pixels_that_a_mask_rules_out_have_no_say(view):
    rgb, opacity, background = view
    truth = exposed(rgb, opacity, background)
    mask = torch.rand(HEIGHT, WIDTH, device=rgb.device) < 0.5
    truth[~mask] = 1.0
    expected = exposed(rgb, opacity, background)
    torch.testing.assert_close(cross_fitted(rgb, opacity, truth, background, mask), expected, atol=1e-4, rtol=0)
    assert (cross_fitted(rgb, opacity, truth, background) - expected).abs().max() > 0.1


def test_where_nothing_can_be_fitted_nothing_is_corrected(view):
    rgb, opacity, background = view
    nothing = torch.zeros(HEIGHT, WIDTH, dtype=torch.bool, device=rgb.device)
    torch.testing.assert_close(cross_fitted(rgb, opacity, 1 - rgb, background, nothing), rgb, atol=0, rtol=1e-6)
    empty = torch.zeros_like(opacity)
    behind = background.expand_as(rgb)
    assert torch.equal(cross_fitted(behind, empty, rgb, background), behind)


def test_a_half_of_one_colour_is_corrected_finitely(view):
    _, opacity, background = view
    flat, solid = torch.full((HEIGHT, WIDTH, 3), 0.4, device=opacity.device), torch.ones_like(opacity)
    found = cross_fitted(flat, solid, flat + 0.2, background)
    torch.testing.assert_close(found, flat + 0.2, atol=1e-4, rtol=0)


@pytest.fixture
def split() -> Split:
    images = torch.randint(60, 180, (2, HEIGHT, WIDTH, 4), dtype=torch.uint8)
    images[..., 3] = 255
    cameras = Cameras(torch.eye(4).repeat(2, 1, 1), torch.tensor([[9.0, 9.0, 13.0, 7.0]]).repeat(2, 1), WIDTH, HEIGHT)
    return Split(images, cameras, ("a", "b"))


def evaluated(split: Split, device: torch.device, change, **options) -> Evaluation:
    def render(cameras: Cameras, index: int) -> View:
        rgb = change(split.images[index, ..., :3].to(device) / 255)
        return View(rgb, torch.ones_like(rgb[..., 0]), torch.ones_like(rgb[..., 0]))

    return evaluate_split(render, split, torch.ones(3, device=device), progress=False, **options)


def test_both_figures_are_reported(split, device):
    found = evaluated(split, device, lambda rgb: 0.8 * rgb, fit_exposure=True)
    assert found.psnr < 21
    assert found.means()["psnr_fitted"] > 60
    assert found.ssim < 0.99 < found.means()["ssim_fitted"]
    names = ["psnr", "ssim", "psnr_fitted", "ssim_fitted"]
    assert list(found.means()) == names
    assert [list(row) for row in found.per_view()] == [["name", *names]] * 2
    assert found.means()["psnr_fitted"] == pytest.approx(sum(found.scores["psnr_fitted"]) / 2)
    assert str(found) == (
        f"PSNR {found.psnr:.2f} dB, SSIM {found.ssim:.4f}; "
        f"with fitted exposure PSNR {found.means()['psnr_fitted']:.2f} dB, SSIM {found.means()['ssim_fitted']:.4f}"
    )
    plain = evaluated(split, device, lambda rgb: 0.8 * rgb)
    assert list(plain.means()) == names[:2]
    assert plain.scores["psnr"] == found.scores["psnr"]


def test_scored_pixels_do_not_leak_into_the_fit(split, device):
    """The left half is right and the right half too bright: each correction makes the other half as wrong."""

    def brighten(rgb: Tensor) -> Tensor:
        return torch.cat((rgb[:, LEFT], rgb[:, RIGHT] + 0.1), dim=1)

    found = evaluated(split, device, brighten, fit_exposure=True)
    assert found.scores["psnr"] == pytest.approx([10 * math.log10(2) + 20] * 2, abs=1e-3)
    # One fit to the whole image would halve the error, which makes 26 dB.
    assert found.scores["psnr_fitted"] == pytest.approx([20.0] * 2, abs=0.05)


def test_masked_pixels_count_in_no_fitted_figure(split, device):
    masks = torch.ones(2, HEIGHT, WIDTH, dtype=torch.bool)
    masks[:, :5] = False

    def spoil(rgb: Tensor) -> Tensor:
        spoiled = 0.8 * rgb
        spoiled[:5] = 0.9
        return spoiled

    masked = Split(split.images, split.cameras, split.names, masks)
    found = evaluated(masked, device, spoil, fit_exposure=True)
    assert found.means()["psnr_fitted"] > 60
    assert found.means()["ssim_fitted"] > 0.999
    assert evaluated(split, device, spoil, fit_exposure=True).means()["psnr_fitted"] < 30
