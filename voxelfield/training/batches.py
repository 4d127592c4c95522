"""Random pixels of the training images, with the rays through them."""

from __future__ import annotations

import torch
from torch import Tensor

from voxelfield.datasets.scene import Split
from voxelfield.rays import Rays


class PixelSampler:
    """Draws pixels uniformly from all training images, which stay on the device as 8-bit RGBA.

    Args:
        split: Training images and cameras.
        device: Where to keep them, and where batches appear.
    """

    def __init__(self, split: Split, device: torch.device) -> None:
        self._pixels = split.images.to(device).reshape(-1, 4)
        self._cameras = split.cameras.to(device)

    def draw(self, count: int, aabb: Tensor) -> tuple[Rays, Tensor]:
        """Draws pixels from torch's global generator.

        Args:
            count: Number of pixels R.
            aabb: (2, 3) box that bounds the rays, world units.

        Returns:
            R rays and their (R, 4) RGBA, float32 in [0, 1], straight alpha.
        """
        device = self._pixels.device
        width, height = self._cameras.width, self._cameras.height
        index = torch.randint(self._pixels.shape[0], (count,), device=device)
        in_image = index % (width * height)
        centres = torch.stack((in_image % width, in_image // width), dim=-1) + 0.5
        rays = self._cameras.rays(index // (width * height), centres, aabb)
        return rays, self._pixels[index].float() / 255


def background_for(kind: str, rays: int, device: torch.device) -> Tensor:
    """Returns backgrounds (R, 3): ``random`` per ray, ``white`` or ``black``."""
    if kind == "random":
        return torch.rand(rays, 3, device=device)
    return torch.full((rays, 3), 1.0 if kind == "white" else 0.0, device=device)
