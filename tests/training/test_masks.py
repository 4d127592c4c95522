"""A whole session with masks: what they rule out has no influence on the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from quick_presets import preset
from small_sessions import LEGO, Recorder, fitted

import voxelfield
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.training.session import Session


def painted(split: Split, color: int) -> Split:
    """Returns a split whose left thirds are masked, and of one colour or transparent."""
    masks = torch.ones(split.images.shape[:3], dtype=torch.bool)
    masks[:, :, : masks.shape[2] // 3] = False
    images = split.images.clone()
    images[~masks] = color
    return replace(split, images=images, masks=masks)


def test_masked_pixels_change_neither_the_field_nor_its_psnr(device, tmp_path):
    lego = load_blender(LEGO, LoadOptions(image_size=25))
    unwritten = ("trainer.evaluation.report=false", "trainer.evaluation.video_frames=0", "trainer.model_file=none")
    changes = (*unwritten, "trainer.steps=6", "trainer.preview_every=3", "trainer.preview_views=1")
    settings = preset("scene=lego", "model=dense", "trainer=smoke", *changes, device=str(device))
    results = []
    for color in (0, 200):
        scene = Scene("lego", lego.aabb, {name: painted(split, color) for name, split in lego.splits.items()})
        session = fitted(Session(scene, settings, logger=Recorder()))
        evaluated = session.evaluate(views=1, progress=False).psnr
        results.append(torch.tensor([*session.log.values("test/psnr"), evaluated, session.occupancy.fraction()]))
    assert len(results[0]) == 4
    masked = voxelfield.write_results(session, tmp_path)["masked"]
    assert masked == {name: pytest.approx({"masks": 8 / 25, "transparency": 0}) for name in lego.splits}
    # On CUDA sums have another order in every run.
    tolerance = 0 if device.type == "cpu" else 1e-2
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=0)


def test_soft_masks_weigh_squared_errors(device):
    train = load_blender(LEGO, LoadOptions(image_size=25)).train
    weights = torch.randint(0, 256, train.images.shape[:3], dtype=torch.uint8)
    weighed = PixelSampler(replace(train, extras={"mask_weight": weights}), device)
    batch = weighed.batch(50, torch.tensor([[-1.0] * 3, [1.0] * 3], device=device), "white")
    torch.testing.assert_close(batch.weights, weights.flatten()[batch.pixels.cpu()].to(device) / 255)
    assert (
        PixelSampler(train, device).batch(5, torch.tensor([[-1.0] * 3, [1.0] * 3]).to(device), "white").weights is None
    )
