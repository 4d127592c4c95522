from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.rendering.pixels import png_bytes, to_uint8


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
