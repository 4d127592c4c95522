"""Refinement of the poses of held-out views with a fixed field."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.fields.environment import environment_of
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.losses import photometric
from voxelfield.models.model import Model
from voxelfield.models.part import Part
from voxelfield.training.batches import PixelSampler
from voxelfield.training.cameras.camera_refinement import CameraRefinement
from voxelfield.training.cameras.camera_tones import CameraTones, ToneCorrection
from voxelfield.training.config import TrainerConfig
from voxelfield.training.environment import EnvironmentBackground
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
    tones: CameraTones | None = None,
) -> Split:
    """Optimises the poses of images so that renderings of a field match them, starting from the given poses.

    The world frame of a field whose cameras were refined is defined by its training images alone, up to their errors.
    Held-out views are therefore evaluated as in BARF (Lin et al. 2021, section 4), with poses that were optimised for
    the same images, so that the result depends on the field and not on the accuracy of the poses. The field, its
    gradients and torch's global generators are not changed.

    Args:
        model: The model.
        trainer: Settings of sampling and of the averaging of pixels.
        split: The images, with cameras in the field's world frame.
        steps: Number of steps of Adam; each draws pixels from all images.
        rate: Learning rate in radians and in units of the warp's ``motion_unit``; it decays to a fiftieth.
        tones: Vignetting and response of the images, which are not changed; None if the images have none.

    Returns:
        The split with refined cameras, on the CPU.
    """
    device = model.device
    refinement = CameraRefinement(
        split.cameras.to(device),
        model.centre.to(device),
        steps=steps,
        pose_lr=rate,
        final_factor=FINAL_FACTOR,
        unit=1.0 if model.warp is None else model.warp.motion_unit,
    )
    fit_poses(refinement, model, trainer, split, steps, tones)
    return replace(split, cameras=refinement.refined().to("cpu"))


class _Photometric(Part):
    """The photometric loss alone."""

    def losses(self, outputs: Outputs, batch: Batch) -> Mapping[str, Tensor]:
        return {"photometric": photometric(outputs, batch)}


def fit_poses(
    refinement: CameraRefinement,
    model: Model,
    trainer: TrainerConfig,
    split: Split,
    steps: int,
    tones: CameraTones | None = None,
) -> None:
    """Optimises cameras in place so that renderings of a fixed field match their images; see :func:`refine_views`."""
    device = model.device
    # Only pixels are compared; the number of rays does not follow the samples, of which rays have few.
    config = replace(trainer, loss=replace(trainer.loss, distortion=0.0), not_finite="stop")
    rays = None if device.type == "cuda" else min(trainer.max_rays, max(1, trainer.visible_samples // 16))
    pixels = PixelSampler(split, device, trainer.supersampling)
    environment = environment_of(model.field)
    parts: list[Part] = [_Photometric(), refinement]
    if environment is not None:
        parts.append(EnvironmentBackground(environment))
    if tones is not None:
        parts.append(ToneCorrection(copy.deepcopy(tones).to(device), environment=environment is not None))
    step = TrainingStep(model, pixels, None, config, parts=parts, rays=rays)
    settings = model.settings
    trained = [parameter for parameter in model.field.parameters() if parameter.requires_grad]
    with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
        # ``torch.manual_seed`` would seed the generators of all GPUs.
        torch.default_generator.manual_seed(0)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(0)
        try:
            for parameter in trained:
                parameter.requires_grad_(False)
            for _ in range(steps):
                step.run(settings)
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
