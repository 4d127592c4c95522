"""Cameras that are optimised along with the field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from voxelfield.models.part import Part
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.rigid import compose, exp_se3, log_se3
from voxelfield.training.optimizer import EagerAdamW, exponential_decay, load_moments

_BETAS = (0.9, 0.99)


class CameraRefinement(Part):
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
        centre: (3,) the point about which cameras are rotated, world units.
        steps: Number of steps over which the learning rates decay.
        pose_lr: Learning rate of the motions, in radians and in units of ``unit``.
        focal_lr: Learning rate of the logarithm of the focal factor; None fixes focal lengths.
        final_factor: Factor of the learning rates after the last step.
        warm_up: Number of steps in which the learning rates rise from zero.
        pose_from: Number of steps for which the cameras are fixed first; the rates rise and decay after that.
        focal_from: Number of steps after which focal lengths are optimised.
        unit: Unit of the motions' translations, world units. A translation should shift the images about as much as a
            rotation by the same number of radians, which it does if the unit is the depth of the scene.

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
        centre: Tensor,
        *,
        steps: int,
        pose_lr: float,
        focal_lr: float | None = None,
        final_factor: float = 1.0,
        warm_up: int = 0,
        pose_from: int = 0,
        focal_from: int = 0,
        unit: float = 1.0,
    ) -> None:
        if focal_lr is not None and cameras.lens is not None:
            raise ValueError("camera.focal must be false for images of a lens that distorts, got true")
        if focal_lr is not None and cameras.rolling is not None:
            raise ValueError("camera.focal must be false for images of a rolling shutter, got true")
        device = cameras.c2w.device
        self.given = cameras
        # Subtracted from a pose, and added again, to make its position relative to the centre.
        self._centre = F.pad(centre[:, None], (3, 0, 0, 1))
        self.twists = nn.Parameter(torch.zeros(len(cameras), 6, device=device))
        self._unit = unit
        self._units = torch.tensor([1.0, 1.0, 1.0, unit, unit, unit], device=device)
        self.log_focal = None if focal_lr is None else nn.Parameter(torch.zeros((), device=device))
        self._steps, self._final_factor, self._warm_up = steps, final_factor, max(warm_up, 1)
        self._pose_from, self._focal_from = pose_from, focal_from
        self._highest = torch.tensor([pose_lr, focal_lr or 0.0], device=device)
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
    def copies(
        self, index: int, twists: Tensor, shrink: int, *, steps: int, pose_lr: float, final_factor: float
    ) -> CameraRefinement:
        """Creates a refinement of several copies of one camera; focal lengths keep their current values.

        Args:
            index: Index of the camera.
            twists: (K, 6) initial motions of the copies, as in :attr:`twists`.
            shrink: Factor by which their images have fewer pixels along each side.
            steps: As for the constructor.
            pose_lr: As for the constructor.
            final_factor: As for the constructor.
        """
        copies = CameraRefinement(
            self.given.shrunk(shrink)[[index] * len(twists)],
            self._centre[:3, 3],
            steps=steps,
            pose_lr=pose_lr,
            focal_lr=None if self.log_focal is None else 1.0,
            final_factor=final_factor,
            focal_from=steps + 1,
            unit=self._unit,
        )
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
            twist: (6,) as in :attr:`twists`, on the device.
        """
        self.twists[index] = twist
        for moment in self._optimizer.state[self.twists].values():
            if moment.shape == self.twists.shape:
                moment[index] = 0

    @torch.no_grad()
    def after_step(self, step: Tensor) -> None:
        """Updates motions and focal lengths by an optimizer and rates of their own, and clears their gradients."""
        since = step - self._pose_from
        rise = ((since + 1) / self._warm_up).clamp(min=0, max=1)
        decay = exponential_decay(since.clamp(min=0), self._steps - self._pose_from, self._final_factor)
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
        load_moments(self._optimizer, state["optimizer"], self._rates.split(1)[: len(self.parameters())])
