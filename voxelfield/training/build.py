"""Construction of the components of a training from its settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from voxelfield.components.depth import DepthSupervision
from voxelfield.components.environment import EnvironmentBackground, mean_color
from voxelfield.components.exposure import AffineExposure, ColorCorrection
from voxelfield.components.lost_cameras import LostCameras
from voxelfield.components.refinement import CameraRefinement
from voxelfield.components.robust import RobustWeights
from voxelfield.components.sharpness import SharpnessWeights
from voxelfield.components.structure import VarianceWeightedError
from voxelfield.components.tones import CameraTones, distinct
from voxelfield.datasets.images import CUT_OUT
from voxelfield.datasets.measures import transparency
from voxelfield.datasets.scene import Scene
from voxelfield.fields.environment import environment_of
from voxelfield.models.component import Component
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.settings import RunConfig

logger = logging.getLogger(__name__)


def configured_components(config: RunConfig, scene: Scene, model: Model, pixels: PixelSampler) -> Iterator[Component]:
    """Yields the components that the configuration asks for, in the order in which they join a step."""
    trainer, camera = config.trainer, config.camera
    exposure: AffineExposure | None = None
    rate = config.optimizer.exposure_lr
    if trainer.exposure == "affine":
        exposure = AffineExposure(len(scene.train)).to(model.device)
    refinement = None
    environment = environment_of(model.field)
    if environment is not None:
        shares = transparency(scene.train)
        if sum(shares) >= CUT_OUT * len(shares):
            raise ValueError(
                "model.environment must be none for images of an object without its background, which show no "
                f"environment, got {config.model.environment}"
            )
        environment.fill(mean_color(scene.train))
        yield EnvironmentBackground(environment, config.optimizer.environment_lr)
    if camera.refines:
        logger.info(
            "cameras are refined: rays are computed by torch operations, no visual hull is used, and the stages are "
            "those of %s",
            "camera.stages" if camera.stages else "trainer.stages",
        )
        steps, warp = trainer.steps, model.warp
        refinement = CameraRefinement(
            pixels.cameras,
            torch.tensor(config.scene.aabb, device=model.device).mean(dim=0),
            steps=steps,
            pose_lr=camera.pose_lr,
            focal_lr=camera.focal_lr if camera.focal else None,
            final_factor=camera.final_factor,
            warm_up=round(camera.warm_up * steps),
            pose_from=camera.kept_steps(steps, forward=warp is not None and warp.is_forward_facing),
            focal_from=round(camera.focal_from * steps),
            unit=1.0 if warp is None else warp.motion_unit,
        )
        yield refinement
        if camera.search_poses > 0:
            for key in ("vignetting", "response"):
                if getattr(trainer, key):
                    raise ValueError(
                        f"camera.search_poses must be 0 with trainer.{key}=true, which cannot be undone in "
                        f"photographs, got {camera.search_poses}"
                    )
            yield LostCameras(refinement, model, scene.train, trainer, camera.search_poses, exposure)
    loss = trainer.loss
    if loss.sharpness > 0:
        yield SharpnessWeights(scene.train, pixels, loss.sharpness)
    if loss.robust > 0:
        yield RobustWeights(scene, pixels, loss, round(loss.robust_from * trainer.steps))
    if loss.depth > 0:
        cameras = refinement.refined if refinement is not None else lambda: pixels.cameras
        yield DepthSupervision(pixels, scene.train, loss.depth, model, cameras)
    if loss.structure > 0:
        yield VarianceWeightedError(pixels, loss.structure)
    if exposure is not None:
        yield ColorCorrection(exposure, rate, loss.exposure, environment=environment is not None)
    if trainer.vignetting or trainer.response:
        known = distinct(pixels.cameras)
        if trainer.response and len(known) == 1:
            raise ValueError(
                "trainer.response must be false for photographs of a single camera, whose response the colours of the "
                "field contain, got true"
            )
        tones = CameraTones(known, pixels.cameras, vignetting=trainer.vignetting, response=trainer.response)
        yield ColorCorrection(tones.to(model.device), rate, loss.tones, environment=environment is not None)
