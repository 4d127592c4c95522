"""The choice of a warp for the field of a capture, and where its subject lies, from cameras, points and settings."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from typing import Annotated, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.config import NotNegative, Positive, Range
from voxelfield.grids.boxes import Box, parse_box
from voxelfield.warps.ndc_box import NdcBox
from voxelfield.warps.nested_boxes import MAX_BOXES, NestedBoxes
from voxelfield.warps.warp import Pose, Warp, Window

logger = logging.getLogger(__name__)

# Normalised device coordinates: the largest angle between an optical axis and the mean of all axes, degrees, and the
# smallest length of the mean of all up directions.
_LARGEST_ANGLE = 30.0
_LEAST_UP = 0.5
# Depth of their near plane, in depths of the nearest points; NeRF's loader of LLFF captures has the same.
_PLANE_OF_NEAREST = 0.75
# Smallest depth of that plane, in depths of the foremost camera.
_NEAREST_PLANE = 4 / 3
# Limits of the grid's depth, in halves of the window's longer edge.
_FLATTEST, _DEEPEST = 1 / 8, 2.0
# How many times as wide as one image all images together may be at the near plane for normalised device coordinates to
# be chosen. Where cameras stand farther apart, much of the grid is seen by few of them. At 2.3 times, nested boxes were
# as good; at 1.4 times, these coordinates were better (docs/experiments/photographs.md).
_WIDEST_WINDOW = 2.0
# Nested boxes: the default ratio of their sizes.
_RATIO = 2.0
# The fraction of points outside of the smallest box at each side, and its least thickness as a fraction of its longest
# edge.
_OUTSIDE_INNERMOST = 0.1
_THINNEST = 0.1
# Without points: the size of the smallest box in sizes of the cube of the cameras, and the number of boxes, in general
# and if cameras look at a subject from many sides.
_INNERMOST = 0.25
_BOXES, _BOXES_AROUND = 6, 7
# With points, if cameras look at a subject from many sides: the largest size of the smallest box, likewise.
_LARGEST_INNERMOST = 0.5
# How far the largest box reaches, at least, in distances of the farthest camera from its centre, likewise. Hills, trees
# and clouds around a subject gain from the farther reach; a room seen from within, whose boxes become coarser by one
# more, loses (docs/experiments/photographs.md).
_BEYOND_CAMERAS, _BEYOND_CAMERAS_AROUND = 2.0, 4.0
# Where rays begin: in depths of the nearest points, or in the nearest cameras' distance from the subject.
_NEAR_OF_NEAREST = 0.3
_NEAR_OF_CENTRE = 0.2
_OUTLIERS = 0.01
# Cosine of the angle from an optical axis beyond which points are hardly in the image.
_IN_VIEW = 0.5
# The margin of a box around points at each side, and the least extent of the points there, in their longest extent.
_MARGIN = 0.05
_LEAST_EXTENT = 1e-3
# Cameras look at one subject from many sides if the median cosine of the angles between their looks and the way to it,
# and the mean squared sine of the angles between their looks and the direction most common to them, are at least these.
# The latter is 0.12 for looks up to 30 degrees away from that direction.
_INWARD = 0.9
_FROM_MANY_SIDES = 0.12
# A camera is astray if it is this many times as far from the median position as three quarters of the cameras are. At
# most this fraction of the cameras can be astray: more belong to the capture.
_ASTRAY = 6.0
_MOST_ASTRAY = 0.1
# Distances between cameras that are only rounding, as a fraction of their coordinates.
_ONE_PLACE = 1e-6
# Numbers of points and cameras from which quantiles are computed.
_MAX_POINTS = 4000
_MAX_CAMERAS = 200


@dataclass
class WarpConfig:
    """Settings of the warp. Those that are None follow from the capture.

    A run records the settings from which :meth:`build` makes its warp again.

    Attributes:
        boxes: Number of nested boxes (:class:`voxelfield.warps.nested_boxes.NestedBoxes`), the smallest of which is
            the scene's box; 1: the field ends at that box. None: several for a scene that extends beyond its box.
        ratio: Ratio of the sizes of successive nested boxes; None: 2.
        near: Distance from a camera before which nothing is sampled, world units, with nested boxes; with ``ndc``, the
            depth of the near plane. None: as the cameras suggest.
        ndc: Whether the grid lies in normalised device coordinates (:class:`voxelfield.warps.ndc_box.NdcBox`), for
            photographs that all face the same way; None: where they do, points of the scene are known, and neither
            its box nor ``boxes`` nor ``ratio`` is given.
        camera: Reference camera of these coordinates, as a run records it with the following two: three rows of its
            camera-to-world matrix.
        window: Limits of x / depth and y / depth in the reference camera's frame.
        depth: Extent of the grid along the optical axis, in units of x / depth.
    """

    boxes: Annotated[int, Range(1, MAX_BOXES)] | None = None
    ratio: Annotated[float, Range(1, low_open=True)] | None = None
    near: NotNegative | None = None
    ndc: bool | None = None
    camera: Pose | None = None
    window: Window | None = None
    depth: Positive | None = None

    @classmethod
    def of(cls, warp: Warp | None) -> WarpConfig:
        """Returns the settings from which :meth:`build` makes an equal warp."""
        return cls(boxes=1) if warp is None else cls(**warp.settings)

    def check(self, name: str) -> None:
        """Raises ValueError if settings contradict each other, or recorded ones are incomplete."""
        if self.ndc and self.boxes is not None and self.boxes > 1:
            raise ValueError(f"{name}.ndc must be false or null with {self.boxes} nested boxes, got true")
        recorded = {"camera": self.camera, "window": self.window, "depth": self.depth}
        given = [key for key, value in recorded.items() if value is not None]
        if given and (len(given) < len(recorded) or not self.ndc or self.near is None):
            needed = ", ".join(f"{name}.{key}" for key in (*recorded, "near"))
            raise ValueError(f"{name}.{given[0]} must come with {name}.ndc=true and with all of {needed}")

    def ends_at_box(self, bounded: bool) -> bool:
        """Returns whether the field of a scene ends at the scene's box, in which case there is no warp.

        Args:
            bounded: Whether the scene shows nothing outside its box.
        """
        return not self.ndc and (self.boxes == 1 if self.boxes is not None else bounded)

    def build(self, aabb: Box) -> Warp | None:
        """Returns the warp that settings describe which a run has recorded; None if the field ends at its box.

        Args:
            aabb: The box of interest, world units.

        Raises:
            ValueError: There is no such warp.
        """
        if self.camera is not None and self.window is not None and self.depth is not None:
            return NdcBox(aabb, self.camera, self.near or 0.0, self.window, self.depth)
        if self.boxes is None or self.boxes == 1:
            return None
        return NestedBoxes(aabb, self.boxes, self.ratio or _RATIO, self.near or 0.0)


class NotForwardError(ValueError):
    """The cameras do not all face the same way, or some are too close to the scene."""


class CaptureFacts(Protocol):
    """The facts of a scene on which its warp depends; :class:`voxelfield.Scene` states them."""

    @property
    def aabb(self) -> Tensor:
        """(2, 3) the box of interest, world units."""

    @property
    def bounded(self) -> bool:
        """Whether the scene shows nothing outside ``aabb``."""

    @property
    def estimated(self) -> bool:
        """Whether ``aabb`` was only estimated from cameras or points, so that a warp may have another box."""

    @property
    def points(self) -> Tensor | None:
        """(M, 3) points of the scene, world units; None if unknown."""

    def poses(self) -> Tensor:
        """Returns the poses (N, 4, 4) of all photographs, camera to world, OpenGL axes."""

    def border_rays(self) -> tuple[Tensor, Tensor]:
        """Returns origins and unit directions, both (N, P, 3), of rays along the borders of all photographs."""


def choose_warp(scene: CaptureFacts, settings: WarpConfig) -> Warp | None:
    """Chooses the warp of a scene's field.

    A scene that ends at its box has none. Photographs that all face the same way, of a scene with known points, get
    normalised device coordinates; all others get nested boxes.

    Args:
        scene: The facts of the scene.
        settings: The user's settings, or those that a run has recorded.

    Raises:
        ValueError: ``settings.ndc`` is True, but the cameras do not all face the same way, or neither points nor
            ``settings.near`` determine the near plane, or the scene's box is not beyond it.
    """
    aabb, points = parse_box(scene.aabb), scene.points
    if settings.camera is not None:
        return settings.build(aabb)
    if settings.ends_at_box(scene.bounded):
        return None
    has_points = points is not None and len(points) > 0
    decided = settings.boxes is not None or settings.ratio is not None or not scene.estimated or not has_points
    if settings.ndc or (settings.ndc is None and not decided):
        try:
            widest = math.inf if settings.ndc else _WIDEST_WINDOW
            warp = ndc_box_of_cameras(scene.poses(), scene.border_rays(), points, settings.near, widest)
        except NotForwardError as error:
            if settings.ndc:
                raise ValueError(f"warp.ndc must be false or null for this capture: {error}") from error
            logger.info("the grid lies in nested boxes, not in normalised device coordinates: %s", error)
        else:
            logger.info(
                "all cameras face the same way: the grid lies in normalised device coordinates, with the near plane at "
                "a depth of %.4g (warp.ndc=false: nested boxes)",
                warp.near,
            )
            return warp if scene.estimated else replace(warp, aabb=aabb)
    boxes = nested_boxes_of_cameras(scene.poses(), points)
    return NestedBoxes(
        boxes.aabb if scene.estimated else aabb,
        settings.boxes or boxes.count,
        settings.ratio or _RATIO,
        boxes.near if settings.near is None else settings.near,
    )


def nested_boxes_of_cameras(c2w: Tensor, points: Tensor | None = None) -> NestedBoxes:
    """Returns nested boxes for photographs that also show the surroundings.

    With points, the smallest box contains the middle four fifths of them along each axis. The largest contains nearly
    all of them and reaches at least twice as far as the cameras, or four times if they look at a subject from many
    sides. Outdoors, most points may belong to the background. So around a subject, if points reach more than halfway to
    the cameras along an axis, the smallest box reaches halfway. Without points, it is a quarter of the cube of
    :func:`box_of_cameras`. Rays begin before the nearest points or, without points, before the subject as the nearest
    cameras see it. Poses and points are those of :class:`CaptureFacts`, at least one pose.
    """
    c2w = c2w[~stray_cameras(c2w)].double()
    viewed, distance, from_many_sides = viewed_cube(c2w)
    if points is None or len(points) == 0 or bool((points == points[0]).all()):
        low, high = viewed - _INNERMOST * distance, viewed + _INNERMOST * distance
        count = _BOXES_AROUND if from_many_sides else _BOXES
        # Cameras around a subject may come close to it, as to the middle of a long one.
        nearest = torch.quantile((c2w[:, :3, 3] - viewed).norm(dim=-1), _OUTLIERS) if from_many_sides else distance
        near = _NEAR_OF_CENTRE * float(nearest)
    else:
        # A random subset rather than every n-th point, because the points of frusta have a regular order.
        some = torch.randperm(len(points), generator=torch.Generator().manual_seed(0))[:_MAX_POINTS]
        points = points[some].double()
        low, high = (torch.quantile(points, q, dim=0) for q in (_OUTSIDE_INNERMOST, 1 - _OUTSIDE_INNERMOST))
        if from_many_sides:
            lowest, highest = viewed - _LARGEST_INNERMOST * distance, viewed + _LARGEST_INNERMOST * distance
            background = (low < lowest) | (high > highest)
            low, high = torch.where(background, lowest, low), torch.where(background, highest, high)
        # A wall that all points lie on has no thickness.
        extent = (points.amax(dim=0) - points.amin(dim=0)).max()
        half = torch.maximum((high - low) / 2, _THINNEST * (high - low).max() / 2).clamp(min=1e-6 * float(extent))
        centre = (low + high) / 2
        low, high = centre - half, centre + half
        reach = torch.quantile(((points - centre).abs() / half).amax(dim=-1), 1 - _OUTLIERS)
        # Every ray shows something, even where structure from motion found no points, as on a dark or blank background.
        # In a box that ended at the cameras, the background of some would lie right in front of others.
        beyond = _BEYOND_CAMERAS_AROUND if from_many_sides else _BEYOND_CAMERAS
        reach = torch.maximum(reach, beyond * ((c2w[:, :3, 3] - centre).abs() / half).max())
        count = min(max(math.ceil(math.log2(max(float(reach), 1.0))) + 1, 2), MAX_BOXES)
        cameras = c2w[:: -(-len(c2w) // _MAX_CAMERAS)]
        offset = points[:, None] - cameras[:, :3, 3]
        depth = (offset * -cameras[:, :3, 2]).sum(dim=-1)
        depth = depth[depth > _IN_VIEW * offset.norm(dim=-1)]
        near = _NEAR_OF_NEAREST * float(torch.quantile(depth, _OUTLIERS)) if len(depth) else 0.0
    return NestedBoxes((tuple(low.tolist()), tuple(high.tolist())), count, near=near)


def ndc_box_of_cameras(
    c2w: Tensor,
    border: tuple[Tensor, Tensor],
    points: Tensor | None,
    near: float | None = None,
    widest: float = math.inf,
) -> NdcBox:
    """Returns normalised device coordinates of the mean camera of a capture.

    Along the optical axis, the grid is as deep as the outermost camera's parallax: moving a point by one voxel in depth
    shifts it by one voxel in the view of that camera.

    Poses, rays along the borders of images, which the grid must cover, and points are those of :class:`CaptureFacts`.
    Without points, the box of interest reaches to ten times ``near``, which must then be given; it is by default three
    quarters of the depth of the nearest points. At the near plane, all images may be ``widest`` times as wide as one.

    Raises:
        NotForwardError: An optical axis is more than 30 degrees from the mean of all, the up directions cancel, the
            near plane is too close to a camera, the images together are wider than allowed, or a number overflows.
        ValueError: There are neither points nor ``near``.
    """
    if float(c2w[:, :3, 1].double().mean(dim=0).norm()) < _LEAST_UP:
        raise NotForwardError("cameras must agree on the up direction, got directions that cancel")
    # The camera (3, 4) at the mean position, with the mean of the directions and up vectors.
    _, up, backward, position = c2w[:, :3].double().mean(dim=0).unbind(dim=-1)
    backward = F.normalize(backward, dim=0)
    right = F.normalize(torch.linalg.cross(up, backward), dim=0)
    reference = torch.stack((right, torch.linalg.cross(backward, right), backward, position), dim=-1)
    axes = reference[:, :3]
    cosines = (F.normalize(c2w[:, :3, 2].double(), dim=-1) @ axes[:, 2]).clamp(-1, 1)
    angle = float(cosines.acos().rad2deg().max())
    if not angle <= _LARGEST_ANGLE:
        raise NotForwardError(
            f"cameras must look within {_LARGEST_ANGLE:g} degrees of their mean direction, got {angle:.0f} degrees"
        )
    offsets = (c2w[:, :3, 3].double() - position) @ axes
    nearest = _NEAREST_PLANE * max(float((-offsets[:, 2]).max()), 0.0)
    source = ""
    if near is None:
        if points is None or len(points) == 0:
            raise ValueError("near must be given with ndc where no points of the scene are known, got None")
        depths = -((points.double() - position) @ axes[:, 2])
        near = _PLANE_OF_NEAREST * float(depths.sort().values[int(_OUTLIERS * len(depths))])
        source = " from the nearest points"
    if not near > nearest:
        raise NotForwardError(
            f"near must be above {nearest:.4g}, because of the foremost camera, got {near:.4g}{source}"
        )
    (low, high), image = _window(border, position, axes, near)
    if float((high - low).max()) > widest * image:
        raise NotForwardError(
            f"images must together be at most {widest:g} times as wide as one at the near plane, got "
            f"{float((high - low).max()) / image:.1f} times"
        )
    half = float((high - low).max()) / 2
    depth = float(offsets[:, :2].norm(dim=-1).max()) / near
    window: Window = ((float(low[0]), float(low[1])), (float(high[0]), float(high[1])))
    x, y, z = map(tuple, reference.tolist())
    depth = min(max(depth, _FLATTEST * half), _DEEPEST * half)
    if points is None or len(points) == 0:
        points = _frustum(window, near, position, axes)
    try:
        warp = NdcBox(parse_box(box_of_points(points)), (x, y, z), near, window, depth)
        _ = warp.outermost, warp.warped_aabb  # raise if float32 cannot represent them
    except ValueError as error:
        raise NotForwardError(str(error)) from error
    return warp


def _window(
    border: tuple[Tensor, Tensor], position: Tensor, axes: Tensor, near: float
) -> tuple[tuple[Tensor, Tensor], float]:
    """Returns the limits (2,) of x / depth and y / depth between which all images lie, and the extent of the widest."""
    origins = (border[0].flatten(0, 1).double() - position) @ axes
    directions = border[1].flatten(0, 1).double() @ axes
    forward = -directions[:, 2]
    if not bool((forward > 0).all()):
        raise NotForwardError("rays must meet the near plane, got some that run away from it")
    slopes = directions[:, :2] / forward[:, None]
    at_near = (origins[:, :2] + slopes * (near + origins[:, 2:])) / near
    # Between the near plane and infinity, x / depth and y / depth lie between their values there.
    ends = torch.cat((slopes, at_near))
    each = slopes.view(*border[1].shape[:2], 2)
    return (ends.amin(dim=0), ends.amax(dim=0)), float((each.amax(dim=1) - each.amin(dim=1)).amax())


def _frustum(window: Window, near: float, position: Tensor, axes: Tensor) -> Tensor:
    """Returns the corners (8, 3) of the window's frustum from the near plane to ten times its depth."""
    x, y, depth = (torch.tensor(ends, dtype=torch.float64) for ends in (*zip(*window, strict=True), (near, 10 * near)))
    corners = torch.cartesian_prod(x, y, depth)
    return position + torch.cat((corners[:, :2] * corners[:, 2:], -corners[:, 2:]), dim=-1) @ axes.mT


