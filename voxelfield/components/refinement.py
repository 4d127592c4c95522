"""Refinement of cameras, along with the field or with a fixed field, and its result."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.components.environment import EnvironmentBackground
from voxelfield.components.exposure import CameraTones
from voxelfield.components.registry import ComponentSettings, Training, key
from voxelfield.config import BelowOne, Natural, Positive, Range, Resolution
from voxelfield.datasets.lenses import share_camera_model, transforms_camera
from voxelfield.datasets.scene import Split
from voxelfield.fields.environment import environment_of
from voxelfield.files import write_json
from voxelfield.foundation.optimizers import EagerAdamW, exponential_decay, load_moments
from voxelfield.models.component import Component
from voxelfield.models.losses import photometric
from voxelfield.models.model import Model
from voxelfield.models.pixel_sampler import PixelSampler
from voxelfield.models.settings import StageConfig
from voxelfield.rendering.alignment import Similarity, align_cameras, pose_errors
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import Capacity
from voxelfield.rendering.rigid import compose, exp_se3, log_se3
from voxelfield.run_directory import CAMERAS_FILE

logger = logging.getLogger(__name__)

Share: TypeAlias = Annotated[float, Range(0, 1, low_open=True)]

_BETAS = (0.9, 0.99)

# The default of ``pose_from`` in normalised device coordinates: the fog has cleared by then.
_POSE_FROM_IF_FORWARD = 0.3


@dataclass
class CameraStageConfig:
    """A resolution, and the share of the steps after which it applies.

    Attributes:
        start: Start of the stage, as a share of ``trainer.steps``.
        resolution: Cube root of the number of voxels.
        crop: Crop the grid to occupied space first.
    """

    start: BelowOne
    resolution: Resolution
    crop: bool = False


def _default_stages() -> list[CameraStageConfig]:
    return [
        CameraStageConfig(0.0, 16),
        CameraStageConfig(0.1, 32),
        CameraStageConfig(0.2, 64),
        CameraStageConfig(0.3, 128, crop=True),
        CameraStageConfig(0.4, 256),
    ]


@dataclass(frozen=True)
class RefinementSettings(ComponentSettings):
    """Settings of :class:`CameraRefinement`.

    Attributes:
        mode: ``none``, or ``refine`` to optimise poses along with the field.
        pose_lr: Learning rate of poses: about the largest change of a pose per step, in radians and in
            ``scene.unit``; in normalised device coordinates, the unit is the depth of the scene's centre.
        final_factor: Factor of the learning rates after the last step (exponential decay).
        warm_up: Share of the steps in which the rate rises from zero, because an empty field holds no information about
            poses. It begins at ``pose_from``.
        pose_from: Share of the steps before poses are refined; null means 0.3 for a field in normalised device
            coordinates, and 0 for others. If all cameras face the same way, fog contracts them towards their mean while
            it turns them about the centre of the scene, and a field with wrong depths then reproduces the training
            images nearly as well.
        focal: Also optimise the focal length, as one factor common to all images.
        focal_lr: Learning rate of the logarithm of this factor.
        focal_from: Share of the steps after which the focal length is optimised, unless ``pose_from`` is later: early
            in training, the field is fog, which misleads it.
        test_steps: Number of steps in which the pose of each evaluated view is refined first, with the field fixed; 0
            for none. The views are then evaluated with poses derived from their own images.
        test_lr: Learning rate of these poses.
        stages: Resolutions from coarse to fine, in place of ``trainer.stages``. From ``finest_from`` on, the resolution
            is that of the last of ``trainer.stages``; stages that are not coarser are left out. An empty list keeps
            ``trainer.stages``, for poses that are wrong by only a few pixels.
        finest_from: Start of the finest resolution, as a share of the steps; only used with ``stages``.
        occupancy_from: Share of the steps after which the occupancy grid is updated from the field, unless
            ``trainer.occupancy.start`` is later.
    """

    name = "cameras"
    results = (CAMERAS_FILE,)
    mode: Literal["none", "refine"] = key("camera.name", "none", off="none")
    pose_lr: Positive = key("camera.pose_lr", 5e-3)
    final_factor: Share = key("camera.final_factor", 0.01)
    warm_up: BelowOne = key("camera.warm_up", 0.02)
    pose_from: BelowOne | None = key("camera.pose_from", None)
    focal: bool = key("camera.focal", False)
    focal_lr: Positive = key("camera.focal_lr", 2e-3)
    focal_from: BelowOne = key("camera.focal_from", 0.1)
    test_steps: Natural = key("camera.test_steps", 0, after_training=True)
    test_lr: Positive = key("camera.test_lr", 1e-3, after_training=True)
    stages: list[CameraStageConfig] = key("camera.stages", factory=_default_stages)
    finest_from: BelowOne = key("camera.finest_from", 0.5)
    occupancy_from: BelowOne = key("camera.occupancy_from", 0.05)

    def check(self, config: Any, prefix: str = "") -> None:
        """Raises ValueError if settings contradict each other."""
        name, starts = f"{prefix}camera", [*(stage.start for stage in self.stages), self.finest_from]
        if self.stages and (starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts))):
            raise ValueError(f"{name}.stages must start at 0 and rise to {name}.finest_from, got {starts}")
        resolutions = [stage.resolution for stage in self.stages]
        if resolutions != sorted(resolutions):
            raise ValueError(f"{name}.stages must not become coarser, got resolutions {resolutions}")

    def adapt(self, trainer: Any) -> Any:
        """Returns the trainer's settings with the stages and the start of occupancy updates that refinement needs."""
        prunes_from = max(trainer.occupancy.start, round(self.occupancy_from * trainer.steps))
        occupancy = replace(trainer.occupancy, start=prunes_from)
        if not self.stages:
            return replace(trainer, occupancy=occupancy)
        finest = trainer.stages[-1].resolution
        shares = [stage for stage in self.stages if stage.resolution < finest]
        shares.append(CameraStageConfig(self.finest_from if shares else 0.0, finest))
        stages = [StageConfig(round(each.start * trainer.steps), each.resolution, each.crop) for each in shares]
        # In a short run several stages may start at the same step; the last one counts.
        stages = list({stage.step: stage for stage in stages}.values())
        return replace(trainer, stages=stages, occupancy=occupancy)

    def kept_steps(self, steps: int, *, forward: bool) -> int:
        """Returns the number of first steps with the given cameras; ``forward`` in normalised device coordinates."""
        default = _POSE_FROM_IF_FORWARD if forward else 0.0
        return round((default if self.pose_from is None else self.pose_from) * steps)

    def build(self, training: Training) -> Iterable[Component]:
        """Returns the component."""
        logger.info(
            "cameras are refined: rays are computed by torch operations, no visual hull is used, and the stages are "
            "those of %s",
            "camera.stages" if self.stages else "trainer.stages",
        )
        steps, model = training.config.trainer.steps, training.model
        kept = self.kept_steps(steps, forward=model.warp is not None and model.warp.is_forward_facing)
        centre, unit = model.centre.to(model.device), _unit(model)
        refinement = CameraRefinement(training.pixels.cameras, self, steps, centre, unit, kept)
        # Poses that need no coarse stages are wrong by a few pixels only.
        refinement.pose_errors = "large" if self.stages else "pixels"
        return [refinement]


