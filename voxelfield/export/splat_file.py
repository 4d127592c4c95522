"""3D Gaussians and their files, of which PLY is the one that all splat viewers read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.mesh_file import Y_UP, binary_ply
from voxelfield.export.registry import FileFormat, file_format
from voxelfield.fields.decoders import spherical_harmonics
from voxelfield.files import atomic_path
from voxelfield.rendering.rigid import quaternions, rotations

_PROPERTIES = (
    *("x", "y", "z", "nx", "ny", "nz"),
    *(f"f_dc_{index}" for index in range(3)),
    *(f"f_rest_{index}" for index in range(45)),
    "opacity",
    *(f"scale_{index}" for index in range(3)),
    *(f"rot_{index}" for index in range(4)),
)


@dataclass(frozen=True, eq=False)
class Splats:
    """N Gaussians in space, each of which absorbs and emits light, as 3D Gaussian splatting has them.

    Attributes:
        means: (N, 3) float32, centres, world units.
        log_scales: (N, 3) float32, logarithms of the standard deviations along the Gaussian's axes, world units.
        rotations: (N, 4) float32, quaternions w, x, y, z of any length, from the Gaussian's axes to the world's.
        opacity_logits: (N,) float32, the opacity at the centre is their sigmoid.
        harmonics: (N, 16, 3) float32, coefficients of :func:`voxelfield.fields.decoders.spherical_harmonics` of the
            viewing direction, world frame; the colour is their sum plus 0.5, not below 0.
    """

    means: Tensor
    log_scales: Tensor
    rotations: Tensor
    opacity_logits: Tensor
    harmonics: Tensor

    def __len__(self) -> int:
        return len(self.means)

    def __getitem__(self, index: Tensor) -> Splats:
        """Returns some of the Gaussians."""
        return Splats(*(each[index] for each in vars(self).values()))

    def turned(self, axes: Tensor) -> Splats:
        """Returns the Gaussians in other axes (3, 3), orthonormal and right-handed, one per row."""
        turn = axes.to(self.means)
        directions = F.normalize(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), dim=-1).to(turn)
        # Each band of the harmonics turns into itself, so that the system has an exact solution.
        before, after = spherical_harmonics(directions, 3), spherical_harmonics(directions @ turn.T, 3)
        change = torch.linalg.lstsq(after.double().cpu(), before.double().cpu()).solution.to(turn)
        turned = quaternions(turn @ rotations(F.normalize(self.rotations, dim=-1)))
        return Splats(self.means @ turn.T, self.log_scales, turned, self.opacity_logits, change @ self.harmonics)


def save_splats(path: Path | str, splats: Splats, up_axis: Literal["y", "z"] | None = None, **options: Any) -> None:
    """Writes splats in the units of the world, that is, of the input data, with z or y as the axis that points up.

    A PLY is binary and has the properties of Kerbl et al. (2023), in float32. SPZ and SOG are compressed. A GLB has the
    extension KHR_gaussian_splatting, and an USDZ a ParticleField3DGaussianSplat, both in float32.

    Args:
        path: ``*.ply``, ``*.spz``, ``*.sog``, ``*.glb`` or ``*.usdz``.
        splats: The Gaussians, whose z axis points up, on any device.
        up_axis: Axis of the file that points up: ``z`` changes nothing, ``y`` turns the splats by 90 degrees about x.
            None: ``y`` for SPZ, GLB and USDZ, ``z`` for the others.
        options: ``spz_version``, 3 or 4 (the default), for an SPZ.

    Raises:
        MissingPackageError: The library of the format is not installed.
        ValueError: The path has another suffix, or positions or scales do not fit in an SPZ.
        FloatingPointError: A number is not finite.
        OSError: The file cannot be written.
    """
    chosen = file_format("splats", path)
    parts = [each.detach().float().cpu() for each in vars(splats).values()]
    if not all(bool(each.isfinite().all()) for each in parts):
        raise FloatingPointError("splats must be finite, got NaN or infinity: the weights of the run are damaged")
    on_cpu = Splats(*parts)
    up_axis = up_axis or chosen.up_axis or "z"
    on_cpu = on_cpu.turned(Y_UP) if up_axis == "y" else on_cpu
    with atomic_path(path) as temporary:
        chosen.write(temporary, replace(on_cpu, rotations=F.normalize(on_cpu.rotations, dim=-1)), up_axis, **options)


def ply_content(splats: Splats) -> bytes:
    """Returns the PLY of splats whose rotations have unit length."""
    # All coefficients of red come first, then green, then blue.
    rest = splats.harmonics[:, 1:].mT.flatten(1)
    unused_normals = torch.zeros_like(splats.means)
    columns = (splats.means, unused_normals, splats.harmonics[:, 0], rest, splats.opacity_logits[:, None])
    rows = torch.cat((*columns, splats.log_scales, splats.rotations), dim=1)
    return binary_ply(rows.numpy().astype("<f4").view([(name, "<f4") for name in _PROPERTIES])[:, 0])


PLY = FileFormat(
    of="splats", suffixes=(".ply",), write=lambda path, splats, up_axis: path.write_bytes(ply_content(splats))
)
