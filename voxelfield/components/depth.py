"""A loss on the depth at which rays end, for pixels of known depth: from sensors, other programs, sparse points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.components.refinement import CameraRefinement
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import NotNegative
from voxelfield.models.batch import Batch, Outputs
from voxelfield.models.component import Component, LossTerms
from voxelfield.models.pixel_sampler import pixels_that_count
from voxelfield.ops.ray_sums import spread
from voxelfield.rendering.cameras import Cameras
from voxelfield.warps.warp import Warp

# Least fraction of the pixels of a batch that have a depth, on average.
_SHARE = 0.25
# Distances that are zero have no logarithm.
_NEAREST = 1e-6


@dataclass(frozen=True)
class DepthSettings(ComponentSettings):
    """The setting of a loss on depths, :func:`depth_error`.

    Attributes:
        depth: Log-distance between ray termination and the scene's depths (:mod:`voxelfield.components.depth`); 0.3 is
            enough. A run loads its scene with depths, and refuses one without. Keeps four bytes for each training
            pixel, and two more for the reliability of sparse points.
    """

    name = "depth"
    after = ("cameras",)
    scene_options: ClassVar[Mapping[str, Any]] = {"depth": True}
    depth: NotNegative = key("trainer.loss.depth", 0.0, off=0)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component. Where few pixels have a depth, as with sparse points, these are drawn more often.

        Raises:
            ValueError: The images have no depths, or not one for each pixel, or masks exclude all pixels that have one;
                or some image is equirectangular or has a rolling shutter.
        """
        split, pixels, refinement = training.scene.train, training.pixels, training.component(CameraRefinement)
        if "depth" not in split.extras:
            raise ValueError(
                f"trainer.loss.depth must be 0 for training images without depths, got {self.depth:g}: "
                "load_scene(..., depth=True) reads those of a capture"
            )
        if not pixels.cameras.has_ray_kernel:
            raise ValueError(
                "trainer.loss.depth must be 0 for equirectangular images, which have no depths along one axis, and for "
                f"those of a rolling shutter, got {self.depth:g}"
            )
        known, size = split.extras["depth"] > 0, (split.cameras.height, split.cameras.width)
        if known.shape[1:] != size:
            raise ValueError(
                f"extras['depth'] must have shape (N, {size[0]}, {size[1]}), one depth for each pixel, got "
                f"{tuple(known.shape)}"
            )
        counted = pixels_that_count(split)
        known = known if counted is None else known & counted
        count = sum(split.all_gather([int(image.sum()) for image in known]))
        if count == 0:
            raise ValueError(
                "trainer.loss.depth must be 0 for training images whose depths are all unknown or masked, got "
                f"{self.depth:g}"
            )
        if count < _SHARE * len(split) * size[0] * size[1]:
            pixels.favour(known, _SHARE)

        def term(outputs: Outputs, batch: Batch) -> Tensor:
            cameras = pixels.cameras if refinement is None else refinement.refined()
            weights = batch["depth_weight"] if "depth_weight" in split.extras else None
            return self.depth * depth_error(outputs, batch, cameras, training.model.warp, weights)

        return [LossTerms({self.name: term}, self.name)]


def depth_error(
    outputs: Outputs, batch: Batch, cameras: Cameras, warp: Warp | None = None, weights: Tensor | None = None
) -> Tensor:
    r"""Returns the mean log-distance between ray termination and supervised depth, over the rays that fit.

    The error of a ray with samples at distances :math:`t_i` and weights :math:`w_i`, whose depth places a surface at
    the distance :math:`D`, is :math:`\sum_i w_i |\log(t_i / D)| + 1 - \sum_i w_i`: light that passes through everything
    counts like a sample that is e times too far. It is the distance, on a logarithmic scale, by which the weights would
    have to be moved; it therefore depends neither on the units nor on the distance of the surface. Unlike an error of
    the mean distance, it is large where the weights are spread on both sides of the surface. The error of a ray without
    a depth is 0.

    Args:
        outputs: The rendered rays.
        batch: Their pixels, which carry ``"depth"`` (P,), the distance along the optical axis, world units; 0 where it
            is unknown.
        cameras: The cameras of all images, on the device.
        warp: The warp of the samples; None for the world frame.
        weights: (P,) floating point, how reliable each depth is; None for 1.

    Returns:
        () float32, differentiable with respect to the weights and opacities of the rendering.

    Raises:
        KeyError: The batch carries no depths.
    """
    rays, rendering = batch.rays, outputs.rendering
    samples, directions = rendering.samples, rays.directions.detach()
    backward = cameras.c2w[:, :3, 2].index_select(0, batch.images)
    towards = -(directions * batch.for_rays(backward)).sum(dim=1)
    # Depths are measured along the optical axis, distances of samples along their rays.
    distance = batch.for_rays(batch["depth"].float()) / towards
    distance = torch.where(distance.isfinite(), distance, 0.0)
    with torch.no_grad():  # where cameras are refined, positions of samples have gradients
        t = samples.t if warp is None else warp.world_distances(samples, rays.origins, directions)
    # 0 for rows of no ray, whose t is not a number.
    true = spread(distance[:, None], samples.ray_offsets, len(t))[:, 0]
    off = torch.where(true > 0, (t.clamp(min=_NEAREST) / true).log().abs(), 0.0)
    moved = ops.sum_along_rays(off, samples.ray_offsets, rendering.weights)
    error = torch.where(distance > 0, moved + 1 - rendering.opacity, 0.0)
    return outputs.mean_over_rays(error if weights is None else batch.for_rays(weights.float()) * error)
