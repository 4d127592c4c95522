"""Paths of cameras through a scene, besides :func:`voxelfield.rendering.cameras.orbit`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.splines import through_poses


def at_size(cameras: Cameras, width: int, height: int) -> Cameras:
    """Returns the views of cameras in images of another size, with the same vertical field of view.

    Args:
        cameras: The cameras; square pixels stay square.
        width: In pixels; a wider image shows more to the sides.
        height: In pixels.

    Raises:
        ValueError: A size is below 1.
    """
    factor = height / cameras.height
    intrinsics = cameras.intrinsics * factor
    intrinsics[:, 2] += 0.5 * (width - factor * cameras.width)
    return Cameras(cameras.c2w, intrinsics, width, height, cameras.lens)


def interpolate(cameras: Cameras, frames: int, *, keys: int = 10) -> Cameras:
    """Lays a smooth path through some of the cameras of a capture.

    The cameras are put in an order in which each is followed by the nearest one that is left, beginning with the first;
    positions count beside directions, in units of the capture's size. Some of them, evenly spread over that order, are
    what the path passes through, with positions, orientations and intrinsics on Catmull-Rom splines.

    Args:
        cameras: At least one. The image size is kept. A lens is not: straight lines are drawn straight.
        frames: Number of stations.
        keys: How many of the cameras to pass through, at most.

    Returns:
        ``frames`` cameras on the device of ``cameras``.

    Raises:
        ValueError: There are no cameras, or ``frames`` or ``keys`` is below 1.
    """
    if keys < 1:
        raise ValueError(f"keys must be at least 1, got {keys}")
    if len(cameras) == 0:
        raise ValueError("cameras must be at least one, to lay a path through, got none")
    near = _by_nearness(cameras.c2w.double().cpu())
    count = min(keys, len(near))
    chosen = cameras[[near[round(index * (len(near) - 1) / max(count - 1, 1))] for index in range(count)]].to("cpu")
    # Logarithms of focal lengths, so that a zoom is even.
    focal, centre = chosen.intrinsics[:, :2].double().log(), chosen.intrinsics[:, 2:].double()
    c2w, numbers = through_poses(chosen.c2w, torch.cat((focal, centre), dim=-1), frames)
    intrinsics = torch.cat((numbers[:, :2].exp(), numbers[:, 2:]), dim=-1)
    return Cameras(c2w.float(), intrinsics.float(), cameras.width, cameras.height).to(cameras.c2w.device)


def spiral(cameras: Cameras, target: Tensor, frames: int, *, turns: float = 2.0) -> Cameras:
    """Lays a spiral through cameras that look the same way, as LLFF draws its captures (Mildenhall et al. 2019).

    All stations look at the point of the mean camera's axis that is nearest to ``target``. Around the mean position
    they swing to the sides, up and down, and, half as often, to and fro, as far as nine in ten cameras do.

    Args:
        cameras: Set the spiral. The image size and the mean intrinsics are kept. A lens is not.
        target: (3,) point within what they show, world frame.
        frames: Number of stations; the last one lies one step before the first.
        turns: How often the path goes around.

    Returns:
        ``frames`` cameras on the device of ``cameras``, upright as the mean of them.

    Raises:
        ValueError: There are no cameras, they look in all directions, the target is behind them, or ``frames`` is below
            1.
    """
    if len(cameras) == 0:
        raise ValueError("cameras must be at least one, to lay a spiral through, got none")
    if frames < 1:
        raise ValueError(f"frames must be at least 1, got {frames}")
    device = cameras.c2w.device
    poses = cameras.c2w.double()
    backward = poses[:, :3, 2].mean(dim=0)
    if float(backward.norm()) < 0.5:
        raise ValueError("cameras must look much the same way for a spiral, got some that look in all directions")
    axes = _looking(-backward, poses[:, :3, 1].mean(dim=0))
    centre = poses[:, :3, 3].mean(dim=0)
    distance = float((centre - target.to(device, torch.float64)) @ axes[:, 2])
    if distance <= 0:
        raise ValueError(f"target must lie before the cameras, got {target.tolist()}, {-distance:.3g} behind them")
    reach = ((poses[:, :3, 3] - centre) @ axes).abs().quantile(0.9, dim=0)
    angle = 2 * math.pi * turns * torch.arange(frames, device=device, dtype=torch.float64) / frames
    swing = torch.stack((angle.cos(), -angle.sin(), -(0.5 * angle).sin()), dim=-1)
    positions = centre + (swing * reach) @ axes.mT
    focus = centre - distance * axes[:, 2]
    c2w = torch.eye(4, device=device, dtype=torch.float64).repeat(frames, 1, 1)
    c2w[:, :3, :3] = torch.stack([_looking(focus - position, axes[:, 1]) for position in positions])
    c2w[:, :3, 3] = positions
    intrinsics = cameras.intrinsics.mean(dim=0, keepdim=True).expand(frames, 4).contiguous()
    return Cameras(c2w.float(), intrinsics, cameras.width, cameras.height)


def _looking(direction: Tensor, up: Tensor) -> Tensor:
    """Returns a camera's axes (3, 3), one in each column, that looks in a direction with a direction upwards."""
    backward = -direction / direction.norm()
    right = torch.linalg.cross(up, backward)
    right = right / right.norm()
    return torch.stack((right, torch.linalg.cross(backward, right), backward), dim=-1)


def _by_nearness(c2w: Tensor) -> list[int]:
    """Returns an order of poses (N, 4, 4) in which each is followed by the nearest one that is left."""
    positions = c2w[:, :3, 3]
    size = float((positions - positions.mean(dim=0)).norm(dim=-1).mean())
    places = torch.cat((positions / (size if size > 0 else 1.0), c2w[:, :3, 2]), dim=-1)
    distances = torch.cdist(places, places)
    order = [0]
    left = torch.ones(len(places), dtype=torch.bool)
    for _ in range(len(places) - 1):
        left[order[-1]] = False
        order.append(int(distances[order[-1]].masked_fill(~left, math.inf).argmin()))
    return order
