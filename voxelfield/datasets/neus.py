"""Loader of the layout of IDR and NeuS: ``cameras_sphere.npz`` or ``cameras.npz``, ``image`` and maybe ``mask``.

For image i, ``world_mat_i`` projects homogeneous points of the world to pixels, whose centres have whole coordinates.
``scale_mat_i`` takes the unit sphere, which holds the object, to the world. Scenes are loaded in the frame of that
sphere. Files in ``mask`` are white where the object is, so they become the alpha channel of the images. Formats: Yariv
et al., "Multiview Neural Surface Reconstruction", 2020; Wang et al., "NeuS", 2021. DTU and BlendedMVS have both.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from voxelfield.datasets.assembly import load_capture
from voxelfield.datasets.images import image_files
from voxelfield.datasets.options import LoadOptions
from voxelfield.datasets.photos import Intrinsics, Photo, centred, with_shrunk_images
from voxelfield.datasets.poses import turned_about
from voxelfield.datasets.registry import Format, contains
from voxelfield.datasets.scene import Scene
from voxelfield.files import open_regular
from voxelfield.messages import reason_of
from voxelfield.rendering.rigid import pose_matrices

logger = logging.getLogger(__name__)

FILES = ("cameras_sphere.npz", "cameras.npz")
"""Names of the file, of which the first is read. IDR's ``cameras.npz`` fits the sphere to the object less closely."""

_MEMBER = re.compile(r"(world|scale)_mat_(\d{1,9})")
_SAME = 1e-3
# Largest skew as a share of the focal length.
_SKEW = 1e-3
_SPHERE_BOX = torch.tensor([[-1.0] * 3, [1.0] * 3], dtype=torch.float64)

Matrices = dict[int, npt.NDArray[np.float64]]


def load_neus(folder: Path, options: LoadOptions) -> Scene:
    """Loads a scene; see :class:`voxelfield.datasets.registry.Format`.

    Its box encloses the unit sphere.
    """
    file = next(folder / name for name in FILES if (folder / name).is_file())
    world, scale = _read_matrices(file)
    sphere = _unit_sphere(file, scale, world)
    images = _numbered(file, folder / "image", world)
    masks = _numbered(file, folder / "mask", images) if images and (folder / "mask").is_dir() else {}
    photos = []
    for number, matrix in sorted(world.items()):
        name = f"{file}: world_mat_{number}"
        pose, intrinsics = _camera(name, matrix @ sphere)
        path = images.get(number, folder / "image" / f"{number:06d}.png")
        photos.append(Photo(path, pose, partial(centred, intrinsics), alpha=masks.get(number), pose_name=name))
    if not masks:
        photos = with_shrunk_images(photos, folder / "image", options.downscale)
    return load_capture(folder, file, photos, options, stated_box=_SPHERE_BOX if scale else None)


def _read_matrices(file: Path) -> tuple[Matrices, Matrices]:
    """Returns the matrices (4, 4) of both kinds by the numbers of their images."""
    found: dict[str, Matrices] = {"world": {}, "scale": {}}
    try:
        with open_regular(file) as opened, np.load(opened, allow_pickle=False) as archive:
            for member in archive.files:
                name = _MEMBER.fullmatch(member)
                if name is not None:
                    found[name[1]][int(name[2])] = _checked(member, archive[member])
    except Exception as error:  # damaged archives and headers of NumPy end in exceptions of any type
        raise ValueError(
            f"{file}: must be a NumPy archive of matrices world_mat_0, ... ({reason_of(error)})"
        ) from error
    if not found["world"]:
        raise ValueError(f"{file}: must hold a matrix world_mat_0, ... for each image, got none")
    return found["world"], found["scale"]


def _checked(name: str, matrix: object) -> npt.NDArray[np.float64]:
    if not (isinstance(matrix, np.ndarray) and matrix.dtype.kind in "fiu" and matrix.shape in ((3, 4), (4, 4))):
        raise ValueError(f"{name} must be 3x4 or 4x4 numbers, got {getattr(matrix, 'shape', type(matrix).__name__)}")
    square = np.eye(4)
    square[: len(matrix)] = matrix
    if not np.isfinite(square).all():
        raise ValueError(f"{name} must be finite")
    return square


def _unit_sphere(file: Path, scale: Matrices, world: Collection[int]) -> npt.NDArray[np.float64]:
    """Returns the matrix (4, 4) from the frame of the unit sphere to the world; the identity if there is none."""
    if not scale:
        return np.eye(4)
    lacking = sorted(set(world) - set(scale))
    if lacking:
        raise ValueError(f"{file}: must have a scale_mat for each world_mat, got none for {lacking[0]}")
    first = scale[min(world)]
    for number in sorted(world):
        if np.abs(scale[number] - first).max() > _SAME * np.abs(first).max():
            raise ValueError(f"{file}: scale_mat_{number} must be the same as that of the other images")
    axes = first[:3, :3].T @ first[:3, :3]
    if not (axes[0, 0] > 0 and np.abs(axes - axes[0, 0] * np.eye(3)).max() <= _SAME * axes[0, 0]):
        raise ValueError(f"{file}: scale_mat must scale all axes alike, got {first[:3, :3].tolist()}")
    return first


def _numbered(file: Path, folder: Path, numbers: Collection[int]) -> dict[int, Path]:
    """Returns the images in a folder by number: the number in the name, or else the rank among the sorted names."""
    files = image_files(folder)
    by_name = {int(path.stem): path for path in files if re.fullmatch(r"[0-9]{1,9}", path.stem)}
    if len(by_name) == len(files) and by_name.keys() <= set(numbers):
        return by_name
    if len(files) != len(numbers):
        raise ValueError(
            f"{folder}: must hold an image for each of {len(numbers)} cameras in {file.name}, got {len(files)} images, "
            "whose names are not the numbers of cameras"
        )
    return dict(zip(sorted(numbers), files, strict=True))


def _camera(name: str, projection: npt.NDArray[np.float64]) -> tuple[Tensor, Intrinsics]:
    """Returns the pose (4, 4) float64, OpenGL axes, and the intrinsics of a projection (4, 4) to pixels."""
    axes, offset = projection[:3, :3], projection[:3, 3]
    try:
        inverse = np.linalg.inv(axes)
    except np.linalg.LinAlgError as error:
        raise ValueError(f"{name} must project space to an image, got a singular matrix") from error
    # The sign of a projection is arbitrary; the projection of a camera has a positive determinant.
    if np.linalg.det(axes) < 0:
        inverse, offset = -inverse, -offset
    # axes is the product of the intrinsics, upper triangular, and a rotation; so is the inverse in the other order.
    rotation, upper = np.linalg.qr(inverse)
    signs = np.where(np.diag(upper) < 0, -1.0, 1.0)
    intrinsics = np.linalg.inv(signs[:, None] * upper)
    intrinsics /= intrinsics[2, 2]
    c2w = pose_matrices(torch.from_numpy(rotation * signs), torch.from_numpy(-inverse @ offset))
    (fx, skew, cx), (_, fy, cy) = intrinsics[:2].tolist()
    if not abs(skew) <= _SKEW * fy:
        raise ValueError(f"{name} must be that of a camera without skew, got {skew:g} beside a focal length of {fx:g}")
    return turned_about(c2w), (fx, fy, cx + 0.5, cy + 0.5)


FORMAT = Format("IDR or NeuS", f"{' or '.join(FILES)} and image", contains(FILES, ["image"]), load_neus, order=50)
