"""Camera paths through a scene, in addition to :func:`voxelfield.rendering.cameras.orbit`."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.ops._checks import check_at_least_one
from voxelfield.rendering.cameras import Cameras, scaled_rolling
from voxelfield.rendering.rigid import quaternions, rotations

# Length of the mean of unit vectors above which they count as one direction: that of a uniform cone with a half-angle
# of 60 degrees.
_SAME_WAY = 0.75


# Columns of the quaternion in the interpolated rows: position, unit quaternion, other numbers.
_TURN = slice(3, 7)


def at_size(cameras: Cameras, width: int, height: int) -> Cameras:
    """Returns the same views in images of another size, with the same vertical field of view.

    Args:
        cameras: The cameras; square pixels stay square.
        width: Width in pixels; a wider image shows more at the sides.
        height: Height in pixels.

    Raises:
        ValueError: A size is below 1, or not in proportion to that of panoramas, which would not end where they do.
    """
    if cameras.spheres and width * cameras.height != height * cameras.width:
        raise ValueError(
            f"width and height must be in proportion to {cameras.width}x{cameras.height} for panoramas, got "
            f"{width}x{height}"
        )
    sizes = cameras.all_sizes().to(cameras.intrinsics)
    factor = height / sizes[:, 1:]
    intrinsics = cameras.intrinsics * factor
    intrinsics[:, 2] += 0.5 * (width - factor[:, 0] * sizes[:, 0])
    rolling = scaled_rolling(cameras.rolling, factor)
    return replace(cameras, intrinsics=intrinsics, width=width, height=height, sizes=None, rolling=rolling)


def interpolate(cameras: Cameras, frames: int, *, keys: int = 10) -> Cameras:
    """Creates a smooth path through some of the cameras of a capture.

    The path begins at the first camera and passes through others that are chosen as far apart as possible, in an order
    in which consecutive cameras are close; distances combine positions, in units of the capture's size, and viewing
    directions. The path thus stays where the capture was made. Positions, orientations and intrinsics are interpolated
    by Catmull-Rom splines.

    Args:
        cameras: At least one. Images of the path have the size of the first. The new cameras are pinhole cameras, even
            if these have lenses (:meth:`voxelfield.Cameras.pinholes`).
        frames: Number of cameras on the path.
        keys: Largest number of cameras that the path passes through.

    Returns:
        ``frames`` cameras on the device of ``cameras``.

    Raises:
        ValueError: There are no cameras, or ``frames`` or ``keys`` is below 1.
    """
    if keys < 1:
        raise ValueError(f"keys must be at least 1, got {keys}")
    if len(cameras) == 0:
        raise ValueError("cameras must be at least one, to lay a path through, got none")
    cameras = cameras.pinholes()
    width, height = cameras.size(0)
    chosen = at_size(cameras[_keys(cameras.c2w.double().cpu(), keys)].to("cpu"), width, height)
    # Logarithms of focal lengths, so that zooming is uniform.
    focal, centre = chosen.intrinsics[:, :2].double().log(), chosen.intrinsics[:, 2:].double()
    c2w, numbers = through_poses(chosen.c2w, torch.cat((focal, centre), dim=-1), frames)
    intrinsics = torch.cat((numbers[:, :2].exp(), numbers[:, 2:]), dim=-1)
    return Cameras(c2w.float(), intrinsics.float(), width, height).to(cameras.c2w.device)


def through_poses(c2w: Tensor, numbers: Tensor, frames: int, *, closed: bool = False) -> tuple[Tensor, Tensor]:
    """Samples a curve that passes through poses, with equal times between consecutive poses.

    Positions, orientations (as quaternions) and numbers follow Catmull-Rom splines (Catmull and Rom 1974).

    Args:
        c2w: (N, 4, 4) floating point rigid motions, N at least 1, on the CPU.
        numbers: (N, K) floating point, other quantities to interpolate.
        frames: Number F of samples on the curve, at least 1. An open curve begins and ends at a pose.
        closed: Whether the curve returns to its first pose, which is not repeated at the end.

    Returns:
        (F, 4, 4) rigid motions and (F, K) numbers, float64.

    Raises:
        ValueError: There are no poses, or ``frames`` is below 1.
    """
    if len(c2w) == 0:
        raise ValueError("c2w must contain at least one pose, got none")
    check_at_least_one("frames", frames)
    poses = c2w.double()
    rows = torch.cat((poses[:, :3, 3], quaternions(poses[:, :3, :3]), numbers.double()), dim=-1)
    spans = len(poses) if closed else len(poses) - 1
    stations = torch.arange(frames, dtype=torch.float64) * spans / (frames if closed else max(frames - 1, 1))
    curve = _catmull_rom(rows, stations, closed=closed)
    motions = torch.eye(4, dtype=torch.float64).repeat(frames, 1, 1)
    motions[:, :3, :3] = rotations(F.normalize(curve[:, _TURN], dim=-1))
    motions[:, :3, 3] = curve[:, :3]
    return motions, curve[:, 7:]


def _catmull_rom(numbers: Tensor, stations: Tensor, *, closed: bool) -> Tensor:
    """Interpolates rows (N, D) at parameters (F,); whole numbers give the rows themselves."""
    count = len(numbers)
    first = stations.floor().long()
    if not closed:
        first = first.clamp(0, max(count - 2, 0))
    t = (stations - first)[:, None]
    around: list[Tensor] = []
    for offset in (-1, 0, 1, 2):
        index = first + offset
        if not closed:
            index = index.clamp(0, count - 1)
        row = numbers[index % count].clone()
        # Of the two quaternions of an orientation, the one that is closer to that of the previous row.
        if around:
            flip = (row[:, _TURN] * around[-1][:, _TURN]).sum(dim=-1) < 0
            row[flip, _TURN] *= -1
        around.append(row)
    a, b, c, d = around
    return 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)


def spiral(cameras: Cameras, target: Tensor, frames: int, *, turns: float = 2.0) -> Cameras:
    """Creates a spiral through forward-facing cameras, as LLFF does for its captures (Mildenhall et al. 2019).

    All frames look at the point of the mean camera's axis that is nearest to ``target``. Around the mean position they
    move sideways and up and down, and, at half the frequency, forwards and backwards. The amplitude along each axis is
    the 90th percentile of the cameras' offsets.

    Args:
        cameras: Cameras that define the spiral. Its images have the size of the first and the mean intrinsics for that
            size, and no lens.
        target: (3,) point in the scene, world frame.
        frames: Number of cameras; the last one is one step before the first.
        turns: Number of turns of the spiral.

    Returns:
        ``frames`` cameras on the device of ``cameras``, with the mean up direction of these.

    Raises:
        ValueError: There are no cameras, they look in all directions, the target is behind them, or ``frames`` is below
            1.
    """
    if len(cameras) == 0:
        raise ValueError("cameras must be at least one, to lay a spiral through, got none")
    check_at_least_one("frames", frames)
    device = cameras.c2w.device
    poses = cameras.c2w.double()
    backward = poses[:, :3, 2].mean(dim=0)
    if float(backward.norm()) < _SAME_WAY:
        raise ValueError("cameras must face roughly the same way for a spiral, got some that look in all directions")
    axes = axes_looking(-backward, poses[:, :3, 1].mean(dim=0))
    centre = poses[:, :3, 3].mean(dim=0)
    distance = float((centre - target.to(device, torch.float64)) @ axes[:, 2])
    if distance <= 0:
        raise ValueError(f"target must lie in front of the cameras, got {target.tolist()}, {-distance:.3g} behind them")
    reach = ((poses[:, :3, 3] - centre) @ axes).abs().quantile(0.9, dim=0)
    angle = 2 * math.pi * turns * torch.arange(frames, device=device, dtype=torch.float64) / frames
    swing = torch.stack((angle.cos(), -angle.sin(), -(0.5 * angle).sin()), dim=-1)
    positions = centre + (swing * reach) @ axes.mT
    focus = centre - distance * axes[:, 2]
    c2w = torch.eye(4, device=device, dtype=torch.float64).repeat(frames, 1, 1)
    c2w[:, :3, :3] = torch.stack([axes_looking(focus - position, axes[:, 1]) for position in positions])
    c2w[:, :3, 3] = positions
    cameras = cameras.pinholes()
    width, height = cameras.size(0)
    intrinsics = at_size(cameras, width, height).intrinsics.mean(dim=0, keepdim=True).expand(frames, 4).contiguous()
    return Cameras(c2w.float(), intrinsics, width, height)


def axes_looking(direction: Tensor, up: Tensor) -> Tensor:
    """Returns the axes (3, 3), one per column, of a camera with the given viewing direction and up direction."""
    backward = -F.normalize(direction, dim=0)
    right = F.normalize(torch.linalg.cross(up, backward), dim=0)
    return torch.stack((right, torch.linalg.cross(backward, right), backward), dim=-1)


def _keys(c2w: Tensor, count: int) -> list[int]:
    """Chooses poses (N, 4, 4) as far apart as possible, ordered so that consecutive ones are close."""
    positions = c2w[:, :3, 3]
    size = float((positions - positions.mean(dim=0)).norm(dim=-1).mean())
    points = torch.cat((positions / (size if size > 0 else 1.0), c2w[:, :3, 2]), dim=-1)
    chosen = [0]
    nearest = (points - points[0]).norm(dim=-1)
    while len(chosen) < min(count, len(points)):
        nearest[chosen] = -1.0
        chosen.append(int(nearest.argmax()))
        nearest = torch.minimum(nearest, (points - points[chosen[-1]]).norm(dim=-1))
    return [chosen[index] for index in _short_tour(torch.cdist(points[chosen], points[chosen]).tolist())]


def _short_tour(distances: list[list[float]]) -> list[int]:
    """Returns an order beginning with the first element that no reversal of a section makes shorter (2-opt)."""
    order = [0]
    left = set(range(1, len(distances)))
    while left:
        order.append(min(left, key=distances[order[-1]].__getitem__))
        left.remove(order[-1])
    improved = True
    while improved:
        improved = False
        for first in range(1, len(order) - 1):
            for last in range(first + 1, len(order)):
                before = distances[order[first - 1]][order[first]]
                after = distances[order[first - 1]][order[last]]
                if last + 1 < len(order):
                    before += distances[order[last]][order[last + 1]]
                    after += distances[order[first]][order[last + 1]]
                if after < before - 1e-9:
                    order[first : last + 1] = order[first : last + 1][::-1]
                    improved = True
    return order