def box_of_points(points: Tensor) -> Tensor:
    """Returns a box (2, 3) float64 around points (M, 3), at least one, that structure from motion found.

    A hundredth of them may lie outside at each side. There is a margin of a twentieth at each side.
    """
    points = points.double()
    low, high = (torch.quantile(points, q, dim=0) for q in (_OUTLIERS, 1 - _OUTLIERS))
    extent = high - low
    # A wall that all points lie on has no thickness.
    margin = _MARGIN * extent.clamp(min=max(1e-6, _LEAST_EXTENT * float(extent.max())))
    return torch.stack((low - margin, high + margin))


def stray_cameras(c2w: Tensor) -> Tensor:
    """Returns which cameras (N,) bool, of poses (N, 4, 4), are so far from all others that poses are probably wrong.

    These are more than six times as far from the median position as three quarters of the cameras are. Where that holds
    for more than a tenth of the cameras, they are not astray, and all are False.
    """
    origins = c2w[:, :3, 3].double()
    if len(origins) == 0:
        return torch.zeros(0, dtype=torch.bool)
    distance = (origins - origins.median(dim=0).values).norm(dim=-1)
    usual = torch.quantile(distance, 0.75)
    astray = (distance > _ASTRAY * usual) & (usual > 0)
    return astray & (int(astray.sum()) <= _MOST_ASTRAY * len(astray))


