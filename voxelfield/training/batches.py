"""Random pixels of the training images, with the rays through them."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.ops._internal.pixel_rays import pixel_rays
from voxelfield.rendering.lens import lens_arguments
from voxelfield.rendering.rays import Rays


class PixelSampler:
    """Draws pixels uniformly from all training images, which stay on the device as 8-bit RGBA.

    Pixels that a mask rules out are never drawn. For that, captures with masks keep the numbers of the others too.

    Args:
        split: Training images and cameras.
        device: Where to keep them, and where batches appear.
        supersampling: Side of the square of rays through each pixel, spread evenly over it; 1 is its centre.

    Attributes:
        cameras: The training cameras, on the device.
    """

    def __init__(self, split: Split, device: torch.device, supersampling: int = 1) -> None:
        images, self._drawable = split.images, None
        if split.masks is not None:
            # What is not known to be transparent must not be carved away.
            images = images.clone()
            images[..., 3].masked_fill_(~split.masks, 255)
            self._drawable = split.masks.flatten().nonzero()[:, 0].to(pixel_number_type(split.masks)).to(device)
        self._images = images.to(device).contiguous()
        self.cameras = split.cameras.to(device)
        self._count = images[..., 0].numel() if self._drawable is None else len(self._drawable)
        self._supersampling = supersampling

    @property
    def alpha(self) -> Tensor:
        """Opacity (N, H, W) of the images, uint8, on the device; 255 where a mask rules a pixel out."""
        return self._images[..., 3]

    def draw(self, count: int, aabb: Tensor) -> tuple[Rays, Tensor]:
        """Draws pixels from torch's global generator.

        Args:
            count: Number of pixels P.
            aabb: (2, 3) box that bounds the rays, world units.

        Returns:
            P * supersampling**2 rays, those of a pixel together, and the pixels' (P, 4) RGBA, float32 in [0, 1],
            straight alpha.
        """
        index = torch.randint(self._count, (count,), device=self._images.device)
        if self._drawable is not None:
            index = self._drawable[index].long()
        *rays, rgba = pixel_rays(
            self._images,
            index,
            self.cameras.c2w,
            self.cameras.intrinsics,
            aabb,
            supersampling=self._supersampling,
            **lens_arguments(self.cameras.lens),
        )
        return Rays(*rays), rgba


def pixel_number_type(masks: Tensor) -> torch.dtype:
    """Returns the smaller type of integers that can number all pixels of some masks."""
    return torch.int32 if masks.numel() <= 2**31 else torch.int64


def background_for(kind: str, rays: int, device: torch.device) -> Tensor:
    """Returns backgrounds (R, 3): ``random`` in each row, ``white`` or ``black``."""
    if kind == "random":
        return torch.rand(rays, 3, device=device)
    return torch.full((rays, 3), 1.0 if kind == "white" else 0.0, device=device)
