"""Refinement of the poses of held-out views with a fixed field."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import torch

from voxelfield.datasets.scene import Split
from voxelfield.evaluation.views import render_settings
from voxelfield.fields.field import RadianceField
from voxelfield.ops._internal.pixel_colors import pixel_colors
from voxelfield.rendering.march import Capacity
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.render import render
from voxelfield.training.batches import PixelSampler, background_for
from voxelfield.training.cameras.camera_refinement import CameraRefinement, motion_unit
from voxelfield.training.config import TrainerConfig
from voxelfield.training.losses import RenderedBatch, backpropagate, photometric
from voxelfield.training.step import autocast

FINAL_FACTOR = 0.02
"""Factor of the learning rate of poses after the last step."""


def refine_views(
    field: RadianceField,
    occupancy: OccupancyGrid,
    trainer: TrainerConfig,
    split: Split,
    *,
    steps: int,
    rate: float,
) -> Split:
    """Optimises the poses of images so that renderings of a field match them, starting from the given poses.

    A field whose cameras were refined lies in a frame that only its training images define, up to their errors.
    Held-out views are therefore evaluated as in BARF (Lin et al. 2021, section 4), with poses that were optimised for
    the same images, so that the result depends on the field and not on the accuracy of the poses. The field, its
    gradients and torch's global generators are not changed.

    Args:
        field: The field.
        occupancy: The occupied cells, on the field's device.
        trainer: Settings of sampling and of the averaging of pixels.
        split: The images, with cameras in the field's frame.
        steps: Number of steps of Adam; each draws pixels from all images.
        rate: Learning rate in radians and in units of :func:`motion_unit`; it decays to a fiftieth.

    Returns:
        The split with refined cameras, on the CPU.
    """
    device = field.aabb.device
    refinement = CameraRefinement(
        split.cameras.to(device),
        field.centre.to(field.aabb.device),
        steps=steps,
        pose_lr=rate,
        final_factor=FINAL_FACTOR,
        unit=motion_unit(field.frame),
    )
    fit_poses(refinement, field, occupancy, trainer, split, steps)
    return replace(split, cameras=refinement.refined().to("cpu"))


def fit_poses(
    refinement: CameraRefinement,
    field: RadianceField,
    occupancy: OccupancyGrid,
    trainer: TrainerConfig,
    split: Split,
    steps: int,
) -> None:
    """Optimises cameras so that renderings of a fixed field match their images; keeps torch's global generators.

    Args:
        refinement: The cameras, on the field's device; updated in place.
        field: The field.
        occupancy: The occupied cells, on the field's device.
        trainer: Settings of sampling and of the averaging of pixels.
        split: The images of those cameras.
        steps: Number of steps of Adam; each draws pixels from all images.
    """
    device = field.aabb.device
    pixels = PixelSampler(split, device, trainer.supersampling)
    capacity = Capacity(trainer.candidate_samples, trainer.visible_samples) if device.type == "cuda" else None
    rays_per_pixel = trainer.supersampling**2
    rays_drawn = trainer.max_rays if capacity else min(trainer.max_rays, max(1, trainer.visible_samples // 16))
    count = max(1, rays_drawn // rays_per_pixel)
    settings = render_settings(trainer, field)
    number = torch.zeros((), dtype=torch.int64, device=device)
    scale = torch.tensor(trainer.loss_scale, device=device)
    devices = [device] if device.type == "cuda" else []
    with torch.enable_grad(), _held(field), torch.random.fork_rng(devices):
        _seed(device)
        for _ in range(steps):
            rays, rgba, _ = pixels.draw(count, field.aabb, refinement())
            background = background_for(trainer.background, count, device)
            truth = rgba[:, :3] * rgba[:, 3:] + background * (1 - rgba[:, 3:])
            with autocast(trainer, device):
                rendering = render(field, rays, occupancy, settings, jitter=True, capacity=capacity)
            predicted = pixel_colors(
                rendering.rgb, rendering.opacity, background, rays_per_pixel, pixel_averaging=trainer.pixel_averaging
            )
            backpropagate([photometric(RenderedBatch(rendering, predicted, truth))], scale)
            refinement.step(number)
            number += 1


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
