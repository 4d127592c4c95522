"""The photographs of a scene."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import composite_background
from voxelfield.rendering.pixels import to_uint8
from voxelfield.rendering.projection import pixels_of_rays
from voxelfield.training.cameras.refined_cameras import RefinedCameras

# Fraction of the scene's extent, and radians: closer poses count as equal, after a round trip through the browser.
_POSITION_TOLERANCE = 2e-3
_ROTATION_TOLERANCE = 5e-3

_EDGE_COLOR = (1.0, 0.35, 0.1)


class Photographs:
    """All photographs of some splits, numbered from 0.

    Args:
        splits: Splits by name, with cameras in the frame in which the field was trained.

    Attributes:
        names: Names such as ``train/r_0``.
    """

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self._items = [(split, index) for split in splits.values() for index in range(len(split))]
        self.names = [f"{name}/{view}" for name, split in splits.items() for view in split.names]

    @classmethod
    def of(cls, scene: Scene, names: Iterable[str], refined: RefinedCameras | None) -> Photographs:
        """Returns the photographs of a scene.

        Args:
            scene: The scene.
            names: Names of splits; those that the scene lacks are ignored.
            refined: The refined training cameras, if cameras were refined.
        """
        splits = {name: scene.splits[name] for name in names if name in scene.splits}
        if refined is not None:
            splits = {name: refined.follow_split(split) for name, split in splits.items()}
        return cls(splits)

    def __len__(self) -> int:
        return len(self.names)

    def camera(self, number: int) -> tuple[Cameras, int]:
        """Returns the cameras of a photograph's split, and its index among them."""
        split, index = self._items[number]
        return split.cameras, index

    def image(self, number: int) -> Tensor:
        """Returns a photograph, (H, W, 4) uint8 on the CPU, RGBA."""
        split, index = self._items[number]
        return split.image(index)

    def thumbnail(self, number: int, side: int, background: Tensor) -> Tensor:
        """Returns a small copy, (h, w, 3) uint8.

        Args:
            number: Index of the photograph.
            side: Pixels of the longer side.
            background: (3,) colour behind transparent pixels, on the CPU.
        """
        image = composite_background(self.image(number), background).permute(2, 0, 1)[None]
        factor = side / max(image.shape[-2:])
        size = [max(1, round(factor * length)) for length in image.shape[-2:]]
        return to_uint8(F.interpolate(image, size, mode="area")[0].permute(1, 2, 0))

    def is_taken_from(self, number: int, c2w: Tensor, extent: float) -> bool:
        """Returns whether a photograph was taken from a pose.

        Args:
            number: Index of the photograph.
            c2w: (4, 4) the pose, on the CPU.
            extent: Extent of the scene, world units.
        """
        cameras, index = self.camera(number)
        difference = cameras.c2w[index].cpu() - c2w
        distance, rotation = float(difference[:3, 3].norm()), float(difference[:3, :3].norm())
        return distance <= _POSITION_TOLERANCE * extent and rotation <= _ROTATION_TOLERANCE

    def overlay(self, number: int, picture: Tensor, cameras: Cameras, fraction: float, background: Tensor) -> Tensor:
        """Covers the left part of a picture with a photograph, with a line at the edge.

        Lens distortion is followed, so corresponding pixels of picture and photograph show the same.

        Args:
            number: Index of the photograph.
            picture: (H, W, 3) in [0, 1].
            cameras: The one camera of the picture, at the photograph's pose.
            fraction: Covered fraction of the width.
            background: (3,) colour behind transparent pixels, on the picture's device.

        Returns:
            (H, W, 3).
        """
        edge = round(fraction * cameras.width)
        if edge <= 0:
            return picture
        own, index = self.camera(number)
        fx, fy, cx, cy = cameras.intrinsics[0].tolist()
        x = (torch.arange(edge) + 0.5 - cx) / fx
        y = (torch.arange(cameras.height) + 0.5 - cy) / fy
        down, right = torch.meshgrid(y, x, indexing="ij")
        pixels = pixels_of_rays(own.to("cpu"), index, torch.stack((right, down, torch.ones_like(down)), dim=-1))
        inside = ((pixels >= 0) & (pixels < torch.tensor(own.size(index)))).all(dim=-1)
        column, row = torch.where(inside[..., None], pixels, 0).unbind(-1)
        photo = composite_background(self.image(number)[row, column].to(picture.device), background)
        result = picture.clone()
        result[:, :edge] = torch.where(inside[..., None].to(picture.device), photo, result[:, :edge])
        # An empty slice if the photograph covers everything.
        result[:, edge : edge + max(1, cameras.width // 400)] = result.new_tensor(_EDGE_COLOR)
        return result
