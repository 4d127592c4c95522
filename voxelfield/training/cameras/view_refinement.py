"""Refinement of the poses of held-out views with a fixed field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from voxelfield.datasets.scene import Split
from voxelfield.fields.field import RadianceField
from voxelfield.models.model import Model
from voxelfield.training.batches import PixelSampler
from voxelfield.training.cameras.camera_refinement import CameraRefinement, RefinedPoses
from voxelfield.training.config import TrainerConfig
from voxelfield.training.losses import photometric_only
from voxelfield.training.step import TrainingStep

FINAL_FACTOR = 0.02
"""Factor of the learning rate of poses after the last step."""


def refine_views(
    model: Model,
    trainer: TrainerConfig,
    split: Split,
    *,
    steps: int,
    rate: float,
) -> Split:
    """Optimises the poses of images so that renderings of a field match them, starting from the given poses.

    A field whose cameras were refined lies in a warp that only its training images define, up to their errors.
    Held-out views are therefore evaluated as in BARF (Lin et al. 2021, section 4), with poses that were optimised for
    the same images, so that the result depends on the field and not on the accuracy of the poses. The field, its
    gradients and torch's global generators are not changed.

    Args:
        model: The model.
        trainer: Settings of sampling and of the averaging of pixels.
        split: The images, with cameras in the world frame of the model.
        steps: Number of steps of Adam; each draws pixels from all images.
        rate: Learning rate in radians and in units of the warp's ``motion_unit``; it decays to a fiftieth.

    Returns:
        The split with refined cameras, on the CPU.
    """
    device = model.device
    refinement = CameraRefinement(
        split.cameras.to(device),
        model.field.centre.to(device),
        steps=steps,
        pose_lr=rate,
        final_factor=FINAL_FACTOR,
        unit=1.0 if model.warp is None else model.warp.motion_unit,
    )
    fit_poses(refinement, model, trainer, split, steps)
    return replace(split, cameras=refinement.refined().to("cpu"))


def fit_poses(
    refinement: CameraRefinement,
    model: Model,
    trainer: TrainerConfig,
    split: Split,
    steps: int,
) -> None:
    """Optimises cameras so that renderings of a fixed field match their images; keeps torch's global generators.

    Args:
        refinement: The cameras, on the field's device; updated in place.
        model: The model.
        trainer: Settings of sampling and of the averaging of pixels.
        split: The images of those cameras.
        steps: Number of steps of Adam; each draws pixels from all images.
    """
    device = model.device
    # No term compares anything but pixels; the number of rays does not follow the samples, of which rays have few.
    config = replace(trainer, loss=photometric_only(), patches=0, not_finite="stop")
    rays = None if device.type == "cuda" else min(trainer.max_rays, max(1, trainer.visible_samples // 16))
    pixels = PixelSampler(split, device, trainer.supersampling)
    parts = [RefinedPoses(refinement)]
    step = TrainingStep(model, pixels, None, config, parts=parts, rays=rays)
    settings = model.settings
    devices = [device] if device.type == "cuda" else []
    with torch.enable_grad(), _held(model.field), torch.random.fork_rng(devices):
        _seed(device)
        for _ in range(steps):
            step.run(settings)


def _seed(device: torch.device) -> None:
    """Seeds the generators of the CPU and of one GPU; ``torch.manual_seed`` would seed those of all GPUs."""
    torch.default_generator.manual_seed(0)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(0)


@contextlib.contextmanager
def _held(field: RadianceField) -> Iterator[None]:
    """Disables gradients of a field's parameters in a block."""
    trained = [parameter for parameter in field.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
