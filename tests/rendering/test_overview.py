"""The camera from which a run shows itself, and views in notebooks."""

from __future__ import annotations

import importlib.util
import io

import numpy as np
import pytest
import torch
from PIL import Image

from voxelfield.rendering.paths import overview
from voxelfield.rendering.render import View


@pytest.mark.parametrize(
    "box", [((-1, -1, -1), (1, 1, 1)), ((2, 3, -9), (3, 7, -8.5)), ((0, 0, 0), (1e-3, 1e-3, 5e-3))]
)
@pytest.mark.parametrize(("width", "height"), [(64, 64), (120, 40), (40, 120)])
def test_the_whole_box_is_in_sight_and_fills_the_image(box, width, height, device):
    aabb = torch.tensor(box, dtype=torch.float32, device=device)
    camera = overview(aabb, width, height)
    assert camera.c2w.device == aabb.device
    c2w = camera.c2w[0].double().cpu()
    corners = torch.cartesian_prod(*aabb.double().cpu().unbind(-1))
    seen = (corners - c2w[:3, 3]) @ c2w[:3, :3]
    fx, fy, cx, cy = camera.intrinsics[0].double().cpu()
    x, y = cx - fx * seen[:, 0] / seen[:, 2], cy + fy * seen[:, 1] / seen[:, 2]
    assert bool((seen[:, 2] < 0).all())
    for pixels, size in ((x, width), (y, height)):
        assert float(pixels.min()) > -1e-2
        assert float(pixels.max()) < size + 1e-2
    filled = max(float(x.max() - x.min()) / width, float(y.max() - y.min()) / height)
    assert filled > 0.6
    assert float(c2w[2, 1]) > 0  # up is up
    torch.testing.assert_close(torch.linalg.det(c2w[:3, :3]).item(), 1.0, atol=1e-5, rtol=0)


def test_a_view_shows_itself_by_its_colours(device, monkeypatch):
    rgb = torch.rand(4, 6, 3, device=device)
    view = View(rgb, torch.ones(4, 6, device=device), torch.ones(4, 6, device=device))
    with Image.open(io.BytesIO(view._repr_png_())) as image:
        assert np.array_equal(np.asarray(image), (rgb.cpu() * 255).round().to(torch.uint8).numpy())
    assert repr(view) == f"View(width=6, height=4, device={rgb.device})"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert view._repr_png_() is None
