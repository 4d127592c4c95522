"""Scenes from memory: images and cameras that no loader has read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from voxelfield.datasets.assembly import assemble
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import check_intrinsics
from voxelfield.datasets.poses import check_poses
from voxelfield.datasets.scene import Scene, Split
from voxelfield.foundation.checks import check_dtype, check_index, check_tensor
from voxelfield.rendering.cameras import Cameras


def scene_from_arrays(
    images: Tensor,
    cameras: Cameras,
    *,
    masks: Tensor | None = None,
    extras: Mapping[str, Tensor] | None = None,
    names: Sequence[str] | None = None,
    test: Sequence[int] | Tensor | None = None,
    holdout: int = 8,
    points: Tensor | None = None,
    aabb: Tensor | Sequence[Sequence[float]] | None = None,
    name: str = "arrays",
) -> Scene:
    """Makes a scene of images in memory, with the same checks, and the same kind of box, as :func:`load_scene`.

    Args:
        images: (N, H, W, 3) RGB or (N, H, W, 4) RGBA with straight alpha, on any device: uint8, or floating point in
            [0, 1], which is rounded to 8 bits. They are copied. An image smaller than H x W lies at the top left.
        cameras: The N cameras, on any device; OpenGL axes, world frame.
        masks: (N, H, W) bool: False where a pixel must be ignored; None: all count.
        extras: Tensors per image or per pixel, as for :class:`voxelfield.datasets.scene.Split`.
        names: N different names of the views; None: their numbers.
        test: Indices of the test views; the others are for training. None: as ``holdout`` says.
        holdout: Every ``holdout``-th view, beginning with the first, is a test view; 0: no test views.
        points: (P, 3) points of the scene, as structure from motion finds them, world units; None if unknown.
        aabb: As for :func:`load_scene`.
        name: The scene's name.

    Returns:
        The scene, on the CPU, with a split ``train`` and, unless no view is for the test, ``test``.

    Raises:
        TypeError: An argument has the wrong type or dtype.
        ValueError: An argument has the wrong shape or values, a pose is not a rotation with a translation, no view is
            left for training, or as for :func:`load_scene`.
    """
    options = LoadOptions(None, holdout=holdout, aabb=aabb)
    cameras, count = cameras.to("cpu"), len(cameras)
    check_poses(lambda index: f"cameras.c2w[{index}]", cameras.c2w.double())
    check_intrinsics(lambda index: f"cameras.intrinsics[{index}]", cameras.intrinsics)
    if points is not None:
        check_tensor("points", points, ("P", 3))
        points = points.detach().cpu()
    whole = Split(
        _rgba(images),
        cameras,
        tuple(map(str, range(count))) if names is None else tuple(names),
        None if masks is None else masks.cpu(),
        extras={key: values.detach().cpu() for key, values in (extras or {}).items()},
    )
    tested = torch.zeros(count, dtype=torch.bool)
    if test is not None:
        chosen = torch.as_tensor(test, dtype=torch.int64).cpu()
        check_index("test", chosen, count, "the views")
        tested[chosen] = True
    elif holdout > 0:
        tested[::holdout] = True
    if bool(tested.all()):
        kind = "test" if test is not None else "holdout"
        raise ValueError(f"{kind} must leave at least one view for training, got {count} test views of {count}")
    splits = {"train": whole[~tested]} | ({"test": whole[tested]} if bool(tested.any()) else {})
    scene = assemble(name, Path(name), splits, cameras.viewing_poses(), options, points)
    return replace(scene, all_cameras=cameras)


def _rgba(images: Tensor) -> Tensor:
    """Returns images as (N, H, W, 4) uint8 on the CPU."""
    rgba = isinstance(images, Tensor) and images.dim() == 4 and images.shape[3] == 4
    check_tensor("images", images, ("N", "H", "W", 4 if rgba else 3))
    if images.is_floating_point():
        if images.numel() > 0 and not bool(((images >= 0) & (images <= 1)).all()):
            low, high = (float(x) for x in images.aminmax())
            raise ValueError(f"images must lie in [0, 1] if they are floating point, got {low:g}..{high:g}")
        images = (images.detach().float() * 255).round().to(torch.uint8)
    check_dtype("images", images, (torch.uint8,), ", or floating point in [0, 1]")
    images = images.cpu()
    return images if rgba else torch.cat((images, torch.full_like(images[..., :1], 255)), dim=-1)