def viewed_point(origins: Tensor, looks: Tensor) -> Tensor:
    """Returns the point (3,) nearest to rays, in the least squares; of parallel rays, the one nearest to their origins.

    Origins and unit directions are (N, 3) float64, at least one.
    """
    across = torch.eye(3, dtype=torch.float64) - looks[:, :, None] * looks[:, None, :]
    mean = origins.mean(dim=0)
    offset = (across @ (origins - mean)[..., None]).sum(dim=0)
    # gelsd returns the solution nearest to the mean position if the rays are parallel.
    return mean + torch.linalg.lstsq(across.sum(dim=0), offset, driver="gelsd").solution[:, 0]


def look_from_many_sides(looks: Tensor) -> bool:
    """Returns whether unit directions (N, 3), float64, of rays to a point differ enough to determine the point."""
    return float(1 - torch.linalg.eigvalsh(looks.mT @ looks / len(looks))[-1]) >= _FROM_MANY_SIDES


def box_of_cameras(c2w: Tensor) -> Tensor:
    """Returns a cube (2, 3) float64 around the point that cameras (N, 4, 4) look at, at least one; without stray ones.

    Its half edge is the cameras' median distance from that point. Where cameras look away from it, as from within a
    room, the cube lies around the cameras instead, and reaches twice as far from their mean as the farthest does.
    """
    centre, reach, _ = viewed_cube(c2w[~stray_cameras(c2w)].double())
    return torch.stack((centre - reach, centre + reach))


