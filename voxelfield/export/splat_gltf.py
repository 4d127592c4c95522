"""Splats as binary glTF with the extension KHR_gaussian_splatting."""

from __future__ import annotations

import json
import struct
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from voxelfield.export.registry import FileFormat
from voxelfield.export.splat_file import Splats

_EXTENSION = "KHR_gaussian_splatting"
_TYPES = {1: "SCALAR", 3: "VEC3", 4: "VEC4"}
_POINTS, _FLOAT, _VERTICES = 0, 5126, 34962  # of glTF: a primitive's mode, a type, and what a part of the buffer is for


def _attributes(splats: Splats) -> dict[str, np.ndarray]:
    of_splats = {
        "ROTATION": splats.rotations.roll(-1, dims=-1),  # x, y, z, w
        "SCALE": splats.log_scales.exp(),
        "OPACITY": splats.opacity_logits.sigmoid()[:, None],
    }
    for degree in range(4):
        for order in range(2 * degree + 1):
            of_splats[f"SH_DEGREE_{degree}_COEF_{order}"] = splats.harmonics[:, degree**2 + order]
    named = {f"{_EXTENSION}:{name}": values.numpy() for name, values in of_splats.items()}
    return {"POSITION": splats.means.numpy(), **named}


def _write(path: Path, splats: Splats, up_axis: str) -> None:
    attributes = _attributes(splats)
    ends = [0, *accumulate(values.nbytes for values in attributes.values())]
    accessors: list[dict[str, Any]] = [
        {"bufferView": index, "componentType": _FLOAT, "count": len(values), "type": _TYPES[values.shape[1]]}
        for index, values in enumerate(attributes.values())
    ]
    # Positions, which are the first, must have bounds.
    accessors[0] |= {"min": splats.means.amin(dim=0).tolist(), "max": splats.means.amax(dim=0).tolist()}
    splatting = {"kernel": "ellipse", "colorSpace": "srgb_rec709_display"}
    names = {name: index for index, name in enumerate(attributes)}
    scene = {
        "asset": {"version": "2.0", "generator": "voxelfield"},
        "extensionsUsed": [_EXTENSION],
        "scene": 0,
        "scenes": [{"nodes": [0]}],
        "nodes": [{"mesh": 0}],
        "meshes": [{"primitives": [{"attributes": names, "mode": _POINTS, "extensions": {_EXTENSION: splatting}}]}],
        "accessors": accessors,
        "bufferViews": [
            {"buffer": 0, "byteOffset": start, "byteLength": end - start, "target": _VERTICES}
            for start, end in pairwise(ends)
        ],
        "buffers": [{"byteLength": ends[-1]}],
    }
    text = json.dumps(scene).encode()
    text += b" " * (-len(text) % 4)
    with path.open("wb") as file:
        file.write(struct.pack("<4sIIII", b"glTF", 2, 28 + len(text) + ends[-1], len(text), 0x4E4F534A) + text)
        file.write(struct.pack("<II", ends[-1], 0x004E4942))
        for values in attributes.values():
            file.write(np.ascontiguousarray(values).tobytes())


GLTF = FileFormat(of="splats", suffixes=(".glb",), write=_write, up_axis="y")
