"""Camera paths through a scene, and single cameras that show all of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.checks import check_at_least_one
from voxelfield.rendering.cameras import Cameras, check_not_empty, scaled_rolling
from voxelfield.rendering.render import View
from voxelfield.rendering.rigid import pose_matrices, quaternions, rotations
from voxelfield.warps.warp import Warp

PATHS = ("orbit", "spiral", "interpolate")
"""Names of paths that :func:`path_named` returns."""

# Largest angle in degrees between the world's z axis and the cameras' mean up direction at which the z axis is used.
_WORLD_UP_WITHIN = 15.0

# Length of the mean of unit vectors above which they count as one direction: the length for a uniform cone with a
# half-angle of 60 degrees.
_SAME_WAY = 0.75

# Number of turns of a spiral.
_TURNS = 2.0

# Columns of the quaternion in the interpolated rows: position, unit quaternion, other numbers.
_TURN = slice(3, 7)


def path_named(
    name: str | None,
    cameras: Cameras,
    frames: int,
    centre: Tensor,
    warp: Warp | None,
    render: Callable[[Cameras, int], View],
) -> Cameras:
    """Returns one of the usual paths through a trained scene, whose frames show the cameras' times in their order.

    Other values of rays (:attr:`Cameras.values`) are those of the nearest camera.

    Args:
        name: One of :data:`PATHS`; None: a spiral for a field in normalised device coordinates, whose cameras face the
            same way, or else an orbit.
        cameras: The cameras of the training, on the CPU.
        frames: Number of cameras on the path.
        centre: (3,) point of the scene that an orbit surrounds, world frame.
        warp: The warp of the field, if any.
        render: Renders one of the cameras.

    Raises:
        ValueError: A spiral was asked for, but the middle camera sees nothing solid, or cameras face all directions.
    """
    if name == "interpolate":
        path = interpolate(cameras, frames)
    elif name == "orbit" or (name is None and (warp is None or not warp.is_forward_facing)):
        path = orbit(cameras, centre, frames)
    else:
        target = seen_point(cameras, render)
        if target is None and name is not None:
            raise ValueError("path must be orbit or interpolate, because the middle camera sees no subject to circle")
        path = spiral(cameras, centre if target is None else target, frames)
    if not cameras.values:
        return path
    nearest = torch.cdist(path.c2w[:, :3, 3], cameras.c2w[:, :3, 3]).argmin(dim=1)
    values = {key: value[nearest] for key, value in cameras.values.items()}
    if "time" in values and values["time"].dim() == 1:
        low, high = cameras.values["time"].aminmax()
        values["time"] = low + (high - low) * torch.linspace(0, 1, frames)
    return path.with_values(**values)


def seen_point(cameras: Cameras, render: Callable[[Cameras, int], View]) -> Tensor | None:
    """Returns the point (3,) on the most central camera's axis at the mean inverse depth of its image, world units.

    Cameras and point are on the CPU; ``render`` renders one of them. None if that camera sees nothing solid.
    """
    positions = cameras.c2w[:, :3, 3]
    central = int((positions - positions.mean(dim=0)).norm(dim=-1).argmin())
    view = render(cameras, central)
    solid = view.depth[view.opacity > 0.5]
    if len(solid) == 0:
        return None
    pose = cameras.c2w[central]
    return pose[:3, 3] - pose[:3, 2] / float((1 / solid).mean())


def at_size(cameras: Cameras, width: int, height: int) -> Cameras:
    """Returns the same views in images of another size, with the same vertical field of view.

    Args:
        cameras: The cameras; square pixels stay square.
        width: Width in pixels; a wider image shows more at the sides.
        height: Height in pixels.

    Raises:
        ValueError: A size is below 1, or panoramas would get another aspect ratio and lose their edges.
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
    check_at_least_one("keys", keys)
    check_not_empty(cameras)
    return through(cameras.pinholes()[_keys(cameras.c2w.double().cpu(), keys)], frames)


