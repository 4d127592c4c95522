"""Cameras: poses, intrinsics and lenses, the rays through their pixels, and the pixels that show given points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.foundation.checks import check_at_least_one, check_field, check_index, check_same_device
from voxelfield.foundation.errors import shown
from voxelfield.rendering.lens import Lens
from voxelfield.rendering.rays import Rays, check_values, intersect_aabb
from voxelfield.rendering.rigid import compose, exp_se3

_LATTICE = 33  # points along each side of the image
_ALONG_EDGE = 9  # points along each edge of the image, for rays along its border
_PIXELS_ACROSS = 16  # points along each side of the image, for the fraction of rays that cross a box
_BOX_LATTICE = 9  # points along each axis of a box
_SAME_RAY = 1e-3  # radians

# Axes, right, up and backward, of cameras that look at the sides of a cube: forward, right, back, left, up and down.
_CUBE = (
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0), (-1.0, 0.0, 0.0)),
    ((-1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, -1.0)),
    ((0.0, 0.0, -1.0), (0.0, 1.0, 0.0), (1.0, 0.0, 0.0)),
    ((1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.0, -1.0, 0.0)),
    ((1.0, 0.0, 0.0), (0.0, 0.0, -1.0), (0.0, 1.0, 0.0)),
)


@dataclass(frozen=True, eq=False)
class Cameras:
    """Cameras, pinhole cameras unless they have a lens; their images may differ in size.

    Args:
        c2w: (N, 4, 4) float32, camera to world; OpenGL/Blender camera axes (x right, y up, looking along -z).
        intrinsics: (N, 4) float32, ``fx, fy, cx, cy`` in pixels, same device.
        width: Image width in pixels; if images differ in size, the largest width.
        height: Image height in pixels; if images differ in size, the largest height.
        lens: Lenses of the N images, same device; None for pinhole cameras.
        sizes: (N, 2) int64, each image's width and height in pixels, on the CPU whatever the cameras' device, so that
            reading a size does not synchronise. None: all images have the size ``width`` x ``height``.
        values: Further tensors (N, ...) by name, same device: values of each camera's rays (:attr:`Rays.values`), such
            as the time of each image.
        rolling: (N, 7) float32, same device: how cameras move while the rows of their images are exposed one after
            another (rolling shutter). From each row of pixels to the next, a camera turns by a rotation vector (3) in
            radians and moves by a vector (3) in world units, both in its own frame; then follows how far below the top
            of the image, in pixels, it has the pose ``c2w``. None: all rows have that pose.
        across: Number of rays along each side of a pixel, if each pixel here stands for one ray of a larger one
            (:func:`points_in_pixels`); 1 for ordinary images.

    Raises:
        TypeError: A tensor has another dtype, or ``lens`` is not a :class:`Lens`.
        ValueError: A tensor has another shape or device, a size is not an int of at least 1, or ``width`` and
            ``height`` are not the largest of ``sizes``.
    """

    c2w: Tensor
    intrinsics: Tensor
    width: int
    height: int
    lens: Lens | None = None
    sizes: Tensor | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict, kw_only=True)
    rolling: Tensor | None = field(default=None, kw_only=True)
    across: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        check_field("Cameras.c2w", self.c2w, ("N", 4, 4), torch.float32)
        check_field("Cameras.intrinsics", self.intrinsics, (len(self), 4), torch.float32, "Cameras.c2w", self.c2w)
        check_at_least_one("Cameras.width", self.width)
        check_at_least_one("Cameras.height", self.height)
        check_at_least_one("Cameras.across", self.across)
        if self.sizes is not None:
            check_field("Cameras.sizes", self.sizes, (len(self), 2), torch.int64)
            if self.sizes.device.type != "cpu":
                raise ValueError(f"Cameras.sizes must be on the CPU, got a tensor on {self.sizes.device}")
            if bool((self.sizes < 1).any()) or self.sizes.amax(dim=0).tolist() != [self.width, self.height]:
                raise ValueError(
                    f"Cameras.sizes must be at least 1 and at most {self.width} x {self.height}, which one image each "
                    f"must reach, got {shown(self.sizes.tolist())}"
                )
        check_values("Cameras.values", self.values, len(self), self.c2w)
        if self.rolling is not None:
            check_field("Cameras.rolling", self.rolling, (len(self), 7), torch.float32, "Cameras.c2w", self.c2w)
        if self.lens is None:
            return
        if not isinstance(self.lens, Lens):
            raise TypeError(f"Cameras.lens must be a Lens or None, got {type(self.lens).__name__}")
        if len(self.lens) != len(self):
            raise ValueError(f"Cameras.lens must be a Lens of {len(self)} cameras, got one of {len(self.lens)}")
        check_same_device("Cameras.lens", self.lens.rows, "Cameras.c2w", self.c2w)

    def __len__(self) -> int:
        return self.c2w.shape[0]

    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> Cameras:
        if isinstance(index, int):
            raise TypeError(
                f"Cameras index must be a slice, a sequence or a tensor, got the int {index}: "
                f"use cameras[{index}:{index + 1}] or cameras[[{index}]]"
            )
        if not isinstance(index, slice | Tensor):
            # An empty list would become a float tensor.
            index = torch.tensor(index) if len(index) > 0 else torch.empty(0, dtype=torch.int64)
        chosen = self._mapped(lambda values: values[index])
        if self.sizes is None or len(chosen["c2w"]) == 0:
            return replace(self, **chosen, sizes=None)
        sizes = self.sizes[index.cpu() if isinstance(index, Tensor) else index]
        return replace(self, **chosen, **_size_fields(sizes))

    @classmethod
    def of_sizes(cls, c2w: Tensor, intrinsics: Tensor, sizes: Tensor, lens: Lens | None = None) -> Cameras:
        """Returns cameras whose images may differ in size; with the arguments of the class.

        Args:
            c2w: (N, 4, 4) float32, N at least 1.
            intrinsics: (N, 4) float32.
            sizes: (N, 2) int64, widths and heights in pixels, on the CPU.
            lens: Lenses of the N images.
        """
        return cls(c2w, intrinsics, lens=lens, **_size_fields(sizes))

    def size(self, camera: int) -> tuple[int, int]:
        """Returns the width and height of one camera's image, in pixels."""
        if self.sizes is None:
            return self.width, self.height
        width, height = self.sizes[camera].tolist()
        return width, height

    def all_sizes(self) -> Tensor:
        """Returns the widths and heights (N, 2) of all images in pixels, int64, on the CPU."""
        common = torch.tensor([self.width, self.height]).expand(len(self), 2)
        return common if self.sizes is None else self.sizes

    def to(self, device: torch.device | str) -> Cameras:
        """Returns the same cameras on ``device``."""
        return replace(self, **self._mapped(lambda values: values.to(device)))

    def _mapped(self, change: Callable[[Any], Any]) -> dict[str, Any]:
        """Returns the fields of each camera, except the sizes, after a change of every tensor and of the lenses."""
        optional = {"lens": self.lens, "rolling": self.rolling}
        return {
            "c2w": change(self.c2w),
            "intrinsics": change(self.intrinsics),
            "values": {name: change(value) for name, value in self.values.items()},
            **{name: None if value is None else change(value) for name, value in optional.items()},
        }

    @property
    def has_ray_kernel(self) -> bool:
        """Whether the ops that cast rays themselves know these cameras. Does not synchronise with the device.

        They know no equirectangular images and no rolling shutters, whose rays :meth:`rays` casts.
        """
        return self.rolling is None and not self.spheres

    @property
    def spheres(self) -> bool:
        """Whether some cameras may be equirectangular. Does not synchronise with the device."""
        return self.lens is not None and self.lens.spheres

    @property
    def is_sphere(self) -> Tensor:
        """(N,) bool: which are equirectangular."""
        return torch.zeros_like(self.c2w[:, 0, 0], dtype=torch.bool) if self.lens is None else self.lens.is_sphere

    @property
    def kinds(self) -> str:
        """The models of the lenses, and whether some shutters roll, for messages; empty for pinholes."""
        kinds: list[str] = [] if self.lens is None else sorted(set(self.lens.models))
        if self.rolling is not None and bool(self.rolling[:, :6].any()):
            kinds.append("rolling shutter")
        return ", ".join(kinds)

    def with_values(self, **values: Tensor | float) -> Cameras:
        """Returns the same cameras with further values of their rays.

        Args:
            values: Tensors (N, ...), or numbers that are the same for all cameras, by name. A number becomes float32;
                ``image`` becomes int64, as in training.

        Raises:
            ValueError: A value has another shape.
        """
        device, given = self.c2w.device, {}
        for name, value in values.items():
            if not isinstance(value, Tensor):
                value = torch.full((len(self),), value, dtype=torch.int64 if name == "image" else torch.float32)
            given[name] = value.to(device)
        return replace(self, values={**self.values, **given})

    def enlarged(self, factor: int) -> Cameras:
        """Returns the same views with ``factor`` times as many pixels along each side.

        Raises:
            ValueError: ``factor`` is not an int of at least 1.
        """
        check_at_least_one("factor", factor)
        return self._resized(factor, lambda side: side * factor)

    def shrunk(self, factor: int) -> Cameras:
        """Returns the same views with pixels ``factor`` times as large; a remainder at the right and bottom is cut off.

        Raises:
            ValueError: ``factor`` is not an int from 1 to :attr:`shortest_side`.
        """
        if not isinstance(factor, int) or not 1 <= factor <= self.shortest_side:
            limit = self.shortest_side
            raise ValueError(f"factor must be an int in [1, {limit}], the shorter side in pixels, got {factor!r}")
        return self._resized(1 / factor, lambda side: side // factor)

    @property
    def shortest_side(self) -> int:
        """The shortest side of any image, in pixels."""
        return min(self.width, self.height) if self.sizes is None else int(self.sizes.min())

    def _resized(self, factor: float, resize: Callable[[Any], Any]) -> Cameras:
        """Returns the same views with ``factor`` times as many pixels and every side, an int or ints, resized."""
        sizes = None if self.sizes is None else resize(self.sizes)
        width, height = resize(self.width), resize(self.height)
        intrinsics, rolling = self.intrinsics * factor, scaled_rolling(self.rolling, factor)
        return replace(self, intrinsics=intrinsics, width=width, height=height, sizes=sizes, rolling=rolling, across=1)

    def rays(self, camera_index: Tensor, pixels: Tensor, aabb: Tensor) -> Rays:
        """Casts one ray through each given image point.

        Does not synchronise with the device, so on CUDA indices are checked only by the assertions of indexing itself.
        With a lens, rays are differentiable with respect to poses only.

        Args:
            camera_index: (R,) int64, on the cameras' device.
            pixels: (R, 2) float32, x (column) and y (row) in pixels; the first pixel's centre is (0.5, 0.5).
            aabb: (2, 3) float32, low and high corner in world units; bounds ``near`` and ``far``.

        Returns:
            Rays in the world frame with unit directions; ``near == far == 0`` for rays that miss the box.

        Raises:
            TypeError: An argument has another dtype.
            ValueError: An argument has another shape or device, or (on the CPU only) a camera index is out of range.
        """
        check_field("camera_index", camera_index, ("R",), torch.int64, "Cameras.c2w", self.c2w)
        check_index("camera_index", camera_index, len(self), "the cameras")
        check_field("pixels", pixels, (camera_index.shape[0], 2), torch.float32, "Cameras.c2w", self.c2w)
        origins, directions = self._cast(camera_index, pixels, pixels[:, 1])
        values = {name: value.index_select(0, camera_index) for name, value in self.values.items()}
        interval = intersect_aabb(origins.detach(), directions.detach(), aabb)
        return Rays(origins, directions, *interval, values=values)

    def row_poses(self, camera_index: Tensor, y: Tensor) -> Tensor:
        """Returns the poses of cameras while they exposed some rows; differentiable with respect to ``c2w``.

        The position changes linearly, and the rotation by the exponential map, from the pose ``c2w``.

        Args:
            camera_index: (R,) int64, on the cameras' device.
            y: (R,) float32, how far below the top of the image, in pixels: of the middle of a row, for its pose.

        Returns:
            (R, 4, 4) camera to world.
        """
        poses = self.c2w.index_select(0, camera_index)
        if self.rolling is None:
            return poses
        rolling = self.rolling.index_select(0, camera_index)
        motion = rolling[:, :6] * (y - rolling[:, 6])[:, None]
        turn = exp_se3(F.pad(motion[:, :3], (0, 3)))
        move = F.pad(motion[:, 3:, None], (3, 0, 0, 1))
        return compose(poses, turn + move)

    def largest_motion(self) -> Tensor:
        """Returns how far poses of rows are from ``c2w`` at most: angles in radians and distances (N, 2), float32."""
        if self.rolling is None:
            return self.c2w.new_zeros(len(self), 2)
        height = self.all_sizes()[:, 1].to(self.rolling)
        reach = torch.maximum(self.rolling[:, 6], height - self.rolling[:, 6])
        return self.rolling[:, :6].view(-1, 2, 3).norm(dim=-1) * reach[:, None]

    def _cast(self, camera_index: Tensor, pixels: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Returns origins and unit directions (R, 3) of :meth:`rays`, with the cameras' poses at rows ``y``."""
        poses = self.row_poses(camera_index, y.floor() + 0.5)
        intrinsics = self.intrinsics.index_select(0, camera_index)
        offset = (pixels - intrinsics[:, 2:]).div_(intrinsics[:, :2])
        right, up, backward, _ = poses[:, :3].unbind(-1)
        forward = -backward
        if self.lens is not None:
            offset = self.lens.rays_through(offset, camera_index)
            forward = forward * offset[:, 2:]
        # Sums of products instead of a matmul: with TF32 enabled, a matmul would deflect rays by a tenth of a pixel.
        directions = torch.addcmul(forward, right, offset[:, :1]).addcmul_(up, offset[:, 1:2], value=-1.0)
        return poses[:, :3, 3].contiguous(), F.normalize(directions, dim=-1)

    def relative_solid_angles(self, camera_index: Tensor, y: Tensor) -> Tensor:
        """Returns the solid angles of panoramas' pixels in relation to those at the horizon, and 1 for other images.

        Args:
            camera_index: (R,) int64, on the cameras' device.
            y: (R,) rows in pixels, as for :meth:`rays`.
        """
        _, fy, _, cy = self.intrinsics[camera_index].unbind(dim=1)
        return torch.where(self.is_sphere[camera_index], torch.cos((y - cy) / fy), 1.0)

    def image_rays(self, camera: int, aabb: Tensor, rows: slice = slice(None), columns: slice = slice(None)) -> Rays:
        """Casts one ray through the centre of every pixel of one camera, or of some rows and columns of its image.

        If pixels stand for the rays of larger ones, these rays are cast (:attr:`across`).

        Args:
            camera: Index of the camera, 0 to N - 1.
            aabb: (2, 3) float32, low and high corner in world units, on the cameras' device.
            rows: The rows.
            columns: The columns.

        Returns:
            A ray for each of these pixels of the camera's image, row by row from the top left one.

        Raises:
            IndexError: There is no such camera.
        """
        if not 0 <= camera < len(self):
            raise IndexError(f"camera must be 0 <= camera < {len(self)}, got {camera}")
        device, (width, height) = self.c2w.device, self.size(camera)
        across, down = (torch.arange(side, device=device, dtype=torch.float32) for side in (width, height))
        pixels = torch.cartesian_prod(down[rows], across[columns]).flip(-1)
        pixels = self.across * points_in_pixels(pixels, self.across)
        camera_index = torch.full((pixels.shape[0],), camera, dtype=torch.int64, device=device)
        return self.rays(camera_index, pixels, aabb)

    def image_chunks(self, camera: int, aabb: Tensor, chunk: int, every: int = 1) -> Iterator[Rays]:
        """Yields the rays of an image, at most ``chunk`` of them at a time, which are only then cast.

        Args:
            camera: As for :meth:`image_rays`.
            aabb: As for :meth:`image_rays`.
            chunk: Largest number of rays.
            every: Stride between the pixels that are used, along each side of the image.
        """
        width, height = self.size(camera)
        columns = slice(min(every, width) // 2, None, every)
        rows = max(1, chunk * every // width) * every
        for top in range(min(every, height) // 2, height, rows):
            rays = self.image_rays(camera, aabb, slice(top, top + rows, every), columns)
            for first in range(0, len(rays), chunk):
                yield rays[first : first + chunk]

    def border_rays(self) -> tuple[Tensor, Tensor]:
        """Returns origins and unit directions, both (N, P, 3), of rays through P points along each image's border."""
        along = torch.linspace(0, 1, _ALONG_EDGE)
        zero, one = torch.zeros_like(along), torch.ones_like(along)
        pairs = ((along, zero), (along, one), (zero, along), (one, along))
        border = torch.cat([torch.stack(pair, dim=-1) for pair in pairs])
        pixels = (border * self.all_sizes()[:, None]).to(self.c2w.device)
        index = torch.arange(len(self), device=self.c2w.device).repeat_interleave(len(border))
        # The lower edge belongs to the last row.
        rows = torch.minimum(pixels[..., 1].flatten(), (self.all_sizes()[index.cpu(), 1] - 1).to(pixels))
        origins, directions = self._cast(index, pixels.flatten(0, 1), rows)
        return origins.view(len(self), -1, 3), directions.view(len(self), -1, 3)

    def viewing_poses(self) -> Tensor:
        """Returns poses (M, 4, 4) whose optical axes say where cameras look; see :func:`viewing_poses`."""
        return viewing_poses(self.c2w, self.lens)

    def pinholes(self, *, all_round: bool = False) -> Cameras:
        """Returns pinhole cameras that stand still in place of these; without lenses, they show a similar view.

        In place of an equirectangular image, a square one shows 90 degrees around the optical axis, with as many pixels
        per radian there.

        Args:
            all_round: Whether the six sides of a cube are returned for an equirectangular image, that view first.
        """
        if not self.spheres:
            return replace(self, lens=None, rolling=None)
        sphere = self.is_sphere.cpu()
        index = torch.arange(len(self)).repeat_interleave(torch.where(sphere, len(_CUBE) if all_round else 1, 1))
        focal = self.intrinsics[:, :1].round().clamp(min=1)
        intrinsics = torch.where(sphere[:, None].to(focal.device), focal, self.intrinsics)
        sizes = torch.where(sphere[:, None], (2 * focal).long().cpu(), self.all_sizes())
        chosen = index.to(focal.device)
        still = Cameras.of_sizes(self.viewing_poses() if all_round else self.c2w, intrinsics[chosen], sizes[index])
        return replace(still, values={name: value[chosen] for name, value in self.values.items()})

    def pixel_angles(self) -> Tensor:
        """Measures the angles between the rays of neighbouring pixels, on a lattice over each image.

        Returns:
            (N, 2) float32, the smallest and the largest angle over all directions, radians.
        """
        device = self.c2w.device
        along = torch.linspace(0, 1, _LATTICE, device=device)
        points = torch.cartesian_prod(along, along) * self.all_sizes().to(device)[:, None]
        # Offsets of half a pixel to either side of each point, horizontally and vertically.
        moves = torch.tensor([[0.5, 0.0], [-0.5, 0.0], [0.0, 0.5], [0.0, -0.5]], device=device)
        pixels = (points[:, :, None] + moves).view(-1, 2)
        camera_index = torch.arange(len(self), device=device).repeat_interleave(len(along) ** 2 * len(moves))
        directions = self._cast(camera_index, pixels, pixels[:, 1])[1].view(*points.shape[:2], len(moves), 3)
        across, down = directions[:, :, 0] - directions[:, :, 1], directions[:, :, 2] - directions[:, :, 3]
        # Singular values of the map from pixels to directions, computed from the product with its transpose.
        mean = 0.5 * (across.square().sum(-1) + down.square().sum(-1))
        difference = 0.5 * (across.square().sum(-1) - down.square().sum(-1))
        spread = torch.hypot(difference, (across * down).sum(-1))
        smallest, largest = (mean - spread).amin(dim=1), (mean + spread).amax(dim=1)
        return torch.stack((smallest, largest), dim=-1).clamp(min=0).sqrt()


def check_not_empty(cameras: Cameras) -> None:
    """Raises ValueError if there are no cameras."""
    if len(cameras) == 0:
        raise ValueError("cameras must be at least one, got none")


def viewing_poses(c2w: Tensor, lens: Lens | None) -> Tensor:
    """Returns poses (M, 4, 4) whose optical axes say where cameras with poses (N, 4, 4) and lenses look.

    Each equirectangular camera is replaced by six that look at the sides of a cube around it, beginning with its own
    viewing direction.
    """
    if lens is None or not lens.spheres:
        return c2w
    cube = torch.eye(4, dtype=c2w.dtype, device=c2w.device).repeat(len(_CUBE), 1, 1)
    cube[:, :3, :3] = torch.tensor(_CUBE, dtype=c2w.dtype, device=c2w.device).mT
    poses = zip(c2w, lens.is_sphere.tolist(), strict=True)
    return torch.cat([pose @ cube if sphere else pose[None] for pose, sphere in poses])


def _size_fields(sizes: Tensor) -> dict[str, Any]:
    """Returns the fields ``width``, ``height`` and ``sizes`` of cameras with images of sizes (N, 2), N at least 1."""
    width, height = sizes.amax(dim=0).tolist()
    return {"width": width, "height": height, "sizes": None if bool((sizes == sizes[0]).all()) else sizes}


def points_in_pixels(places: Tensor, across: int) -> Tensor:
    """Returns the points in pixels (..., 2) through which rays go, of which ``across`` x ``across`` belong to a pixel.

    All x coordinates of a pixel's rays differ and are equally spaced, and so are all y (rooks in a grid: Chiu, Shirley
    and Wang 1994, Multi-jittered sampling, without its random order). An edge along a row or column thus gets as many
    shades as a pixel has rays. Four rays form a rotated grid; a single one goes through the centre.

    Args:
        places: (..., 2) column and row of each ray, counted in rays from a corner of the image or of the pixel.
        across: Number of rays along each side of a pixel.
    """
    right, down = (places % across).unbind(-1)
    within = torch.stack((right + (down + 0.5) / across, down + (across - right - 0.5) / across), dim=-1)
    return places.div(across, rounding_mode="floor") + within / across


def scaled_rolling(rolling: Tensor | None, factor: float | Tensor) -> Tensor | None:
    """Returns :attr:`Cameras.rolling` for images with ``factor`` times as many rows, a number or (N, 1)."""
    return None if rolling is None else torch.cat((rolling[:, :6] / factor, rolling[:, 6:] * factor), dim=1)


def pixels_of_rays(cameras: Cameras, index: int, rays: Tensor) -> Tensor:
    """Returns the pixels that rays of one camera pass through, as if all rows of its image had its pose.

    Rays (..., 3) point right, down and forward in the camera's frame and have any length. The result is (..., 2) int64,
    column and row, which may be outside the image, and negative for rays that it cannot show.
    """
    intrinsics = cameras.intrinsics[index]
    if cameras.lens is None:
        points, in_image = rays[..., :2] / rays[..., 2:], rays[..., 2] > 0
    else:
        flat = rays.reshape(-1, 3)
        points = cameras.lens.points_of(flat, index)
        back = cameras.lens.rays_through(points, torch.full_like(points[:, 0], index, dtype=torch.int64))
        error = (F.normalize(back, dim=-1) - F.normalize(flat, dim=-1)).norm(dim=-1)
        # The comparison is written so that it is False for NaN, i.e. points that overflowed are not shown.
        points, in_image = points.view(*rays.shape[:-1], 2), (error <= _SAME_RAY).view(rays.shape[:-1])
    pixels = points * intrinsics[:2] + intrinsics[2:]
    if cameras.spheres:
        # A partial panorama may continue across the seam at pi.
        column = pixels[..., 0].remainder(2 * math.pi * intrinsics[0])
        pixels = torch.where(cameras.is_sphere[index], torch.stack((column, pixels[..., 1]), dim=-1), pixels)
    pixels = pixels.floor()
    return torch.where(in_image[..., None], pixels, -1.0).long()


def views_of_points(cameras: Cameras, points: Tensor, near: float = 0.0) -> Tensor:
    """Counts the cameras (M,) int64 in whose images points (M, 3) lie, except those up to a distance ``near``.

    Occlusion and the motion of rolling shutters are disregarded.
    """
    count = torch.zeros(len(points), dtype=torch.int64, device=points.device)
    for rays, in_image in _seen(cameras, points):
        count += in_image & (rays.norm(dim=-1) > near)
    return count


def sees_box(cameras: Cameras, aabb: Tensor) -> Tensor:
    """Returns which cameras (N,) bool have a point of a lattice over a box (2, 3), world units, in their images."""
    along = torch.linspace(0, 1, _BOX_LATTICE, device=aabb.device)
    points = aabb[0] + torch.cartesian_prod(along, along, along) * (aabb[1] - aabb[0])
    return torch.stack([in_image.any() for _, in_image in _seen(cameras, points)])


def fraction_through_box(cameras: Cameras, aabb: Tensor) -> float:
    """Returns the fraction of rays that cross a box (2, 3), if pixels are drawn as in training, from a lattice.

    Pixels of panoramas are weighted by their solid angle.
    """
    steps = (torch.arange(_PIXELS_ACROSS, device=aabb.device) + 0.5) / _PIXELS_ACROSS
    sizes = cameras.all_sizes().to(aabb.device)
    points = (torch.cartesian_prod(steps, steps) * sizes[:, None]).view(-1, 2)
    index = torch.arange(len(cameras), device=aabb.device).repeat_interleave(_PIXELS_ACROSS**2)
    rays = cameras.rays(index, points, aabb)
    weights = cameras.relative_solid_angles(index, points[:, 1]) * sizes.prod(dim=1)[index]
    return float(((rays.far > rays.near) * weights).sum() / weights.sum())


def _seen(cameras: Cameras, points: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields, for each camera, its rays (M, 3) to points (M, 3), in its frame, and which of these its image shows."""
    sizes = cameras.all_sizes().to(points.device)
    to_ray = torch.tensor([1.0, -1.0, -1.0], device=points.device)  # from OpenGL's axes
    for index, c2w in enumerate(cameras.c2w):
        rays = ((points - c2w[:3, 3]) @ c2w[:3, :3]) * to_ray
        pixels = pixels_of_rays(cameras, index, rays)
        yield rays, ((pixels >= 0) & (pixels < sizes[index])).all(dim=-1)


def distance_to_nearest(cameras: Cameras, points: Tensor) -> Tensor:
    """Returns the distances (M,) of points (M, 3) from their nearest camera, world units."""
    nearest = torch.full((len(points),), torch.inf, device=points.device)
    for origin in cameras.c2w[:, :3, 3]:
        nearest = torch.minimum(nearest, (points - origin).norm(dim=-1))
    return nearest