def turn_on_the_spot(c2w: Tensor) -> bool:
    """Returns whether cameras (N, 4, 4), at least two, are all in one place, so that they show no distances.

    Of cameras that move a little as they turn, poses alone do not tell whether the movement is small for the scene.
    """
    origins = c2w[:, :3, 3].double()
    farthest = float((origins - origins.mean(dim=0)).norm(dim=-1).max())
    return len(c2w) > 1 and farthest <= _ONE_PLACE * float(origins.abs().max())


def viewed_cube(c2w: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Returns the centre (3,) and half edge () of the cube of cameras, and whether they surround a subject there."""
    origins, looks = c2w[:, :3, 3], -c2w[:, :3, 2]
    centre = viewed_point(origins, looks)
    depth = ((centre - origins) * looks).sum(dim=-1)
    if float(depth.median()) > 0:
        distance = (origins - centre).norm(dim=-1)
        inward = float((depth / distance).median()) >= _INWARD
        return centre, distance.median(), inward and look_from_many_sides(looks)
    mean = origins.mean(dim=0)
    spread = (origins - mean).norm(dim=-1).max()
    # Cameras in one place tell no length.
    return mean, 2 * spread if float(spread) > _ONE_PLACE * float(mean.abs().max()) else torch.ones_like(spread), False