def _with_fixed_field(pose_lr: float) -> RefinementSettings:
    """Returns the settings with which poses are fitted to a fixed field (:func:`fit_poses`)."""
    return RefinementSettings(pose_lr=pose_lr, final_factor=0.02, warm_up=0.0)


def _unit(model: Model) -> float:
    """Returns the unit of the motions' translations."""
    return model.unit * (1.0 if model.warp is None else model.warp.motion_unit)


class CameraRefinement(Component):
    r"""A rigid motion of each camera and a factor on all focal lengths, with the optimizer that updates them.

    The pose of camera n is :math:`T \exp(\xi_n) T^{-1} P_n`: the given pose, moved about the centre of the scene, as in
    BARF (Lin et al. 2021, section 3.1). A rotation about that point rotates the visible part of the scene and hardly
    shifts it. A rotation about the camera's own position would also shift it, like a translation does, so the two would
    be hard to separate.

    For the same reason, all positions move towards or away from the centre in proportion to the focal lengths. The
    centre of the scene then appears at the same size, so that the field need not be relearned; only the perspective
    changes, which determines focal lengths. The scale of the scene, which images cannot determine, follows.

    The given velocities of a rolling shutter, in the camera's frame, go along with its pose.

    Nothing here synchronises with the device, so it can be captured in a CUDA graph.

    Args:
        cameras: The given cameras, on the device.
        settings: The learning rates, and when focal lengths are optimised.
        steps: Number of steps over which the learning rates decay.
        centre: (3,) the point about which cameras are rotated, world units.
        unit: Unit of the motions' translations, world units. A translation should shift the images about as much as a
            rotation by the same number of radians, which it does if the unit is the depth of the scene.
        pose_from: Number of steps for which the cameras are fixed first; the rates rise and decay after that.

    Attributes:
        given: The given cameras.
        twists: (N, 6) parameter, initially zero, in the format of :func:`voxelfield.rendering.rigid.exp_se3`, with
            translations in units of ``unit``.
        log_focal: () parameter, initially zero, or None.

    Raises:
        ValueError: The focal length of cameras with a distorting lens or a rolling shutter is to be optimised.
    """

    name = "cameras"

    def __init__(
        self,
        cameras: Cameras,
        settings: RefinementSettings,
        steps: int,
        centre: Tensor,
        unit: float = 1.0,
        pose_from: int = 0,
    ) -> None:
        if settings.focal and cameras.lens is not None:
            raise ValueError("camera.focal must be false for images of a lens that distorts, got true")
        if settings.focal and cameras.rolling is not None:
            raise ValueError("camera.focal must be false for images of a rolling shutter, got true")
        device = cameras.c2w.device
        self.given = cameras
        # Subtracted from a pose, and added again, to make its position relative to the centre.
        self._centre = F.pad(centre[:, None], (3, 0, 0, 1))
        self.twists = nn.Parameter(torch.zeros(len(cameras), 6, device=device))
        self._unit = unit
        self._units = torch.tensor([1.0, 1.0, 1.0, unit, unit, unit], device=device)
        self.log_focal = nn.Parameter(torch.zeros((), device=device)) if settings.focal else None
        self.steps, self._final_factor, self._pose_from = steps, settings.final_factor, pose_from
        self._warm_up = max(round(settings.warm_up * steps), 1)
        self._focal_from = round(settings.focal_from * steps)
        self._highest = torch.tensor([settings.pose_lr, settings.focal_lr if settings.focal else 0.0], device=device)
        self._rates = torch.zeros_like(self._highest)
        # Views into the tensor of rates, so that the optimizer uses its current values.
        pose_rate, focal_rate = self._rates.split(1)
        groups: list[dict[str, Any]] = [{"params": [self.twists], "lr": pose_rate}]
        if self.log_focal is not None:
            groups.append({"params": [self.log_focal], "lr": focal_rate})
        self._optimizer = EagerAdamW(
            groups,
            lr=pose_rate,
            betas=_BETAS,
            eps=1e-15,
            weight_decay=0.0,
            fused=True,
            capturable=device.type == "cuda",
        )

    def cameras(self) -> Cameras:
        """Returns the current cameras, differentiable with respect to the parameters."""
        c2w = compose(exp_se3(self.twists * self._units), self.given.c2w - self._centre)
        intrinsics = self.given.intrinsics
        if self.log_focal is not None:
            factor = self.log_focal.exp()
            intrinsics = torch.cat((intrinsics[:, :2] * factor, intrinsics[:, 2:]), dim=1)
            positions = torch.cat((c2w[:, :3, 3:] * factor, c2w[:, 3:, 3:]), dim=1)
            c2w = torch.cat((c2w[:, :, :3], positions), dim=2)
        return replace(self.given, c2w=c2w + self._centre, intrinsics=intrinsics)

    @torch.no_grad()
    def refined(self) -> Cameras:
        """Returns the current cameras, without gradient."""
        return self.cameras()

    @torch.no_grad()
    def copies(self, index: int, twists: Tensor, shrink: int, pose_lr: float, steps: int) -> CameraRefinement:
        """Creates a refinement of several copies of one camera; focal lengths keep their current values.

        Args:
            index: Index of the camera.
            twists: (K, 6) initial motions of the copies, as in :attr:`twists`.
            shrink: Factor by which their images have fewer pixels along each side.
            pose_lr: Learning rate of the motions.
            steps: As for the constructor.
        """
        cameras = self.given.shrunk(shrink)[[index] * len(twists)]
        # The rate of the focal length would rise after twice the steps.
        settings = replace(_with_fixed_field(pose_lr), focal=self.log_focal is not None, focal_from=2.0)
        copies = CameraRefinement(cameras, settings, steps, self._centre[:3, 3], self._unit)
        copies.twists.copy_(twists)
        if copies.log_focal is not None and self.log_focal is not None:
            copies.log_focal.copy_(self.log_focal)
        return copies

    @torch.no_grad()
    def twists_towards(self, index: int, poses: Tensor) -> Tensor:
        """Returns the motions that move one camera to given poses, at the current focal lengths.

        Args:
            index: Index of the camera.
            poses: (K, 4, 4) camera to world, on the device.

        Returns:
            (K, 6) as in :attr:`twists`.
        """
        poses = (poses - self._centre).double()
        if self.log_focal is not None:
            poses[:, :3, 3] /= self.log_focal.double().exp()
        given = (self.given.c2w[index] - self._centre).double()
        return log_se3(poses @ torch.linalg.inv(given)).to(self.twists.dtype) / self._units

    @torch.no_grad()
    def set_pose(self, index: int, twist: Tensor) -> None:
        """Sets the motion of one camera and resets its moments in the optimizer.

        Args:
            index: Index of the camera.
            twist: (6,) as in :attr:`twists`, on any device.
        """
        self.twists[index] = twist
        for moment in self._optimizer.state[self.twists].values():
            if moment.shape == self.twists.shape:
                moment[index] = 0

    @torch.no_grad()
    def after_step(self, step: Tensor) -> None:
        """Updates motions and focal lengths by a separate optimizer with separate rates, and clears their gradients."""
        since = step - self._pose_from
        rise = ((since + 1) / self._warm_up).clamp(min=0, max=1)
        decay = exponential_decay(since.clamp(min=0), self.steps - self._pose_from, self._final_factor)
        torch.mul(self._highest, rise * decay, out=self._rates)
        self._rates[1] *= step >= self._focal_from
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def parameters(self) -> list[nn.Parameter]:
        """Returns the motions and the focal factor."""
        return [self.twists] if self.log_focal is None else [self.twists, self.log_focal]

    @torch.no_grad()
    def scalars(self) -> dict[str, float]:
        """Returns how far cameras have moved so far."""
        values = {
            "camera/turned_degrees": math.degrees(float(self.twists[:, :3].norm(dim=1).mean())),
            "camera/moved": self._unit * float(self.twists[:, 3:].norm(dim=1).mean()),
            "lr/pose": float(self._rates[0]),
        }
        if self.log_focal is not None:
            values["camera/focal_factor"] = math.exp(float(self.log_focal))
        return values

    def state_dict(self) -> dict[str, Any]:
        """Returns motions, moments, and the given and refined cameras."""
        given = {"given_c2w": self.given.c2w, "given_intrinsics": self.given.intrinsics}
        focal = {} if self.log_focal is None else {"log_focal": self.log_focal.detach()}
        refined = self.refined()
        return {
            "module": {"twists": self.twists.detach(), **focal, **given},
            "optimizer": self._optimizer.state_dict()["state"],
            "c2w": refined.c2w,
            "intrinsics": refined.intrinsics,
            "sizes": refined.all_sizes(),
        }

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raises ValueError if the state belongs to other cameras, or lacks a focal factor or has one."""
        given, own = state["module"]["given_c2w"], self.given.c2w
        if given.shape != own.shape or not torch.equal(given.to(own.device), own):
            raise ValueError("resume must name a checkpoint of the same cameras, got one of others")
        saved = "log_focal" in state["module"]
        if saved != (self.log_focal is not None):
            raise ValueError(f"camera.focal must be {str(saved).lower()}, as in the checkpoint")

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads motions and moments; learning rates stay as configured."""
        self.twists.copy_(state["module"]["twists"])
        if self.log_focal is not None:
            self.log_focal.copy_(state["module"]["log_focal"])
        load_moments(self._optimizer, state["optimizer"])