def through(cameras: Cameras, frames: int, *, closed: bool = False) -> Cameras:
    """Creates a smooth path that passes through cameras in their order, with equal times between consecutive ones.

    Positions, orientations (as quaternions) and intrinsics follow Catmull-Rom splines (Catmull and Rom 1974).

    Args:
        cameras: At least one, without lenses. Images of the path have the size of the first.
        frames: Number of cameras on the path, at least 1; it begins and ends at one of ``cameras``.
        closed: Whether the path leads back to the first camera; its last camera is then one step before the first.

    Returns:
        ``frames`` cameras on the device of ``cameras``.

    Raises:
        ValueError: There are no cameras, or ``frames`` is below 1.
    """
    check_not_empty(cameras)
    check_at_least_one("frames", frames)
    width, height = cameras.size(0)
    keys = at_size(cameras.to("cpu"), width, height)
    poses = keys.c2w.double()
    # Logarithms of focal lengths, so that zooming is uniform.
    focal, centre = keys.intrinsics[:, :2].double().log(), keys.intrinsics[:, 2:].double()
    rows = torch.cat((poses[:, :3, 3], quaternions(poses[:, :3, :3]), focal, centre), dim=-1)
    spans, steps = (len(poses), frames) if closed else (len(poses) - 1, max(frames - 1, 1))
    stations = torch.arange(frames, dtype=torch.float64) * spans / steps
    if closed:
        rows = torch.cat((rows[-1:], rows, rows[:2] if len(rows) > 1 else rows[[0, 0]]))
        stations += 1
    curve = _catmull_rom(rows, stations)
    c2w = pose_matrices(rotations(F.normalize(curve[:, _TURN], dim=-1)), curve[:, :3]).float()
    intrinsics = torch.cat((curve[:, 7:9].exp(), curve[:, 9:]), dim=-1)
    return Cameras(c2w, intrinsics.float(), width, height).to(cameras.c2w.device)


def _catmull_rom(numbers: Tensor, stations: Tensor) -> Tensor:
    """Interpolates rows (N, D) at parameters (F,); whole numbers give the rows themselves."""
    count = len(numbers)
    first = stations.floor().long().clamp(0, max(count - 2, 0))
    t = (stations - first)[:, None]
    around: list[Tensor] = []
    for offset in (-1, 0, 1, 2):
        row = numbers[(first + offset).clamp(0, count - 1)]
        # An orientation has two quaternions; choose the one closer to the quaternion of the previous row.
        if around:
            flip = (row[:, _TURN] * around[-1][:, _TURN]).sum(dim=-1) < 0
            row[flip, _TURN] *= -1
        around.append(row)
    a, b, c, d = around
    return 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)


def spiral(cameras: Cameras, target: Tensor, frames: int) -> Cameras:
    """Creates a spiral through forward-facing cameras, as LLFF does for its captures (Mildenhall et al. 2019).

    All frames look at the point of the mean camera's axis that is nearest to ``target``. Around the mean position they
    move sideways and up and down, and, at half the frequency, forwards and backwards. The amplitude along each axis is
    the 90th percentile of the cameras' offsets.

    Args:
        cameras: Cameras that define the spiral. Its images have the size of the first and the mean intrinsics for that
            size, and no lens.
        target: (3,) point in the scene, world frame.
        frames: Number of cameras; the last one is one step before the first.

    Returns:
        ``frames`` cameras on the device of ``cameras``, with the mean up direction of these.

    Raises:
        ValueError: There are no cameras, they look in all directions, the target is behind them, or ``frames`` is below
            1.
    """
    check_not_empty(cameras)
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
    angle = 2 * math.pi * _TURNS * torch.arange(frames, device=device, dtype=torch.float64) / frames
    swing = torch.stack((angle.cos(), -angle.sin(), -(0.5 * angle).sin()), dim=-1)
    positions = centre + (swing * reach) @ axes.mT
    focus = centre - distance * axes[:, 2]
    turned = torch.stack([axes_looking(focus - position, axes[:, 1]) for position in positions])
    c2w = pose_matrices(turned, positions).float()
    cameras = cameras.pinholes()
    width, height = cameras.size(0)
    intrinsics = at_size(cameras, width, height).intrinsics.mean(dim=0, keepdim=True).expand(frames, 4).contiguous()
    return Cameras(c2w, intrinsics, width, height)


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


def reference_camera(warp: Warp | None, width: int, height: int) -> Cameras | None:
    """Returns the reference camera of a warp, on the CPU, with a field of view that shows all that the warp covers.

    The image has ``width`` x ``height`` pixels. None if the warp has no reference camera.
    """
    if warp is None or warp.reference is None:
        return None
    pose, ((x0, y0), (x1, y1)) = warp.reference
    focal = min(width / (x1 - x0), height / (y1 - y0))
    # Rows of pixels go down, y goes up.
    centre = width / 2 - focal * (x0 + x1) / 2, height / 2 + focal * (y0 + y1) / 2
    c2w = torch.eye(4)
    c2w[:3] = torch.tensor(pose)
    return Cameras(c2w[None], torch.tensor([[focal, focal, *centre]]), width, height)


