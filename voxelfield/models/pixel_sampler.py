"""Random pixels of the training images, and the rays through them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield import processes
from voxelfield.datasets.scene import MASK_WEIGHT, Split
from voxelfield.devices import read_from_host
from voxelfield.distributed.shards import DividedRows, rows_between
from voxelfield.models.batch import Batch, background_for, columns_and_rows
from voxelfield.ops._internal.cameras import pixel_rays
from voxelfield.rendering.cameras import Cameras, points_in_pixels
from voxelfield.rendering.rays import Rays
from voxelfield.rendering.visual_hull import visual_hull

_ROUNDS = 5

Images = Literal["device", "local", "host"]
"""Place of training images: all on each device, only the local ones (``Split.local_slice``) there or in host memory."""


class PixelSampler:
    """Draws pixels uniformly from all training images, which stay in memory as 8-bit RGBA.

    In panoramas, single pixels are drawn in proportion to the solid angle that they show, because towards the poles
    ever more of them show the same. Pixels excluded by a mask are never drawn. For this, the indices of all other
    pixels are stored.

    If the split has a ``local_slice``, making a sampler is a collective call. Unless all images are on each device, the
    processes must then draw alike, from generators in one state, and draw and read in one order, because each pixel
    comes from the process whose local images include its image.

    Args:
        split: Training images and cameras.
        device: Device of the batches.
        supersampling: Number of rays along each side of a pixel.
        patches: Number of square patches at the beginning of each batch. Patches lie inside an image, so pixels within
            half a patch of its edge are drawn with a different probability than others.
        patch_size: Side of the patches in pixels.
        images: Where the images and the data of pixels are: ``device``, all of them on the device of each process;
            ``local``, the local images there; or ``host``, these in pinned host memory, from which the GPU reads the
            pixels that it draws. Without a ``local_slice``, the first two are the same.

    Attributes:
        cameras: The cameras of all training images, on the device.
        images: The local images (N, H, W, 4), uint8 RGBA, on the device; opaque where a mask excludes pixels.
        sizes: The widths and heights (N, 2) of :attr:`images`, int64, on the CPU; None: all are W x H.

    Raises:
        ValueError: Patches do not fit in the images, or in their unmasked part.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        supersampling: int = 1,
        patches: int = 0,
        patch_size: int = 1,
        *,
        images: Images = "local",
    ) -> None:
        self._device, self._on_host, self._split = device, images == "host", split
        self._gathers = gathers = images == "device" and split.local_slice is not None
        self._local_slice = None if gathers else split.local_slice
        self._of_images: dict[str, Tensor] = {}
        self._of_pixels: dict[str, Tensor | DividedRows] = {}
        self._favoured: tuple[Tensor | DividedRows, float] | None = None
        counted = pixels_that_count(split)
        self._drawable = None if split.masks is None or counted is None else self._numbers(counted)
        self.images = self._stored(opaque_where_masked(split), gathers)
        self._colors = _rows(self._local_slice, self.images.view(-1, 4))
        self.cameras = split.cameras.to(device)
        sizes = self.cameras.sizes
        self.sizes = None if sizes is None else sizes[self._local_slice or slice(None)]
        self._packing = None
        self._count = len(self._colors if self._drawable is None else self._drawable)
        if sizes is not None and self._drawable is None:
            pixels = sizes.prod(dim=1)
            self._packing = (pixels.cumsum(0) - pixels).to(device), sizes[:, 0].to(device)
            self._count = int(pixels.sum())
        self._supersampling, self._patches, self._patch_size = supersampling, patches, patch_size
        shorter = min(self.cameras.height, self.cameras.width)
        if patches > 0 and patch_size > shorter:
            raise ValueError(f"patch_size must be at most the images' shorter side, {shorter}, got {patch_size}")
        square = torch.arange(patch_size, device=device)
        self._patch_offsets = (square[:, None] * self.cameras.width + square).flatten()
        self._patch_corners = None
        if patches > 0 and counted is not None:
            self._patch_corners = self._numbers(corners_of_patches(counted, patch_size))
            if len(self._patch_corners) == 0:
                raise ValueError(
                    f"patch_size must fit into an image, or into the part that its mask leaves, got {patch_size}"
                )
        for name, data in split.extras.items():
            self.carry(name, self._stored(data, gathers) if gathers and data.dim() >= 3 else data)

    def _stored(self, tensor: Tensor, gathers: bool = False) -> Tensor:
        """Returns rows where they are read; if it ``gathers``, those of all processes, by a collective call."""
        stored = read_from_host(tensor, self._device) if self._on_host else tensor.to(self._device).contiguous()
        if not gathers:
            return stored
        bounds = [0, *itertools.accumulate(processes.row_counts(stored))]
        return rows_between(stored, bounds, 0, bounds[-1])

    def _numbers(self, which: Tensor) -> Tensor | DividedRows:
        """Returns the indices, into the pixels of all images, of some pixels (N, H, W) of the local images."""
        size = self._split.cameras.height * self._split.cameras.width
        numbers = which.flatten().nonzero()[:, 0] + self._split.local_indices.start * size
        return _rows(self._local_slice, self._stored(numbers.to(pixel_number_type(self._split)), self._gathers))

    def carry(self, name: str, data: Tensor) -> None:
        """Lets batches carry further data, which they return as ``batch[name]``; raises ValueError if that is taken.

        The data, on any device, are (N, H, W, ...) for each pixel of :attr:`images` or of all images, or (N,) or (N, K)
        for each camera.
        """
        if name in (*self._of_images, *self._of_pixels):
            raise ValueError(f"name must be a new one, got {name!r}, which batches carry already")
        per_pixel = data.dim() >= 3
        if per_pixel and self._local_slice is not None and len(data) == len(self.cameras):
            data = data[self._local_slice]
        expected = self.images.shape[:3] if per_pixel else (len(self.cameras),)
        if data.shape[: len(expected)] != expected:
            raise ValueError(
                f"data {name!r} must have shape ({', '.join(map(str, expected))}, ...), got {tuple(data.shape)}"
            )
        if per_pixel:
            self._of_pixels[name] = _rows(self._local_slice, self._stored(data).flatten(0, 2))
        else:
            self._of_images[name] = data.to(self._device).contiguous()

    def favour(self, which: Tensor, probability: float) -> None:
        """Draws some pixels more often; pixels that a mask excludes are still never drawn.

        Each pixel of a batch outside of its patches is one of these with the given probability, and otherwise drawn
        from all as before. ``which`` (N, H, W) on the CPU marks pixels of the local images; those of all processes must
        contain one that no mask excludes.
        """
        counted = pixels_that_count(self._split)
        self._favoured = self._numbers(which if counted is None else which & counted), probability

    def look_up(self, name: str, pixels: Tensor) -> Tensor:
        """Returns the data of a name for pixels (P,); see :meth:`Batch.__getitem__`."""
        if name in self._of_images:
            # Not in brackets, because on CUDA their backward pass sorts the indices.
            return self._of_images[name].index_select(0, self.images_of(pixels))
        if name not in self._of_pixels:
            there = ", ".join(["colours", *map(repr, (*self._of_images, *self._of_pixels))])
            raise KeyError(f"the training images carry no {name!r}, but {there}")
        rows = self._of_pixels[name]
        return rows[pixels] if isinstance(rows, Tensor) else rows.of_each(pixels)

    def batch(
        self, count: int, aabb: Tensor, background: str, cameras: Cameras | None = None, *, shared: bool = False
    ) -> Batch:
        """Draws a batch of ``count`` pixels, or of all pixels of the patches if these are more.

        It uses torch's global generator. The box ``aabb`` bounds the rays. From ``cameras``, they are differentiable
        with respect to these cameras' tensors. If the processes share the pixels and patches, each draws all and
        returns its own.
        """
        patches, area = self._patches, self._patch_size**2
        count = max(count, patches * area)
        if patches == 0:
            index = self._draw_pixels(count)
        else:
            index = torch.cat((self._draw_patches(), self._draw_pixels(count - patches * area)))
        behind = background_for(background, count, index.device)
        # Before each process takes its part, because the local images of one have colours for the others.
        colors, part = None if isinstance(self._colors, Tensor) else self._colors[index], None
        if shared:
            in_patches, single = torch.arange(count, device=index.device).split(
                (patches * area, count - patches * area)
            )
            own = in_patches.view(patches, area)[processes.rows(patches)]
            rows = torch.cat((own.flatten(), single[processes.rows(len(single))]))
            index, behind, patches = index[rows], behind[rows], len(own)
            colors = None if colors is None else colors[rows]
            square = self._supersampling**2
            rays_of_rows = (rows[:, None] * square + torch.arange(square, device=rows.device)).flatten()
            part = rays_of_rows, count * square
        rays, rgba = self._read(index, aabb, cameras, colors)
        has_weights = MASK_WEIGHT in self._of_pixels
        return Batch(
            replace(rays, part=part),
            rgba,
            index,
            behind,
            patches,
            self._patch_size,
            self.look_up(MASK_WEIGHT, index).float() / 255 if has_weights else None,
            look_up=self.look_up,
            images_of=self.images_of,
        )

    def visual_hull(self, aabb: Tensor, resolution: tuple[int, int, int]) -> Tensor:
        """Returns the visual hull (X, Y, Z) of all images in a box (2, 3), bool, on the device.

        See :func:`voxelfield.rendering.visual_hull.visual_hull`; pixels excluded by a mask count as opaque.
        """
        cameras = self.cameras[self._local_slice or slice(None)]
        allowed = visual_hull(self.images[:, : cameras.height, : cameras.width, 3], cameras, aabb, resolution)
        return allowed if self._local_slice is None else processes.sum_of((~allowed).int()) == 0

    def _read(self, index: Tensor, aabb: Tensor, cameras: Cameras | None, colors: Tensor | None) -> tuple[Rays, Tensor]:
        """Returns the rays of pixels (P,), and their colours (P, 4), which are read unless they are given as uint8."""
        if cameras is None and not self.cameras.has_ray_kernel:
            cameras = self.cameras
        if cameras is not None:
            colors = self.images.view(-1, 4)[index] if colors is None else colors
            return self._cast(index, cameras, aabb), colors.float() / 255
        images, c2w, intrinsics = self.images, self.cameras.c2w, self.cameras.intrinsics
        lens = None if self.cameras.lens is None else self.cameras.lens.rows
        if colors is not None:
            # Each pixel becomes an image of one pixel, with the principal point moved accordingly.
            chosen = self.images_of(index)
            images, c2w, intrinsics = colors.view(-1, 1, 1, 4), c2w[chosen], intrinsics[chosen]
            intrinsics[:, 2:] -= self._corners(index)
            lens = None if lens is None else lens[chosen]
            index = torch.arange(len(index), device=index.device)
        *rays, rgba = pixel_rays(images, index, c2w, intrinsics, aabb, supersampling=self._supersampling, lens=lens)
        return Rays(*rays), rgba

    def _corners(self, pixels: Tensor) -> Tensor:
        """Returns the columns and rows (P, 2) of pixels (P,) within their images, float32."""
        return columns_and_rows(pixels, self.cameras.width, self.cameras.height).float()

    def images_of(self, pixels: Tensor) -> Tensor:
        """Returns the indices of the images to which pixels belong; of the shape and dtype of ``pixels``."""
        return pixels // (self.cameras.height * self.cameras.width)

    def _cast(self, index: Tensor, cameras: Cameras, aabb: Tensor) -> Rays:
        """Casts the rays of pixels (P,); the rays of each pixel are consecutive, row by row."""
        side = self._supersampling
        along = torch.arange(side, device=index.device)
        within = points_in_pixels(torch.cartesian_prod(along, along).flip(-1), side)
        points = (self._corners(index)[:, None] + within).view(-1, 2)
        camera_index = self.images_of(index).repeat_interleave(side * side)
        return cameras.rays(camera_index, points, aabb)

    def _draw_patches(self) -> Tensor:
        """Returns the pixels (patches * patch_size**2,) of patches, patch by patch and row by row."""
        size, width, height = self._patch_size, self.cameras.width, self.cameras.height

        def random(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (self._patches,), device=self._device)

        def along(side: int) -> Tensor:
            # Positions beyond the edge are clamped to it: otherwise the outermost pixels would hardly ever be drawn.
            last, reach = side - size, size // 2
            return random(-reach, last + reach + 1).clamp(0, last)

        if self._patch_corners is None:
            corners = (random(0, len(self.cameras)) * height + along(height)) * width + along(width)
        else:
            corners = self._patch_corners[random(0, len(self._patch_corners))].long()
        return (corners[:, None] + self._patch_offsets).flatten()

    def _draw_pixels(self, count: int) -> Tensor:
        if self.cameras.spheres:
            # Rejection sampling in proportion to solid angles: of whole spheres, less than a hundredth of the pixels is
            # rejected in all rounds.
            index, *others = self._draw_evenly(_ROUNDS * count).view(_ROUNDS, count)
            rejected = torch.ones_like(index, dtype=torch.bool)
            for other in others:
                angles = self.cameras.relative_solid_angles(self.images_of(index), self._corners(index)[:, 1] + 0.5)
                rejected = rejected & (torch.rand(count, device=index.device) >= angles)
                index = torch.where(rejected, other, index)
        else:
            index = self._draw_evenly(count)
        if self._favoured is None:
            return index
        rows, probability = self._favoured
        other = rows[torch.randint(len(rows), (count,), device=index.device)].long()
        # In random places, because the last rays of a batch may not fit, and processes divide it by its order.
        return torch.where(torch.rand(count, device=index.device) < probability, other, index)

    def _draw_evenly(self, count: int) -> Tensor:
        index = torch.randint(self._count, (count,), device=self.images.device)
        if self._drawable is not None:
            return self._drawable[index].long()
        if self._packing is None:
            return index
        # These indices skip the room beside smaller images, which those of pixels count.
        starts, widths = self._packing
        image = torch.searchsorted(starts, index, right=True) - 1
        within, width = index - starts[image], widths[image]
        row = within // width
        return (image * self.cameras.height + row) * self.cameras.width + within - row * width


