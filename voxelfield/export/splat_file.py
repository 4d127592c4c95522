"""3D Gaussians and their files, in the layouts that splat viewers read."""

from __future__ import annotations

import gzip
import math
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.export.mesh_file import binary_ply
from voxelfield.files import atomic_write, check_suffix

SPLAT_SUFFIXES = (".ply", ".spz")
"""Suffixes of the files that splats are written to."""

_PROPERTIES = (
    *("x", "y", "z", "nx", "ny", "nz"),
    *(f"f_dc_{index}" for index in range(3)),
    *(f"f_rest_{index}" for index in range(45)),
    "opacity",
    *(f"scale_{index}" for index in range(3)),
    *(f"rot_{index}" for index in range(4)),
)

# Of SPZ (Niantic): the version that all its readers know, its step of the constant colour, and fixed-point positions.
_SPZ_MAGIC, _SPZ_VERSION, _SPZ_COLOR = 0x5053474E, 2, 0.15
_SPZ_POSITION_BITS, _SPZ_MOST_FRACTION_BITS = 23, 16
# Of logarithms of scales.
_SPZ_SCALE_STEPS, _SPZ_SCALE_SHIFT = 16, 10.0


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


def save_splats(path: Path | str, splats: Splats) -> None:
    """Writes splats in the units and axes of the world, that is, of the input data.

    A PLY is binary and has the properties of Kerbl et al. (2023), in float32. An SPZ (version 2) is about an eighth
    as large: it has 24 bits a coordinate, and 8 bits for any other number.

    Args:
        path: ``*.ply`` or ``*.spz``.
        splats: The Gaussians, on any device.

    Raises:
        ValueError: The path has another suffix, or positions or scales do not fit in an SPZ.
        FloatingPointError: A number is not finite.
        OSError: The file cannot be written.
    """
    check_suffix("path", path, SPLAT_SUFFIXES)
    parts = [each.detach().float().cpu() for each in vars(splats).values()]
    if not all(bool(each.isfinite().all()) for each in parts):
        raise FloatingPointError("splats must be finite, got NaN or infinity: the weights of the run are damaged")
    on_cpu = Splats(*parts)
    content = _ply(on_cpu) if Path(path).suffix.lower() == ".ply" else _spz(on_cpu)
    with atomic_write(path) as file:
        file.write(content)


def _ply(splats: Splats) -> bytes:
    rotations = F.normalize(splats.rotations, dim=-1)
    # All coefficients of red come first, then green, then blue.
    rest = splats.harmonics[:, 1:].mT.flatten(1)
    unused_normals = torch.zeros_like(splats.means)
    columns = (splats.means, unused_normals, splats.harmonics[:, 0], rest, splats.opacity_logits[:, None])
    rows = torch.cat((*columns, splats.log_scales, rotations), dim=1)
    return binary_ply(rows.numpy().astype("<f4").view([(name, "<f4") for name in _PROPERTIES])[:, 0])


def _spz(splats: Splats) -> bytes:
    farthest = float(splats.means.abs().max()) if len(splats) else 0.0
    bits = min(_SPZ_MOST_FRACTION_BITS, math.floor(_SPZ_POSITION_BITS - math.log2(max(farthest, 1e-6) * 1.001)))
    if bits < 1:
        raise ValueError(f"splats must lie within 4 million units of the origin for an SPZ, got one at {farthest:g}")
    least, greatest = (splats.log_scales.min(), splats.log_scales.max()) if len(splats) else (0.0, 0.0)
    if least < -_SPZ_SCALE_SHIFT or greatest > 255 / _SPZ_SCALE_STEPS - _SPZ_SCALE_SHIFT:
        raise ValueError(
            "splats must have standard deviations from 4.6e-5 to 370 units for an SPZ, got "
            f"{math.exp(least):.2g} to {math.exp(greatest):.2g}: write a PLY, or scale the poses"
        )
    fixed = (splats.means.double() * 2**bits).round().int().numpy().astype("<i4")
    # Only x, y and z are stored; w is the positive rest of the unit length, which is inaccurate if w is small. Half a
    # turn about an axis of a Gaussian does not change it, so the largest component becomes w.
    w, x, y, z = F.normalize(splats.rotations, dim=-1).unbind(dim=-1)
    turned = torch.stack((w, x, y, z, -x, w, z, -y, -y, -z, w, x, -z, y, -x, w), dim=-1).view(-1, 4, 4)
    best = turned[..., 0].abs().argmax(dim=-1)
    rotations = turned[torch.arange(len(best)), best]
    rotations = rotations[:, 1:] * torch.where(rotations[:, :1] < 0, -1, 1)
    packed = (
        fixed.view(np.uint8).reshape(-1, 3, 4)[..., :3].tobytes(),
        _bytes(255 * splats.opacity_logits.sigmoid()),
        _bytes(255 * (splats.harmonics[:, 0] * _SPZ_COLOR + 0.5)),
        _bytes(_SPZ_SCALE_STEPS * (splats.log_scales + _SPZ_SCALE_SHIFT)),
        _bytes(127.5 * (rotations + 1)),
        _bytes(128 * (splats.harmonics[:, 1:] + 1)),
    )
    header = struct.pack("<IIIBBBB", _SPZ_MAGIC, _SPZ_VERSION, len(splats), 3, bits, 0, 0)
    return gzip.compress(header + b"".join(packed), mtime=0)


def _bytes(values: Tensor) -> bytes:
    return values.round().clamp(0, 255).to(torch.uint8).numpy().tobytes()
