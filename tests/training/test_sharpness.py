"""Blurred photographs count less, and sharp ones alike."""

from __future__ import annotations

import pytest
import torch
from passers_by import with_blur
from quick_presets import preset

from voxelfield import Session, load_scene
from voxelfield.components.sharpness import sharpness_weights


def test_blurred_photographs_count_less(device):
    sharp = load_scene("bricks", image_size=50, splits=("train",))
    assert torch.equal(sharpness_weights(sharp.train, 1.0), torch.ones(100))
    scene = with_blur(sharp, every=4, sigma=1.0)
    weights = sharpness_weights(scene.train, 1.0)
    blurred = torch.arange(100) % 4 == 0
    assert weights.mean() == pytest.approx(1)
    assert (weights[~blurred] == weights.max()).all()
    assert weights[blurred].max() < 0.6 * weights.max()
    ratio, squared = (values / values.max() for values in (weights, sharpness_weights(scene.train, 2.0)))
    torch.testing.assert_close(squared, ratio.square())
    few = ("trainer.steps=2", "trainer.visible_samples=2048", "trainer.preview_every=0")
    settings = preset("model=dense", "trainer=smoke", *few, "trainer.loss.sharpness=1", device=str(device))
    batch = Session(scene, settings).train_step()
    assert torch.equal(batch.weights.cpu(), weights[batch.images.cpu()])


def test_photographs_without_any_detail_count_alike():
    scene = load_scene("bricks", image_size=25, splits=("train",))
    scene.train.images.fill_(90)
    assert torch.equal(sharpness_weights(scene.train, 1.0), torch.ones(100))
