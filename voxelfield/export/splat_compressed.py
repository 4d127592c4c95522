"""Splats as SPZ of Niantic and as SOG of PlayCanvas, through GaussForge."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from voxelfield.export.registry import FileFormat
from voxelfield.export.splat_file import Splats, ply_content
from voxelfield.installed import import_optional

# Of SPZ: greatest coordinate, their step, and the range of standard deviations.
_FARTHEST, _STEP, _SCALES = 2048.0, 1 / 4096, (math.exp(-10), math.exp(255 / 16 - 10))


def _write_spz(path: Path, splats: Splats, up_axis: str, spz_version: int = 4) -> None:
    if len(splats):
        farthest, scales = float(splats.means.abs().max()), splats.log_scales.exp()
        least, middle, greatest = (float(each) for each in (scales.min(), scales.median(), scales.max()))
        if farthest >= _FARTHEST or middle < _STEP or least < _SCALES[0] or greatest > _SCALES[1]:
            raise ValueError(
                "splats must lie within 2048 units of the origin, and have standard deviations from 4.6e-5 to 370 "
                f"units with a median above 2.4e-4, for an SPZ, got one at {farthest:g} and {least:.2g} to "
                f"{greatest:.2g} with a median of {middle:.2g}: write a PLY, or scale the poses"
            )
    _convert(path, splats, spz_version=spz_version)


def _gaussforge() -> Any:
    return import_optional("gaussforge", "compress splats", "splats")


def _convert(path: Path, splats: Splats, up_axis: str = "", **options: int) -> None:
    found = _gaussforge().GaussForge().convert(ply_content(splats), "ply", path.suffix[1:].lower(), **options)
    if "error" in found:
        raise ValueError(f"splats must be ones that GaussForge compresses, got the error {found['error']}")
    path.write_bytes(found["data"])


SPZ = FileFormat(of="splats", suffixes=(".spz",), write=_write_spz, up_axis="y", require=_gaussforge)
SOG = FileFormat(of="splats", suffixes=(".sog",), write=_convert, require=_gaussforge)