@dataclass(frozen=True, eq=False)
class RefinedCameras:
    """The training cameras before and after their refinement.

    Attributes:
        given: N cameras as in the scene.
        refined: The N cameras in the field's world frame, which they define.
    """

    given: Cameras
    refined: Cameras

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RefinedCameras:
        """Returns the cameras of a :meth:`CameraRefinement.state_dict`, on the CPU and without their lens."""
        module = state["module"]
        given = Cameras.of_sizes(module["given_c2w"].cpu(), module["given_intrinsics"].cpu(), state["sizes"].cpu())
        return cls(given, replace(given, c2w=state["c2w"].cpu(), intrinsics=state["intrinsics"].cpu()))

    @cached_property
    def similarity(self) -> Similarity:
        """The transform from the world frame of the given cameras to the world frame of the refined ones."""
        return align_cameras(self.given, self.refined)

    def follow(self, cameras: Cameras) -> Cameras:
        """Moves cameras of the scene into the world frame of the field.

        Args:
            cameras: Cameras in the world frame of the given ones.

        Returns:
            The cameras, on their device. A camera whose pose equals that of a given one exactly gets its refined pose;
            all others are moved by :attr:`similarity`. All focal lengths change by the same factor.
        """
        moved = self.similarity.cameras(cameras)
        c2w = moved.c2w.clone()
        known = self.given.c2w.to(c2w.device).flatten(1)
        for index, pose in enumerate(cameras.c2w.flatten(1)):
            found = (known == pose).all(dim=1).nonzero()
            if len(found) > 0:
                c2w[index] = self.refined.c2w[int(found[0, 0])].to(c2w.device)
        intrinsics = cameras.intrinsics.clone()
        intrinsics[:, :2] *= self.focal_factor
        return replace(moved, c2w=c2w, intrinsics=intrinsics)

    def follow_split(self, split: Split) -> Split:
        """Returns a split of the scene with its cameras in the world frame of the field."""
        return replace(split, cameras=self.follow(split.cameras))

    def changes(self) -> dict[str, float]:
        """Returns the mean changes over the cameras, apart from :attr:`similarity`.

        They are ``turned_degrees``, ``moved`` in the field's world units, and ``focal_factor``.
        """
        turned, moved = pose_errors(self.given, self.refined, rotations=True)
        return {"turned_degrees": float(turned.mean()), "moved": float(moved.mean()), "focal_factor": self.focal_factor}

    @property
    def focal_factor(self) -> float:
        """Factor by which all focal lengths were multiplied."""
        return float(self.refined.intrinsics[0, 0] / self.given.intrinsics[0, 0])


