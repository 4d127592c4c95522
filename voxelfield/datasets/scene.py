"""The result of every loader: images with their cameras, by split, and facts about the scene."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from voxelfield import processes
from voxelfield.foundation.checks import check_dtype, check_field, check_tensor
from voxelfield.rendering.cameras import Cameras

T = TypeVar("T")

MASK_WEIGHT = "mask_weight"
"""Name of the data (N, H, W) uint8 by which squared errors of pixels are multiplied in training, 255 for 1."""


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
            pixel, (N, H, W) or (N, H, W, ...), such as ``time`` (N,), ``depth`` (N, H, W) and :data:`MASK_WEIGHT`,
            which loaders fill (data/README.md), or further data for a custom loss. Depths are distances along the
            optical axis, world units, 0 where unknown. The cameras carry values of images as values of their rays
            (:attr:`voxelfield.Cameras.values`).
        local_slice: In a process group, the n views whose images, masks and extras per pixel are in this process; the
            other processes have the other views. None: all views.
        transparent: Of all pixels, the fraction that ``masks`` excludes because they are transparent, not because a
            mask says so.
        files: Further entries of the images' frames in a ``transforms.json``, such as ``mask_path``: N values for each
            key, None where there is none.

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
    local_slice: slice | None = None
    files: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    transparent: float = 0.0

    def __post_init__(self) -> None:
        size = (len(self.local_indices), self.cameras.height, self.cameras.width, 4)
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
            for index in self.local_indices:
                if not bool(self._cut(self.masks, index).any()):
                    name = self.names[index]
                    raise ValueError(f"Split.masks must leave some pixels of each view, got none of {name!r}")

        for name, values in self.extras.items():
            per_image: tuple[int | str, ...] = (len(self.cameras), "K")
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
        """Returns some of the views, with everything that belongs to them, in room for the largest of their images.

        Raises:
            ValueError: Only some images of the split are in this process.
        """
        if self.local_slice is not None:
            raise ValueError(f"Split must hold all images where views are selected, got one that has {self._local}")
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
            files={key: [values[number] for number in numbers] for key, values in self.files.items()},
        )

    @property
    def local_indices(self) -> range:
        """The views whose images are in this process: all, unless a process group divides them."""
        return range(len(self.cameras))[self.local_slice or slice(None)]

    @cached_property
    def exposures(self) -> Tensor | None:
        """The result of :func:`voxelfield.datasets.images.exif_exposures` for the files, which are read once."""
        from voxelfield.datasets.images import exif_exposures  # needs Pillow, which a scene of arrays does not

        return exif_exposures(self.paths or ())

    def all_gather(self, local: Sequence[T]) -> list[T]:
        """Returns the values of all views, in their order, given the values of :attr:`local_indices`.

        A collective call if a process group divides the views.
        """
        return list(local) if self.local_slice is None else processes.concatenated(lambda: local)

    @property
    def size_in_words(self) -> str:
        """Width and height of the images in pixels, and kinds of cameras but pinholes, for messages."""
        kinds = len(self.cameras.all_sizes().unique(dim=0))
        size = f"{self.cameras.width} x {self.cameras.height}"
        size = size if kinds <= 1 else f"{kinds} sizes up to {size}"
        return f"{size}, {self.cameras.kinds}" if self.cameras.kinds else size

    def source_of(self, index: int) -> Path | str:
        """Returns the file of a view, or its name if it comes from elsewhere, for messages."""
        return self.names[index] if self.paths is None else self.paths[index]

    def image(self, index: int) -> Tensor:
        """Returns one of the local images, (height, width, 4) uint8."""
        return self._cut(self.images, index)

    def mask(self, index: int, device: torch.device | str = "cpu") -> Tensor | None:
        """Returns, on a device, which pixels of a view count, (height, width) bool; None if all do."""
        return None if self.masks is None else self._cut(self.masks, index).to(device)

    def masked(self) -> dict[str, float]:
        """Returns the fractions of all pixels that do not count, by cause: ``masks``, or ``transparency`` alone.

        Empty if all pixels count. A collective call if a process group divides the views.
        """
        if self.masks is None:
            return {}
        counts = self.all_gather([int(self._cut(self.masks, index).count_nonzero()) for index in self.local_indices])
        fraction = 1 - sum(counts) / int(self.cameras.all_sizes().prod(dim=1).sum())
        return {"masks": fraction - self.transparent, "transparency": self.transparent}

    def _cut(self, stack: Tensor, index: int) -> Tensor:
        width, height = self.cameras.size(index)
        number = range(len(self))[index]
        if number not in self.local_indices:
            raise IndexError(f"index must be one of the local views, got {index} for a split that has {self._local}")
        return stack[self.local_indices.index(number), :height, :width]

    @property
    def _local(self) -> str:
        return f"views {self.local_indices.start} to {self.local_indices.stop - 1} of {len(self)}"


@dataclass(frozen=True, eq=False)
class Scene:
    """A scene as loaded: images, cameras, and facts about the place that they show.

    How a field covers that place is up to its model (:meth:`voxelfield.models.model_config.ModelConfig.choose_warp`).

    Args:
        name: Its name, as in ``scene=``.
        aabb: (2, 3) float32, low and high corner of the region of interest, world frame.
        splits: The loaded splits by name.
        bounded: Whether nothing lies outside ``aabb``. Photographs of a place show its surroundings too.
        estimated: Whether ``aabb`` was only estimated from cameras or points.
        points: (M, 3) points from structure from motion, or points that fill the visible space, world units; None if
            unknown.
        all_poses: (N, 4, 4) where all photographs look, whether their split is loaded or not
            (:func:`voxelfield.rendering.cameras.viewing_poses`), float32 or float64; None: the poses of the splits.
        all_cameras: The cameras of all photographs; None: the cameras of the splits.
        origin: Position in the capture that is the origin of all positions here; files of cameras and of paths are in
            the capture's coordinates.
        format: Name of the format of :mod:`voxelfield.datasets.registry` that it was read from; empty for none.

    Raises:
        TypeError: ``aabb`` is not float32.
        ValueError: ``aabb``, ``points`` or ``all_poses`` has another shape.
    """

    name: str
    aabb: Tensor
    splits: dict[str, Split]
    bounded: bool = True
    estimated: bool = False
    points: Tensor | None = None
    all_poses: Tensor | None = None
    all_cameras: Cameras | None = None
    format: str = ""
    origin: tuple[float, ...] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        check_field("Scene.aabb", self.aabb, (2, 3), torch.float32)
        if self.points is not None:
            check_tensor("Scene.points", self.points, ("M", 3))
        if self.all_poses is not None:
            check_tensor("Scene.all_poses", self.all_poses, ("N", 4, 4))

    def poses(self) -> Tensor:
        """Returns where all photographs look: poses (N, 4, 4), camera to world, OpenGL axes, six for a panorama."""
        if self.all_poses is not None:
            return self.all_poses
        return torch.cat([split.cameras.viewing_poses() for split in self.splits.values()])

    def border_rays(self) -> tuple[Tensor, Tensor]:
        """Returns origins and unit directions, both (N, P, 3), of rays along the borders of all photographs."""
        if self.all_cameras is not None:
            return self.all_cameras.border_rays()
        each = [split.cameras.border_rays() for split in self.splits.values()]
        return torch.cat([origins for origins, _ in each]), torch.cat([directions for _, directions in each])

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
