from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.evaluation import (
    Evaluation,
    View,
    check_pictures,
    evaluate_split,
    save_images,
    write_metrics,
    write_table,
)
from voxelfield.evaluation.metrics import psnr, ssim
from voxelfield.media.png import BackgroundWriter
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.pixels import composite_background

WHITE = torch.ones(3)
METRICS = {"psnr": 31.5, "ssim": 0.95, "train_seconds": 12, "steps": 100, "device": "cpu", "views": 3}


@pytest.fixture
def split():
    height, width, count = 12, 16, 3
    cameras = Cameras(
        c2w=torch.eye(4).expand(count, 4, 4).contiguous(),
        intrinsics=torch.tensor([20.0, 20.0, 8.0, 6.0]).expand(count, 4).contiguous(),
        width=width,
        height=height,
    )
    images = torch.randint(0, 256, (count, height, width, 4), dtype=torch.uint8)
    return Split(images=images, cameras=cameras, names=("r_0", "r_1.5", "test/r_2"))


def view_of(rgb):
    return View(rgb, torch.ones_like(rgb[..., 0]), torch.ones_like(rgb[..., 0]))


def _renderer(split, device="cpu", offsets=(0.1, 0.01, 0.02), background=WHITE):
    """Renders the truth, off by a constant for each view (downwards where it would leave [0, 1])."""

    def render(cameras, index):
        assert torch.equal(cameras.c2w.cpu(), split.cameras.c2w)
        truth = composite_background(split.images[index], background).to(device)
        rgb = torch.where(truth > 0.5, truth - offsets[index], truth + offsets[index])
        return view_of(rgb)

    return render


def test_means_are_over_the_views(split, device):
    result = evaluate_split(_renderer(split, device), split, WHITE, progress=False)
    assert result.names == split.names
    expected = [-20 * math.log10(offset) for offset in (0.1, 0.01, 0.02)]
    assert result.scores["psnr"] == pytest.approx(expected, abs=1e-3)
    assert result.psnr == pytest.approx(sum(expected) / 3, abs=1e-3)
    truth = composite_background(split.images[1], WHITE)
    rgb = _renderer(split)(split.cameras, 1).rgb
    assert result.scores["ssim"][1] == pytest.approx(ssim(rgb, truth).item(), abs=1e-6)
    assert result.ssim == pytest.approx(sum(result.scores["ssim"]) / 3)


def test_the_background_is_part_of_the_truth(split):
    background = torch.tensor([0.2, 0.0, 0.7])
    same = evaluate_split(_renderer(split, background=background), split, background, progress=False)
    assert same.scores["psnr"][0] == pytest.approx(20, abs=1e-3)
    other = evaluate_split(_renderer(split, background=background), split, WHITE, progress=False)
    assert other.scores["psnr"][0] < 15


def test_views_are_chosen_and_named(split, tmp_path):
    with BackgroundWriter() as writer:
        save = save_images(tmp_path, writer)
        result = evaluate_split(_renderer(split), split, WHITE, views=[2, 0], on_view=[save], progress=False)
    assert result.names == ("test/r_2", "r_0")
    assert result.scores["psnr"] == pytest.approx([-20 * math.log10(0.02), 20], abs=1e-3)
    written = {file.relative_to(tmp_path).as_posix() for file in tmp_path.rglob("*.png")}
    assert written == {"test/r_2.png", "r_0.png"}


def test_callbacks_may_differentiate(split):
    modes = []
    evaluate_split(_renderer(split), split, WHITE, on_view=[lambda *_: modes.append(torch.is_grad_enabled())])
    assert modes == [True] * len(split)


def test_pictures_are_rounded_and_metrics_are_not(split, tmp_path):
    def render(cameras, index):
        return view_of(composite_background(split.images[index], WHITE) + 0.3 / 255)

    split.images[..., :3].clamp_(max=250)
    split.images[..., 3] = 255
    with BackgroundWriter() as writer:
        result = evaluate_split(render, split, WHITE, on_view=[save_images(tmp_path, writer)], progress=False)
    assert result.scores["psnr"] == pytest.approx([-20 * math.log10(0.3 / 255)] * 3, abs=0.01)
    with Image.open(tmp_path / "r_1.5.png") as image:
        assert np.array_equal(np.asarray(image), split.images[1, ..., :3].numpy())


def test_renders_are_clamped_before_they_are_judged(split):
    split.images[:] = 255

    def render(cameras, index):
        rgb = torch.full((12, 16, 3), 1.5)
        rgb[0] = 0.9
        return view_of(rgb)

    result = evaluate_split(render, split, WHITE, progress=False)
    clamped = render(None, 0).rgb.clamp(max=1)
    assert result.scores["psnr"][0] == pytest.approx(psnr(clamped, torch.ones(12, 16, 3)).item())