def write_cameras(path: Path, split: Split, cameras: Cameras, origin: Sequence[float] | None = None) -> None:
    """Writes the cameras of images in the format of nerfstudio's ``transforms.json``, atomically.

    The file contains the paths of the images' files, or else their names; ``origin`` is that of the positions.
    """
    names: Sequence[str] = split.names if split.paths is None else [str(path) for path in split.paths]
    cameras = cameras.to("cpu")
    frames = [
        {"file_path": name, **transforms_camera(cameras, index, cameras.size(index), origin)}
        for index, name in enumerate(names)
    ]
    write_json(path, share_camera_model(frames))


def refine_views(
    model: Model, trainer: Any, split: Split, *, steps: int, rate: float, tones: CameraTones | None = None
) -> Split:
    """Optimises the poses of images so that renderings of a field match them, starting from the given poses.

    The world frame of a field whose cameras were refined is defined by its training images alone, up to their errors.
    Held-out views are therefore evaluated as in BARF (Lin et al. 2021, section 4), with poses that were optimised for
    the same images, so that the result depends on the field and not on the accuracy of the poses. The field, its
    gradients and torch's global generators are not changed.

    Args:
        model: The model.
        trainer: Settings of sampling and of the averaging of pixels (:class:`voxelfield.settings.TrainerConfig`).
        split: The images, with cameras in the field's world frame.
        steps: Number of steps of Adam; each draws pixels from all images.
        rate: Learning rate in radians and in ``scene.unit`` or the warp's ``motion_unit``; it decays to a fiftieth.
        tones: Vignetting and response of the images, which are not changed; None if the images have none.

    Returns:
        The split with refined cameras, on the CPU.
    """
    device = model.device
    cameras, settings = split.cameras.to(device), _with_fixed_field(rate)
    refinement = CameraRefinement(cameras, settings, steps, model.centre.to(device), _unit(model))
    fit_poses(refinement, model, trainer, split, tones)
    return replace(split, cameras=refinement.refined().to("cpu"))