def opaque_where_masked(split: Split) -> Tensor:
    """Returns the local images of a split, opaque where a mask excludes pixels.

    Masked pixels are not known to be transparent, so they must not carve away matter.
    """
    if split.masks is None:
        return split.images
    images = split.images.clone()
    images[..., 3].masked_fill_(~split.masks, 255)
    return images


def pixels_that_count(split: Split) -> Tensor | None:
    """Returns which pixels (N, H, W) of the local images lie in an image and are not masked, bool; None if all do."""
    if split.cameras.sizes is None:
        return split.masks
    height, width = split.images.shape[1:3]
    columns, rows = (side[:, None] for side in split.cameras.sizes[split.local_slice or slice(None)].unbind(dim=1))
    inside = (torch.arange(width) < columns)[:, None] & (torch.arange(height) < rows)[..., None]
    return inside if split.masks is None else inside & split.masks


def corners_of_patches(counted: Tensor, size: int) -> Tensor:
    """Returns at which pixels (N, H, W) a square patch can begin that contains only pixels that count, bool."""
    area = F.pad(counted.to(torch.int32), (1, 0, 1, 0)).cumsum(1, dtype=torch.int32).cumsum(2, dtype=torch.int32)
    sums = area[:, size:, size:] - area[:, :-size, size:] - area[:, size:, :-size] + area[:, :-size, :-size]
    return F.pad(sums == size * size, (0, size - 1, 0, size - 1))


def pixel_number_type(split: Split) -> torch.dtype:
    """Returns the smallest integer dtype that can index all pixels of a split."""
    return torch.int32 if len(split) * split.cameras.height * split.cameras.width <= 2**31 else torch.int64


def _rows(local_slice: slice | None, local: Tensor) -> Tensor | DividedRows:
    """Returns the rows of all processes, if a process group divides the images; otherwise the given ones."""
    return local if local_slice is None else DividedRows(local)