def overview(aabb: Tensor, width: int, height: int) -> Cameras:
    """Places one camera so that it sees a whole box (2, 3), from obliquely above one of its corners, where z is up.

    The image has ``width`` x ``height`` pixels. The camera is on the device of ``aabb``.
    """
    azimuth, elevation, half_angle = (math.radians(degrees) for degrees in (-45.0, 25.0, 20.0))
    axes = _axes_above(*torch.tensor((azimuth, elevation), dtype=torch.float64))
    box = aabb.double().cpu()
    centre = box.mean(dim=0)
    corners = (torch.cartesian_prod(*box.unbind(-1)) - centre) @ axes
    # The nearest position from which every corner lies within both of the image's angles.
    focal = min(width, height) / 2 / math.tan(half_angle)
    half = torch.tensor((width, height), dtype=torch.float64) / 2
    distance = (corners[:, 2:] + corners[:, :2].abs() * focal / half).max()
    c2w = pose_matrices(axes, centre + distance * axes[:, 2]).float()
    return Cameras(c2w[None], torch.tensor([[focal, focal, width / 2, height / 2]]), width, height).to(aabb.device)


def orbit(cameras: Cameras, target: Tensor, frames: int) -> Cameras:
    """Places cameras on a circle around a point, all looking at it.

    The circle's axis is the direction that points up in the cameras' images, or the world's z axis if that is within 15
    degrees of it. If all cameras are on one side of the point, within half a turn, the path does not go behind the
    scene: it swings back and forth between the outermost cameras.

    Args:
        cameras: Cameras that define the circle: their mean distance from ``target`` and mean elevation above it. The
            new cameras are pinhole cameras with the first camera's image size and intrinsics
            (:meth:`Cameras.pinholes`).
        target: (3,) point to look at, world frame.
        frames: Number of cameras; the last one is one step before the first.

    Returns:
        ``frames`` cameras on the device of ``cameras``, upright.

    Raises:
        ValueError: There are no cameras, ``frames`` is below 1, or ``target`` has another shape.
    """
    check_not_empty(cameras)
    check_at_least_one("frames", frames)
    if target.shape != (3,):
        raise ValueError(f"target must have shape (3,), got {tuple(target.shape)}")
    centre = target.to(cameras.c2w.device, torch.float64)
    upright = upright_axes(cameras)
    arm = (cameras.c2w[:, :3, 3].double() - centre) @ upright.mT
    distance = arm.norm(dim=-1).mean()
    elevation = torch.atan2(arm[:, 2], arm[:, :2].norm(dim=-1)).mean().expand(frames)
    azimuth = _azimuths(torch.atan2(arm[:, 1], arm[:, 0]), frames)
    axes = upright.mT @ _axes_above(azimuth, elevation)
    first = cameras[:1].pinholes()
    c2w = pose_matrices(axes, centre + distance * axes[:, :, 2]).float()
    return Cameras(c2w, first.intrinsics.expand(frames, 4).contiguous(), *first.size(0))


def _axes_above(azimuth: Tensor, elevation: Tensor) -> Tensor:
    """Returns the axes (..., 3, 3), in columns, of upright cameras in directions (...) from a point, looking at it.

    Spherical coordinates give the axes in closed form, so looking straight down needs no special case.
    """
    right = torch.stack((-azimuth.sin(), azimuth.cos(), torch.zeros_like(azimuth)), dim=-1)
    level = elevation.cos()
    backward = torch.stack((level * azimuth.cos(), level * azimuth.sin(), elevation.sin()), dim=-1)
    return torch.stack((right, torch.linalg.cross(backward, right), backward), dim=-1)


def upright_axes(cameras: Cameras) -> Tensor:
    """Returns x, y and z axes (3, 3), one per row, of which z points up in the cameras' images; float64.

    This is the world's z axis if it is within 15 degrees, or if the cameras have no common up direction.
    """
    up = cameras.c2w[:, :3, 1].double().mean(dim=0)
    axes = torch.eye(3, dtype=torch.float64, device=up.device)
    length = float(up.norm())
    # Cameras that look straight down from all sides have no common up direction.
    if length < 0.1 or float(up[2]) / length > math.cos(math.radians(_WORLD_UP_WITHIN)):
        return axes
    up = up / length
    across = torch.linalg.cross(axes[up.abs().argmin()], up)
    across = across / across.norm()
    return torch.stack((across, torch.linalg.cross(up, across), up))


def _azimuths(cameras: Tensor, frames: int) -> Tensor:
    """Returns the azimuths of a path's frames from the azimuths of the cameras (N,), radians."""
    turns = torch.arange(frames, device=cameras.device, dtype=torch.float64) / frames
    ordered = cameras.sort().values
    gaps = torch.cat((ordered.diff(), ordered[:1] + 2 * math.pi - ordered[-1:]))
    widest = int(gaps.argmax())
    arc = 2 * math.pi - float(gaps[widest])
    if len(cameras) == 1 or arc >= math.pi:
        return 2 * math.pi * turns
    first = ordered[(widest + 1) % len(ordered)]
    return first + arc / 2 * (1 + torch.sin(2 * math.pi * turns))