def fit_poses(
    refinement: CameraRefinement, model: Model, trainer: Any, split: Split, tones: CameraTones | None = None
) -> None:
    """Optimises cameras in place so that renderings of a fixed field match their images; see :func:`refine_views`."""
    device, settings, capacity = model.device, replace(model.settings, roulette=0.0), None
    # The number of rays does not follow the samples, of which rays have few.
    rays = min(trainer.max_rays, max(1, trainer.visible_samples // 16))
    if device.type == "cuda":
        capacity, rays = Capacity(trainer.candidate_samples, trainer.visible_samples), trainer.max_rays
    pixels, environment = PixelSampler(split, device, trainer.supersampling), environment_of(model.field)
    components: list[Component] = [] if environment is None else [EnvironmentBackground(environment)]
    if tones is not None:
        tones = copy.deepcopy(tones).to(device)
        tones.environment = environment is not None
        components.append(tones)
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
            for number in torch.arange(refinement.steps, device=device):
                batch = pixels.batch(
                    max(1, rays // trainer.supersampling**2), model.field.aabb, trainer.background, refinement.cameras()
                )
                batch.rays = model.rays_of(batch)
                outputs = model.render_batch(
                    batch, components, settings, pixel_averaging=trainer.pixel_averaging, capacity=capacity
                )
                (trainer.loss_scale * photometric(outputs, batch)).backward()
                refinement.after_step(number)
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
