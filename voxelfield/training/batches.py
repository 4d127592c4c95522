"""Random pixels of the training images, with the rays through them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Split
from voxelfield.ops._internal.pixel_rays import pixel_rays
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.lens import lens_arguments
from voxelfield.rendering.rays import Rays
from voxelfield.training.transfers import read_from_host


class PixelSampler:
    """Draws pixels uniformly from all training images, which stay in memory as 8-bit RGBA.

    Pixels that a mask rules out are never drawn. For that, captures with masks keep the numbers of the others too.

    Args:
        split: Training images and cameras.
        device: Where batches appear.
        supersampling: Side of the square of rays through each pixel, spread evenly over it; 1 is its centre.
        patches: Number of squares of pixels with which each batch begins. They lie inside of an image, so pixels within
            half a square of its edge are in fewer of them, or in more.
        patch_size: Their side in pixels.
        on_host: Keep the images in pinned memory of the host, where the GPU reads what it draws; otherwise they are on
            ``device``.

    Attributes:
        cameras: The training cameras, on the device.

    Raises:
        ValueError: Squares do not fit into the images, or into what masks leave of them.
    """

    def __init__(
        self,
        split: Split,
        device: torch.device,
        supersampling: int = 1,
        patches: int = 0,
        patch_size: int = 1,
        *,
        on_host: bool = False,
    ) -> None:
        def kept(tensor: Tensor) -> Tensor:
            return read_from_host(tensor, device) if on_host else tensor.to(device).contiguous()

        images, self._drawable = split.images, None
        if split.masks is not None:
            # What is not known to be transparent must not be carved away.
            images = images.clone()
            images[..., 3].masked_fill_(~split.masks, 255)
            self._drawable = kept(split.masks.flatten().nonzero()[:, 0].to(pixel_number_type(split.masks)))
        self._images = kept(images)
        self.cameras = split.cameras.to(device)
        self._count = images[..., 0].numel() if self._drawable is None else len(self._drawable)
        self._supersampling = supersampling
        self._patches = PatchSampler(split, device, patches, patch_size) if patches > 0 else None

    @property
    def alpha(self) -> Tensor:
        """Opacity (N, H, W) of the images, uint8, on the device; 255 where a mask rules a pixel out."""
        return self._images[..., 3]

    def draw(self, count: int, aabb: Tensor, cameras: Cameras | None = None) -> tuple[Rays, Tensor, Tensor]:
        """Draws pixels from torch's global generator.

        Args:
            count: Number of pixels P, at least those of the patches. These come first, patch by patch and row by row.
            aabb: (2, 3) box that bounds the rays, world units.
            cameras: What to cast the rays with in place of :attr:`cameras`; the rays are then differentiable in what
                those are.

        Returns:
            P * supersampling**2 rays, those of a pixel together; the pixels' (P, 4) RGBA, float32 in [0, 1],
            straight alpha; and their numbers (P,), int64 (:meth:`images_of`).
        """
        index = self._draw_pixels(count) if self._patches is None else self._draw_patches(count, self._patches)
        if cameras is not None:
            return self._cast(index, cameras, aabb), self._images.view(-1, 4)[index].float() / 255, index
        *rays, rgba = pixel_rays(
            self._images,
            index,
            self.cameras.c2w,
            self.cameras.intrinsics,
            aabb,
            supersampling=self._supersampling,
            **lens_arguments(self.cameras.lens),
        )
        return Rays(*rays), rgba, index

    def images_of(self, pixels: Tensor) -> Tensor:
        """Returns the numbers of the images that pixels belong to, from 0; of the shape and dtype of ``pixels``."""
        return pixels // self._images[0, ..., 0].numel()

    def _cast(self, index: Tensor, cameras: Cameras, aabb: Tensor) -> Rays:
        """Casts the rays of pixels (P,), those of each together, row by row."""
        side = self._supersampling
        row = index // cameras.width
        corner = torch.stack((index % cameras.width, row % cameras.height), dim=1).float()
        middles = (torch.arange(side, device=index.device) + 0.5) / side
        squares = torch.stack((middles.repeat(side), middles.repeat_interleave(side)), dim=1)
        points = (corner[:, None] + squares).view(-1, 2)
        camera_index = self.images_of(index).repeat_interleave(side * side)
        return cameras.rays(camera_index, points, aabb)

    def _draw_pixels(self, count: int) -> Tensor:
        index = torch.randint(self._count, (count,), device=self._images.device)
        return index if self._drawable is None else self._drawable[index].long()

    def _draw_patches(self, count: int, patches: PatchSampler) -> Tensor:
        drawn = patches.draw()
        return torch.cat((drawn, self._draw_pixels(count - len(drawn))))


class PatchSampler:
    """Draws squares of pixels from all training images, and none of which a mask rules a pixel out.

    Args:
        split: Training images.
        device: Where pixel numbers appear.
        count: Number of squares.
        size: Their side in pixels.

    Raises:
        ValueError: A square does not fit into the images, or into what masks leave of them.
    """

    def __init__(self, split: Split, device: torch.device, count: int, size: int) -> None:
        self._shape = split.images.shape[:3]
        height, width = self._shape[1:]
        if size > min(height, width):
            raise ValueError(f"patch_size must be at most the images' shorter side, {min(height, width)}, got {size}")
        self._device, self._count, self._size = device, count, size
        square = torch.arange(size, device=device)
        self._offsets = (square[:, None] * width + square).flatten()
        self._corners = None
        if split.masks is not None:
            # A square is whole where the mask's integral over it is its area.
            area = (
                F.pad(split.masks.to(torch.int32), (1, 0, 1, 0))
                .cumsum(1, dtype=torch.int32)
                .cumsum(2, dtype=torch.int32)
            )
            sums = area[:, size:, size:] - area[:, :-size, size:] - area[:, size:, :-size] + area[:, :-size, :-size]
            image, y, x = (sums == size * size).nonzero(as_tuple=True)
            if len(image) == 0:
                raise ValueError(f"patch_size must fit into what masks leave of the images, got {size}")
            corners = (image * height + y) * width + x
            self._corners = corners.to(pixel_number_type(split.masks)).to(device)

    def draw(self) -> Tensor:
        """Draws from torch's global generator.

        Returns:
            (count * size**2,) int64 numbers of pixels, square by square and row by row.
        """
        return (self._draw_corners()[:, None] + self._offsets).flatten()

    def _draw_corners(self) -> Tensor:
        if self._corners is not None:
            return self._corners[self._random(0, len(self._corners))].long()
        images, height, width = self._shape

        def along(side: int) -> Tensor:
            # Corners beyond the edge are moved to it: otherwise the outermost pixels would hardly ever be drawn.
            last, reach = side - self._size, self._size // 2
            return self._random(-reach, last + reach + 1).clamp(0, last)

        return (self._random(0, images) * height + along(height)) * width + along(width)

    def _random(self, low: int, high: int) -> Tensor:
        return torch.randint(low, high, (self._count,), device=self._device)


def pixel_number_type(masks: Tensor) -> torch.dtype:
    """Returns the smaller type of integers that can number all pixels of some masks."""
    return torch.int32 if masks.numel() <= 2**31 else torch.int64


def background_for(kind: str, rays: int, device: torch.device) -> Tensor:
    """Returns backgrounds (R, 3): ``random`` in each row, ``white`` or ``black``."""
    if kind == "random":
        return torch.rand(rays, 3, device=device)
    return torch.full((rays, 3), 1.0 if kind == "white" else 0.0, device=device)
