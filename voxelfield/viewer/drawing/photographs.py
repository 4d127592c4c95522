"""The photographs of a scene, beside the field."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.datasets.scene import Scene, Split
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.images import composite_background
from voxelfield.rendering.projection import pixels_of_rays
from voxelfield.training.cameras.refined_cameras import RefinedCameras

# Of the scene's extent, and of a turn in radians: closer poses are the same, after a round trip through the browser.
_SAME_PLACE = 2e-3
_SAME_TURN = 5e-3

_MAX_COMPARED = 1000


class Photographs:
    """All photographs of some splits, numbered from 0.

    Args:
        splits: By name, in the frame of the field.

    Attributes:
        names: Such as ``train/r_0``.
    """

    def __init__(self, splits: Mapping[str, Split]) -> None:
        self._places = [(split, index) for split in splits.values() for index in range(len(split))]
        self.names = [f"{name}/{view}" for name, split in splits.items() for view in split.names]

    @classmethod
    def of(cls, scene: Scene, names: Iterable[str], refined: RefinedCameras | None) -> Photographs:
        """Takes the photographs of a scene.

        Args:
            scene: The scene.
            names: Which of its splits, where there are such.
            refined: What came of the training cameras, if they were refined: the field lies in their frame.
        """
        splits = {name: scene.splits[name] for name in names if name in scene.splits}
        if refined is not None:
            splits = {name: refined.follow_split(split) for name, split in splits.items()}
        return cls(splits)

    def __len__(self) -> int:
        return len(self.names)

    def camera(self, number: int) -> tuple[Cameras, int]:
        """Returns some cameras, and which of them took a photograph."""
        split, index = self._places[number]
        return split.cameras, index

    def spacing(self) -> float:
        """Returns the median distance from a camera to the nearest other one, world units; infinity for a single one.

        Cameras at one place, as on a tripod, count as one.
        """
        cameras = {id(split): split.cameras for split, _ in self._places}.values()
        places = torch.cat([one.c2w[:, :3, 3].float().cpu() for one in cameras]).unique(dim=0)
        if len(places) < 2:
            return float("inf")
        some = places[:: -(-len(places) // _MAX_COMPARED)]
        # The nearest is the camera itself.
        return float(torch.cdist(some, places).topk(2, largest=False).values[:, 1].median())

    def image(self, number: int) -> Tensor:
        """Returns a photograph, (H, W, 4) uint8 on the CPU, RGBA."""
        split, index = self._places[number]
        return split.image(index)

    def thumbnail(self, number: int, side: int, background: Tensor) -> Tensor:
        """Returns a small copy, (h, w, 3) uint8, with a given number of pixels along its longer side.

        Args:
            number: Index of the photograph.
            side: Pixels.
            background: (3,) colour behind transparent pixels, on the CPU.
        """
        image = composite_background(self.image(number), background).permute(2, 0, 1)[None]
        factor = side / max(image.shape[-2:])
        size = [max(1, round(factor * length)) for length in image.shape[-2:]]
        small = F.interpolate(image, size, mode="area")[0].permute(1, 2, 0)
        return (small * 255).round().to(torch.uint8)

    def seen_from(self, number: int, c2w: Tensor, extent: float) -> bool:
        """Tells whether a photograph was taken from a pose.

        Args:
            number: Index of the photograph.
            c2w: (4, 4) the pose, on the CPU.
            extent: Extent of the scene, world units.
        """
        cameras, index = self.camera(number)
        own = cameras.c2w[index].cpu()
        apart = float((own[:3, 3] - c2w[:3, 3]).norm())
        turned = float((own[:3, :3] - c2w[:3, :3]).norm())
        return apart <= _SAME_PLACE * extent and turned <= _SAME_TURN


def lay_photograph_over(
    picture: Tensor, photographs: Photographs, number: int, cameras: Cameras, share: float, background: Tensor
) -> Tensor:
    """Covers the left part of a picture with the photograph taken from there, with a line at the edge.

    Lens distortion is followed, so pixels show the same in picture and photograph.

    Args:
        picture: (H, W, 3) in [0, 1].
        photographs: The photographs.
        number: Index of the photograph.
        cameras: The one camera that the picture shows, from the photograph's pose.
        share: Share of the width.
        background: (3,) colour behind transparent pixels, on the picture's device.

    Returns:
        (H, W, 3).
    """
    edge = round(share * cameras.width)
    if edge <= 0:
        return picture
    own, index = photographs.camera(number)
    fx, fy, cx, cy = cameras.intrinsics[0].tolist()
    x = (torch.arange(edge) + 0.5 - cx) / fx
    y = (torch.arange(cameras.height) + 0.5 - cy) / fy
    down, right = torch.meshgrid(y, x, indexing="ij")
    pixels = pixels_of_rays(own.to("cpu"), index, torch.stack((right, down, torch.ones_like(down)), dim=-1))
    size = torch.tensor(own.size(index))
    shown = ((pixels >= 0) & (pixels < size)).all(dim=-1)
    column, row = torch.where(shown[..., None], pixels, 0).unbind(-1)
    photo = composite_background(photographs.image(number)[row, column].to(picture.device), background)
    result = picture.clone()
    result[:, :edge] = torch.where(shown[..., None].to(picture.device), photo, result[:, :edge])
    if edge < cameras.width:
        width = max(1, cameras.width // 400)
        result[:, edge : edge + width] = result.new_tensor([1.0, 0.35, 0.1])
    return result
