"""A whole session with masks: what they rule out has no influence on the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from quick_presets import preset

from voxelfield.components.logger import NullLogger
from voxelfield.datasets.blender import load_blender
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.scene import Scene, Split
from voxelfield.training.session import Session

LEGO = Path(__file__).parents[1] / "fixtures" / "lego"


class Scores(NullLogger):
    """Keeps the PSNR of previews."""

    def __init__(self) -> None:
        self.psnr: list[float] = []

    def scalars(self, step, values) -> None:
        self.psnr += [value for name, value in values.items() if name == "test/psnr"]


def painted(split: Split, color: int) -> Split:
    """Returns a split whose left thirds are masked, and of one colour or transparent."""
    masks = torch.ones(split.images.shape[:3], dtype=torch.bool)
    masks[:, :, : masks.shape[2] // 3] = False
    images = split.images.clone()
    images[~masks] = color
    return replace(split, images=images, masks=masks)


def test_masked_pixels_change_neither_the_field_nor_its_psnr(device):
    lego = load_blender(LEGO, LoadOptions(image_size=25))
    changes = ("trainer.steps=6", "trainer.preview_every=3", "trainer.preview_views=1")
    settings = preset("scene=lego", "model=dense", "trainer=smoke", *changes, device=str(device))
    results = []
    for color in (0, 200):
        scene = Scene("lego", lego.aabb, {name: painted(split, color) for name, split in lego.splits.items()})
        scores = Scores()
        session = Session(scene, settings, logger=scores)
        session.fit()
        evaluated = session.evaluate(views=1, progress=False).psnr
        results.append(torch.tensor([*scores.psnr, evaluated, session.occupancy.fraction()]))
    assert len(results[0]) == 4
    # On CUDA sums have another order in every run.
    tolerance = 0 if device.type == "cpu" else 1e-2
    torch.testing.assert_close(results[1], results[0], atol=tolerance, rtol=0)
