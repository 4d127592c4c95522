"""What every loader returns: images with their cameras, by split, and the box they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.grids.boxes import parse_box
from voxelfield.ops._checks import check_dtype, check_field, check_tensor
from voxelfield.rendering.cameras import Cameras
from voxelfield.warps.warp import Warp


@dataclass(frozen=True, eq=False)
class Split:
    """Images and the cameras that took them.

    Args:
        images: (N, H, W, 4) uint8 on the CPU, RGBA with straight (not premultiplied) alpha. An image that is smaller
            than H x W lies at the top left, and nothing reads the pixels beside it; :meth:`image` cuts it out.
        cameras: N cameras; W and H are their largest width and height.
        names: N different names, for file names and logs.
        masks: (N, H, W) bool on the CPU: False where a pixel must be ignored, in training and in the evaluation.
            None: all pixels of all images count.
        paths: The N files that the images were read from; None if they come from elsewhere.
        extras: Further tensors by name, on the CPU, of any dtype: one value for each image, (N,) or (N, K), or for each
            pixel, (N, H, W) or (N, H, W, ...), such as ``time`` (N,) and ``depth`` (N, H, W), which loaders fill
            (data/README.md), or whatever a loss of one's own needs. The cameras carry those of images as values of
            their rays (:attr:`voxelfield.Cameras.values`).

    Raises:
        TypeError: ``images`` is not uint8, ``masks`` is not bool, or something in ``extras`` is not a tensor.
        ValueError: The shapes, sizes or counts disagree, two views have one name, or a mask leaves no pixel.
    """

    images: Tensor
    cameras: Cameras
    names: tuple[str, ...]
    masks: Tensor | None = None
    paths: tuple[Path, ...] | None = None
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = (len(self.cameras), self.cameras.height, self.cameras.width, 4)
        check_tensor("Split.images", self.images, size, ", as the cameras say")
        check_dtype("Split.images", self.images, (torch.uint8,))
        if len(self.names) != len(self.cameras):
            raise ValueError(
                f"Split.names must be {len(self.cameras)} names, one for each camera, got {len(self.names)}"
            )
        if self.paths is not None and len(self.paths) != len(self.names):
            raise ValueError(f"Split.paths must be {len(self.names)} files, one for each name, got {len(self.paths)}")
        # Pictures, tags of logs and keys of metrics are made of names: one would replace another.
        if len(set(self.names)) < len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise ValueError(f"Split.names must differ, got {twice!r} {self.names.count(twice)} times")
        if self.masks is not None:
            check_field("Split.masks", self.masks, size[:3], torch.bool)
            for index, name in enumerate(self.names):
                if not bool(self._cut(self.masks, index).any()):
                    raise ValueError(f"Split.masks must leave some pixels of each view, got none of {name!r}")

        for name, values in self.extras.items():
            per_image: tuple[int | str, ...] = (size[0], "K")
            dimensions = values.dim() if isinstance(values, Tensor) else 1
            wanted = per_image[: max(dimensions, 1)] if dimensions < 3 else (*size[:3], *values.shape[3:])
            check_tensor(f"Split.extras[{name!r}]", values, wanted)
            if values.device.type != "cpu":
                raise ValueError(f"Split.extras[{name!r}] must be on the CPU, got a tensor on {values.device}")
        per_image_values = {name: values for name, values in self.extras.items() if values.dim() < 3}
        if per_image_values:
            object.__setattr__(self, "cameras", self.cameras.with_values(**per_image_values))

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: slice | Sequence[int] | Tensor) -> Split:
        """Returns some of the views, with everything that belongs to them, in room for the largest of their images."""
        cameras = self.cameras[index]
        chosen = torch.arange(len(self))[index]
        numbers = chosen.tolist()

        def cut(values: Tensor) -> Tensor:
            return values[chosen] if values.dim() < 3 else values[chosen, : cameras.height, : cameras.width]

        return replace(
            self,
            images=cut(self.images),
            cameras=cameras,
            names=tuple(self.names[number] for number in numbers),
            masks=None if self.masks is None else cut(self.masks),
            paths=None if self.paths is None else tuple(self.paths[number] for number in numbers),
            extras={name: cut(values) for name, values in self.extras.items()},
        )

    @property
    def size_in_words(self) -> str:
        """Width and height of the images in pixels, for messages."""
        kinds = len(self.cameras.all_sizes().unique(dim=0))
        size = f"{self.cameras.width} x {self.cameras.height}"
        return size if kinds <= 1 else f"{kinds} sizes up to {size}"

    def image(self, index: int) -> Tensor:
        """Returns one image, (height, width, 4) uint8."""
        return self._cut(self.images, index)

    def mask(self, index: int, device: torch.device | str = "cpu") -> Tensor | None:
        """Returns, on a device, which pixels of a view count, (height, width) bool; None if all do."""
        return None if self.masks is None else self._cut(self.masks, index).to(device)

    def _cut(self, stack: Tensor, index: int) -> Tensor:
        width, height = self.cameras.size(index)
        return stack[index, :height, :width]


@dataclass(frozen=True, eq=False)
class Scene:
    """A scene as loaded.

    Args:
        name: Its name, as in ``scene=``.
        aabb: (2, 3) float32, low and high corner of what matters, world frame. In an unbounded scene, what matters
            most: then it is the box of ``warp``.
        splits: The loaded splits by name.
        warp: The warp for the grid of a field, for photographs that show what is around:
            :class:`voxelfield.warps.nested_boxes.NestedBoxes` or
            :class:`voxelfield.warps.ndc_box.NdcBox`. None: there is nothing outside of ``aabb``.
        format: Name of the format of :mod:`voxelfield.datasets.registry` that it was read from; empty for none.

    Raises:
        TypeError: ``aabb`` is not float32.
        ValueError: ``aabb`` has another shape, or is not that of ``warp``.
    """

    name: str
    aabb: Tensor
    splits: dict[str, Split]
    warp: Warp | None = None
    format: str = ""

    def __post_init__(self) -> None:
        check_field("Scene.aabb", self.aabb, (2, 3), torch.float32)
        if self.warp is not None and self.warp.aabb != parse_box(self.aabb):
            raise ValueError(f"Scene.warp.aabb must be Scene.aabb, {self.aabb.tolist()}, got {self.warp.aabb}")

    def split(self, name: str) -> Split:
        """Returns one split.

        Raises:
            ValueError: It was not loaded; the message lists those that were.
        """
        if name not in self.splits:
            loaded = ", ".join(self.splits) or "none"
            raise ValueError(
                f"name must be one of the splits of scene '{self.name}' that were loaded ({loaded}), got {name!r}"
            )
        return self.splits[name]

    @property
    def train(self) -> Split:
        """The training split."""
        return self.split("train")

    @property
    def test(self) -> Split:
        """The test split."""
        return self.split("test")