def test_errors_of_masked_pixels_count_in_no_figure(split, device):
    masks = torch.ones(3, 12, 16, dtype=torch.bool)
    masks[1, :, :8] = False
    render = _renderer(split, device)

    def spoiled(cameras, index):
        view = render(cameras, index)
        view.rgb[~masks[index].to(device)] = 0.5
        return view

    clean = evaluate_split(render, split, WHITE, progress=False)
    found = evaluate_split(spoiled, replace(split, masks=masks), WHITE, progress=False)
    assert found.scores["psnr"] == pytest.approx(clean.scores["psnr"], abs=1e-3)
    truth = composite_background(split.images[1], WHITE)
    shown = torch.where(masks[1, ..., None], render(split.cameras, 1).rgb.cpu(), truth)
    assert found.scores["ssim"][1] == pytest.approx(ssim(shown, truth).item(), abs=1e-5)
    assert found.scores["ssim"][::2] == pytest.approx(clean.scores["ssim"][::2], abs=1e-6)


def test_lpips_is_measured_where_it_is_asked_for(split, device):
    masks = torch.ones(3, 12, 16, dtype=torch.bool)
    masks[1, :, :8] = False
    plain = evaluate_split(_renderer(split, device), split, WHITE, progress=False)
    assert plain.lpips is None
    assert plain.means() == {"psnr": plain.psnr, "ssim": plain.ssim}
    assert str(plain) == f"PSNR {plain.psnr:.2f} dB, SSIM {plain.ssim:.4f}"

    def largest_error(prediction, truth):
        assert prediction.shape == truth.shape == (12, 16, 3)
        return (prediction - truth)[:, :8].abs().amax()

    found = evaluate_split(
        _renderer(split, device), replace(split, masks=masks), WHITE, lpips=largest_error, progress=False
    )
    assert found.scores["lpips"] == pytest.approx([0.1, 0, 0.02], abs=1e-6)
    assert found.means() == {"psnr": found.psnr, "ssim": found.ssim, "lpips": pytest.approx(0.04, rel=1e-5)}
    assert str(found).endswith(", LPIPS 0.0400")
    assert list(found.per_view()[2]) == ["name", "psnr", "ssim", "lpips"]


def test_a_view_that_is_not_finite_is_named_with_lpips_too(split):
    def diverged(cameras, index):
        return view_of(torch.full((12, 16, 3), math.nan))

    def compare(prediction, truth):
        assert prediction.isfinite().all()
        return prediction.mean()

    with pytest.raises(FloatingPointError, match="'r_0' has 192 pixels"):
        evaluate_split(diverged, split, WHITE, lpips=compare, progress=False)


def test_the_table_has_a_row_for_each_view(tmp_path):
    evaluation = Evaluation(("a, b", "c"), {"psnr": (30.5, 31.25), "ssim": (0.5, 0.75), "lpips": (0.25, 0.125)})
    path = tmp_path / "run" / "per_view.csv"
    write_table(path, evaluation)
    assert path.read_bytes() == b'name,psnr,ssim,lpips\n"a, b",30.5,0.5,0.25\nc,31.25,0.75,0.125\n'
    assert list(path.parent.iterdir()) == [path]


def test_no_gradient_is_recorded(split):
    parameter = torch.tensor(0.5, requires_grad=True)

    def render(cameras, index):
        rgb = parameter * torch.ones(12, 16, 3)
        assert not rgb.requires_grad
        return view_of(rgb)

    evaluate_split(render, split, WHITE, progress=False)


def test_failures_are_named(split, tmp_path):
    assert evaluate_split(_renderer(split), split, WHITE, views=[], progress=False) == Evaluation((), {})

    def wrong_size(cameras, index):
        return view_of(torch.zeros(16, 12, 3))

    with pytest.raises(ValueError, match=r"'r_0' must have shape \(12, 16, 3\), got \(16, 12, 3\)"):
        evaluate_split(wrong_size, split, WHITE, progress=False)

    def diverged(cameras, index):
        rgb = torch.zeros(12, 16, 3)
        rgb[0, 0] = math.nan
        rgb[0, 1, 2] = math.inf
        return view_of(rgb)

    with pytest.raises(FloatingPointError, match="'r_0' has 2 pixels"):
        evaluate_split(diverged, split, WHITE, progress=False)


@pytest.mark.parametrize("name", ["../outside", "/outside", "a/../../outside", "./a", "a//b"])
def test_pictures_stay_in_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match="relative path"):
        check_pictures("images", tmp_path, [name])


def test_metrics_file_is_sorted_json(tmp_path):
    path = tmp_path / "run" / "metrics.json"
    write_metrics(path, {**METRICS, "per_view": {"psnr": [31.0, 32.0]}})
    text = path.read_text()
    loaded = json.loads(text)
    assert loaded == {**METRICS, "per_view": {"psnr": [31.0, 32.0]}}
    assert list(loaded) == sorted(loaded)
    assert text.endswith("}\n")
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"psnr": math.inf}, ValueError, "(?i)json"),
        ({"extra": [math.nan]}, ValueError, "(?i)json"),
        ({"extra": torch.tensor(1)}, TypeError, "Tensor"),
    ],
)
def test_wrong_metrics_leave_the_previous_file(tmp_path, changed, error, message):
    path = tmp_path / "metrics.json"
    write_metrics(path, METRICS)
    with pytest.raises(error, match=message):
        write_metrics(path, {**METRICS, **changed})
    assert json.loads(path.read_text()) == METRICS
