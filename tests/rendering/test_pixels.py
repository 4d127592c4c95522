from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.rendering.pixels import composite_background, png_bytes, to_uint8, turbo


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_uint8_rounds_and_clamps(device, dtype):
    values = torch.tensor([-1, 0, 0.4 / 255, 0.6 / 255, 127.4 / 255, 254.6 / 255, 1, 2], dtype=dtype, device=device)
    assert to_uint8(values).tolist() == [0, 0, 0, 1, 127, 255, 255, 255]


def test_to_uint8_inverts_every_level():
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(to_uint8(levels / 255), levels)
    assert torch.equal(to_uint8((levels / 255).half()), levels)
    with pytest.raises(TypeError, match="rgb must be floating point"):
        to_uint8(levels)


def test_a_png_in_memory_holds_the_rounded_image(device):
    rgb = torch.rand(5, 7, 3, device=device) * 1.2 - 0.1
    with Image.open(io.BytesIO(png_bytes(rgb))) as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), to_uint8(rgb).cpu().numpy())


def test_composite_of_straight_alpha(device):
    rgba = torch.tensor(
        [[[255, 0, 51, 255], [255, 0, 51, 0]], [[255, 0, 51, 51], [0, 0, 0, 128]]], dtype=torch.uint8, device=device
    )
    background = torch.tensor([0.5, 1.0, 0.25])
    result = composite_background(rgba, background)
    assert result.dtype == torch.float32
    assert result.device.type == torch.device(device).type
    expected = torch.tensor(
        [[[1, 0, 0.2], [0.5, 1, 0.25]], [[0.6, 0.8, 0.24], [0.5 * 127 / 255, 127 / 255, 0.25 * 127 / 255]]]
    )
    torch.testing.assert_close(result.cpu(), expected)


def test_composite_is_exact_where_alpha_is():
    rgba = torch.randint(0, 256, (1000, 4), dtype=torch.uint8)
    rgba[:500, 3], rgba[500:, 3] = 255, 0
    background = torch.rand(3)
    result = composite_background(rgba, background)
    assert torch.equal(result[:500], rgba[:500, :3] / 255)
    assert torch.equal(result[500:], background.expand(500, 3))
    assert composite_background(rgba[:0], background).shape == (0, 3)


def test_turbo_hits_its_landmarks(device):
    # entries 0, 128 and 255 of the published 256-entry table; the fit is off by up to 0.13, at the dark end
    table = torch.tensor([[0.18995, 0.07176, 0.23217], [0.64362, 0.98999, 0.23356], [0.47960, 0.01583, 0.01055]])
    colors = turbo(torch.tensor([0.0, 128 / 255, 1.0], device=device)).cpu()
    torch.testing.assert_close(colors, table, atol=0.13, rtol=0)
    assert torch.equal(turbo(torch.tensor([-3.0, 7.0])), turbo(torch.tensor([0.0, 1.0])))


def test_turbo_is_smooth_and_in_range():
    colors = turbo(torch.linspace(0, 1, 1001, dtype=torch.float64))
    assert colors.shape == (1001, 3)
    assert colors.min() >= 0
    assert colors.max() <= 1
    assert colors.diff(dim=0).abs().max() < 0.02
