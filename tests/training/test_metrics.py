from __future__ import annotations

import math

import pytest
import torch

from voxelfield.evaluation.metrics import mse_to_psnr, psnr, ssim


def _reference_ssim(first, second):
    """Wang et al. (2004), Eq. 13, window by window in float64."""
    first, second = first.double().cpu(), second.double().cpu()
    offsets = torch.arange(11, dtype=torch.float64) - 5
    window = torch.exp(-(offsets**2) / (2 * 1.5**2))
    window = torch.outer(window, window)
    window = (window / window.sum())[..., None]
    values = []
    for row in range(first.shape[0] - 10):
        for column in range(first.shape[1] - 10):
            x, y = (image[row : row + 11, column : column + 11] for image in (first, second))
            mean_x, mean_y = ((window * image).sum((0, 1)) for image in (x, y))
            var_x, var_y = ((window * (i - m) ** 2).sum((0, 1)) for i, m in ((x, mean_x), (y, mean_y)))
            covariance = (window * (x - mean_x) * (y - mean_y)).sum((0, 1))
            c1, c2 = 0.01**2, 0.03**2
            values.append(
                (2 * mean_x * mean_y + c1)
                * (2 * covariance + c2)
                / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
            )
    return torch.stack(values).mean()


def test_psnr_of_a_known_error(device):
    truth = torch.rand(4, 5, 3, device=device) * 0.5
    assert psnr(truth + 0.1, truth).item() == pytest.approx(20, abs=1e-4)
    assert psnr(truth + 0.01, truth).item() == pytest.approx(40, abs=1e-2)
    assert psnr(truth, truth).item() == math.inf
    assert psnr(truth, truth).device.type == torch.device(device).type


def test_psnr_over_a_mask_is_that_of_the_pixels_in_it(device):
    truth, prediction = torch.rand(4, 5, 3, device=device), torch.rand(4, 5, 3, device=device)
    mask = torch.rand(4, 5, device=device) < 0.5
    mask[0, 0] = True
    expected = psnr(prediction[mask], truth[mask])
    torch.testing.assert_close(psnr(prediction, truth, mask), expected)
    prediction[~mask] = math.nan
    torch.testing.assert_close(psnr(prediction, truth, mask), expected)
    with pytest.raises(ValueError, match=r"mask must have shape \(4, 5\), got \(5, 4\)"):
        psnr(prediction, truth, mask.mT)


def test_psnr_is_of_the_mean_over_all_elements():
    prediction, truth = torch.zeros(2, 2, 3), torch.zeros(2, 2, 3)
    prediction[0, 0, 0] = 1
    assert psnr(prediction, truth).item() == pytest.approx(10 * math.log10(12))


def test_half_precision_is_evaluated_in_float32():
    # squares of 1e-4 are below the smallest float16
    truth = torch.zeros(8, 3, dtype=torch.float16)
    result = psnr(truth + 1e-4, truth)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(80, abs=0.1)


def test_mse_to_psnr():
    assert mse_to_psnr(torch.tensor([1.0, 0.1, 1e-3, 0.0])).tolist() == pytest.approx([0, 10, 30, math.inf])


@pytest.mark.parametrize("size", [(11, 11), (14, 19)])
def test_ssim_agrees_with_its_definition(device, size):
    truth = torch.rand(*size, 3, device=device)
    prediction = (truth + 0.2 * torch.randn_like(truth)).clamp(0, 1)
    result = ssim(prediction, truth)
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(_reference_ssim(prediction, truth).item(), abs=1e-6)
    assert ssim(truth, truth).item() == pytest.approx(1)


@pytest.mark.parametrize("size", [(11, 40), (57, 33)])
def test_ssim_agrees_with_torchmetrics(device, size):
    # Takes seconds, in every process that collects tests.
    from torchmetrics.functional.image import structural_similarity_index_measure

    truth = torch.rand(*size, 3, device=device)
    prediction = (truth + 0.1 * torch.randn_like(truth)).clamp(0, 1)
    images = (image.double().movedim(-1, 0).unsqueeze(0) for image in (prediction, truth))
    _, similarity = structural_similarity_index_measure(*images, sigma=1.5, data_range=1.0, return_full_image=True)
    # It places windows on the border too, over reflected pixels.
    whole_windows = similarity[..., 5:-5, 5:-5].mean()
    assert ssim(prediction, truth).item() == pytest.approx(whole_windows.item(), abs=1e-6)


def test_ssim_of_nearly_flat_images_keeps_its_digits(device):
    # E[x^2] - E[x]^2 of values near 1 cancels: float32, and TF32 even more, lose what this compares
    truth = 0.98 + 0.02 * torch.rand(16, 16, 3, device=device)
    prediction = truth + 0.004 * torch.randn_like(truth)
    assert ssim(prediction, truth).item() == pytest.approx(_reference_ssim(prediction, truth).item(), abs=1e-6)


@pytest.mark.parametrize("metric", [psnr, ssim])
def test_wrong_arguments_are_named(metric):
    image = torch.rand(12, 12, 3)
    with pytest.raises(TypeError, match=r"truth must be float32 .*, got uint8"):
        metric(image, (image * 255).to(torch.uint8))
    with pytest.raises(ValueError, match=r"truth must have shape \(12, 12, 3\), as prediction has, got \(1, 12, 3\)"):
        metric(image, image[:1])
    with pytest.raises(ValueError, match="must not be empty"):
        metric(image[:0], image[:0])


@pytest.mark.parametrize("shape", [(10, 20, 3), (20, 10, 3), (12, 12, 4), (1, 12, 12, 3)])
def test_ssim_wants_an_image_that_holds_a_window(shape):
    with pytest.raises(ValueError, match="H, W >= 11"):
        ssim(torch.rand(shape), torch.rand(shape))
