"""Construction of a run's model, and of the parts of its training, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from voxelfield.datasets.scene import Scene
from voxelfield.datasets.transparency import CUT_OUT, transparency
from voxelfield.fields.environment import Environment, environment_of
from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import box_extent, box_tensor, parse_box
from voxelfield.models.model import Model
from voxelfield.models.part import Part
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.training.batches import PixelSampler
from voxelfield.training.cameras.camera_refinement import CameraRefinement
from voxelfield.training.cameras.camera_tones import CameraTones, distinct
from voxelfield.training.cameras.exposure import AffineExposure, ColorCorrection
from voxelfield.training.cameras.lost_cameras import LostCameras
from voxelfield.training.config import RunConfig
from voxelfield.training.depth import DepthSupervision
from voxelfield.training.environment import EnvironmentBackground, mean_color
from voxelfield.training.robust import RobustWeights
from voxelfield.training.sharpness import SharpnessWeights
from voxelfield.training.structure import VarianceWeightedError

logger = logging.getLogger(__name__)


def untrained_model(config: RunConfig, device: torch.device | str) -> Model:
    """Builds a model in its state at the start of training, with all cells occupied.

    Args:
        config: The settings of the run, with the recorded box and warp.
        device: Device of the model; may be ``meta``, to find out shapes only.

    Raises:
        ValueError: The scene has no box, or it has a warp, which this kind of field does not support.
    """
    if config.scene.aabb is None:
        raise ValueError("scene.aabb must be the box that the field was trained in, got None")
    warp, trainer = config.recorded_warp, config.trainer
    box = parse_box(config.scene.aabb) if warp is None else warp.warped_aabb
    aabb = box_tensor(box, torch.device("cpu"))
    cells: int | list[int] = trainer.occupancy.resolution
    if warp is not None:
        # As many cells per two units of warped coordinates.
        cells = [max(1, round(trainer.occupancy.resolution * extent / 2)) for extent in box_extent(box)]
    field = config.model.build(aabb, trainer.resolutions, device)
    if warp is not None:
        if not isinstance(field, RadianceField):
            name, wanted = ("ndc", "false") if warp.is_forward_facing else ("boxes", 1)
            raise ValueError(f"warp.{name} must be {wanted} for a {type(field).__name__}, which is no RadianceField")
        field.warp = warp
    if config.model.environment == "map":
        field.environment = Environment(device)
    with torch.device(device):
        occupancy = OccupancyGrid(cells, aabb)
    return config.model.build_model(field, occupancy, trainer.sampling)


def configured_parts(config: RunConfig, scene: Scene, model: Model, pixels: PixelSampler) -> Iterator[Part]:
    """Yields the parts that the configuration asks for, in the order in which they join a step."""
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
