"""The model file: the part of a trained model that rendering needs, in the safetensors format.

Features that rendering cannot read are left out, because they are too far from all occupied cells; a compressed bit per
cell stores which cells are occupied. The other features are quantised to 8 bits and compressed
(:mod:`voxelfield.trained.quantized`), or stored as float16. The decoder's weights are stored as they are. Metadata
contain the configuration and a checksum of everything, so the file describes itself, and damage is detected. Loading
executes nothing from the file, its settings are plain data, and the sizes that it declares are compared with its own
before memory is allocated. A file is read once, and the bytes that were verified are those that are used.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from voxelfield.components.registry import recorded
from voxelfield.files import atomic_write, read_regular
from voxelfield.foundation.checks import check_choice
from voxelfield.grids.boxes import check_box
from voxelfield.rendering.bricks import can_bake, lattice_spacing
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_cells
from voxelfield.trained.checkpoint_file import contents_of
from voxelfield.trained.quantized import (
    feature_importance,
    pack,
    quantize,
    reached_vertices,
    steps_by_importance,
    steps_by_spread,
    unpack,
)
from voxelfield.trained.trained_model import TrainedModel, restore_trained_model

FORMAT = 8
"""Layout version of the files. Raise it when an older voxelfield could not read them."""

Quality = Literal["exact", "standard", "small"]
"""How features are stored: as float16, or in steps that are fine or coarse."""

# The step of the finest level as a fraction of each channel's standard deviation, and with cameras the root mean
# squared error that rounding may cause in their images, whose values lie in 0..1.
_ROUNDING: dict[Quality, tuple[float, float] | None] = {
    "exact": None,
    "standard": (0.125, 0.001),
    "small": (0.5, 0.0015),
}

# Rays for each vertex of the finest level from which its importance is estimated.
_RAYS_PER_VERTEX = 4

# Largest number of features for every byte of a file, beyond a minimum for any file. Most of a grid is empty and takes
# no bytes; Lego's has about twenty features for a byte of its smallest file.
_FEATURES_PER_BYTE = 256
_FEATURES_OF_ANY_FILE = 1 << 26

# 512 along each axis.
_MAX_CELLS = 1 << 27

_NAME = "voxelfield model"
_CHECKSUM_DIGITS = 8


class ModelFileError(ValueError):
    """A file is not a usable voxelfield model; the message names the file and the reason in one line."""


def save_model(
    path: Path | str, run: TrainedModel, *, quality: Quality = "standard", cameras: Cameras | None = None
) -> None:
    """Writes a trained model as one small file; atomically, replacing an earlier file.

    Args:
        path: File to write, usually ``*.safetensors``; its folder is created if needed.
        run: The trained model, on any device.
        quality: ``exact`` stores features as float16. ``standard`` and ``small`` round them to fine and to coarse
            steps; a model with a feature that is not finite is stored exactly.
        cameras: With these, cells count as occupied only where one of the cameras' pixels shows a sample, on a finer
            grid of cells, and steps follow how much each feature matters for their images. Matter that none of them
            sees is lost, so pass the cameras of the training images.

    Raises:
        ValueError: ``quality`` is not one of these.
        OSError: The file cannot be written.
    """
    check_choice("quality", quality, tuple(_ROUNDING))
    field, occupancy, grid, rays = run.field, run.occupancy, run.model.grid, run.model.settings
    occupied = occupancy.occupied if cameras is None else visible_cells(field, occupancy, rays, cameras)
    # Stored values, from which a field with deferred shading is drawn, are interpolated between vertices of a lattice,
    # and those around an occupied cell may lie outside of it.
    margin = lattice_spacing(field) if can_bake(field) else 0.0
    # Blocks of sparse levels exist only where something is visible.
    sparse = [blocks is not None for blocks in grid.blocks]
    masks = [
        torch.ones(level.shape[:3], dtype=torch.bool, device=level.device)
        if whole
        else reached_vertices(occupied, occupancy.aabb, level.shape[:3], grid.aabb, margin)
        for level, whole in zip(grid.levels, sparse, strict=True)
    ]
    stored = [level.detach()[mask] for level, mask in zip(grid.levels, masks, strict=True)]
    steps: list[Tensor] | None = None
    rounding = _ROUNDING[quality]
    if rounding is not None and stored and all(bool(values.isfinite().all()) for values in stored):
        if cameras is None:
            steps = steps_by_spread(stored, rounding[0])
        else:
            count = _RAYS_PER_VERTEX * max(map(len, stored))
            importance = feature_importance(run.model, cameras, count)
            importance = [weight[mask] for weight, mask in zip(importance, masks, strict=True)]
            stored, steps = steps_by_importance(stored, importance, rounding[1])
    tensors = {"occupancy.bits": pack(torch.from_numpy(np.packbits(occupied.cpu().numpy())))}
    tensors["occupancy.aabb"] = occupancy.aabb
    state = {name: value for name, value in run.model.state_dict().items() if not name.startswith("occupancy.")}
    tensors |= {name: value for name, value in state.items() if isinstance(value, Tensor)}
    tensors |= {f"tones/{name}": value for name, value in (run.tones or {}).items()}
    names = [next(name for name, own in run.model.named_parameters() if own is level) for level in grid.levels]
    for number, name in enumerate(names):
        if steps is None:
            narrow = stored[number].half()
            tensors[name] = narrow if bool(narrow.isfinite().all()) else stored[number]
        else:
            codes, tensors[f"step/{name}"] = quantize(stored[number], steps[number])
            tensors[name] = pack(codes.t())  # channel after channel
    description = {
        "format": FORMAT,
        "steps": run.steps,
        "shapes": {name: list(state[name].shape) for name in names},
        "whole": [name for name, whole in zip(names, sparse, strict=True) if whole],
        # Extra states of modules.
        "settings": {name: value for name, value in state.items() if not isinstance(value, Tensor)},
        "occupancy": list(occupied.shape),
        "margin": margin,
        "config": recorded(run.config),
    }
    on_cpu = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(Path(path)) as file:
        # A single string, because the order of several metadata entries, and thus the file, would vary from run to run.
        file.write(save(on_cpu, metadata={_NAME: with_checksum(json.dumps(description), on_cpu)}))


def load_model(path: Path, device: torch.device) -> TrainedModel:
    """Loads a file that :func:`save_model` wrote; called by :func:`voxelfield.load`.

    Features that were left out are zero, and the reasons why cells are empty are unknown.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a file, but a named pipe, for example.
        ModelFileError: It is truncated or damaged, is not a voxelfield model, or was written by another version.
    """
    try:
        content = read_regular(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"no model file {path}") from error
    try:
        # Unlike safetensors.safe_open, which maps the file: its tensors would follow every later change of the file.
        tensors = load(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        text = header["__metadata__"][_NAME]
        description = json.loads(text[_CHECKSUM_DIGITS:])
        version = description["format"]
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:500]
        raise ModelFileError(f"{path} is not a voxelfield model, or is damaged: {reason}") from error
    if version != FORMAT:
        remedy = "export the run again with this version" if version in range(FORMAT) else "upgrade voxelfield"
        raise ModelFileError(f"{path} has format {version}; this version reads format {FORMAT}: {remedy}")
    if text != with_checksum(text[_CHECKSUM_DIGITS:], tensors):
        raise ModelFileError(f"{path} is damaged: its checksum does not match")
    with contents_of(path, ModelFileError):
        state = _unpack(description, tensors, device, len(content))
        tones = {name.removeprefix("tones/"): x for name, x in tensors.items() if name.startswith("tones/")}
        config, steps = dict(description["config"]), int(description["steps"])
        return replace(restore_trained_model(config, state, steps, device), tones=tones or None)


def with_checksum(description: str, tensors: Mapping[str, Tensor]) -> str:
    """Returns a description preceded by the CRC-32 of it and of the tensors' names, dtypes, shapes and bytes."""
    checksum = zlib.crc32(description.encode())
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {list(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:0{_CHECKSUM_DIGITS}x}{description}"


def _unpack(description: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, size: int) -> dict[str, Any]:
    """Returns the state of the model on a device, from a file of ``size`` bytes."""
    shapes = {name: _sizes(f"the shape of {name}", shape, 4) for name, shape in description["shapes"].items()}
    features = sum(map(math.prod, shapes.values()))
    if features > max(_FEATURES_OF_ANY_FILE, _FEATURES_PER_BYTE * size):
        raise RuntimeError(f"{features} features are more than a file of {size} bytes can describe")
    cells = _sizes("the number of cells", description["occupancy"], 3)
    if math.prod(cells) > _MAX_CELLS:
        raise RuntimeError(f"{cells} cells are too many")
    bits = unpack(tensors["occupancy.bits"], -(-math.prod(cells) // 8))
    occupied = torch.from_numpy(np.unpackbits(bits.numpy(), count=math.prod(cells))).to(device).bool().view(cells)
    aabb = tensors["occupancy.aabb"]
    others = ("occupancy.", "step/", "tones/")  # no module can have a name with a slash
    state: dict[str, Any] = {name: values for name, values in tensors.items() if not name.startswith(others)}
    # A field without a grid need not have its box among its buffers.
    box = state[min(name for name in state if name.startswith("field.") and name.endswith("aabb"))] if shapes else aabb
    for name, corners in (("occupancy.aabb", aabb), ("the grid's aabb", box)):
        check_box(name, corners)
    for name, shape in shapes.items():
        if name in description["whole"]:
            reached = torch.ones(shape[:3], dtype=torch.bool, device=device)
        else:
            reached = reached_vertices(occupied, aabb, shape[:3], box, float(description["margin"]))
        values, step, stored = state[name], tensors.get(f"step/{name}"), [int(reached.sum()), shape[3]]
        if step is not None:
            if step.dtype != torch.float32 or step.shape != (shape[3],):
                raise RuntimeError(f"the steps of {name} must be {shape[3]} float32 numbers")
            codes = unpack(values, math.prod(stored)).view(torch.int8).view(stored[::-1]).t()
            values = codes.to(device).float() * step.to(device)
        if list(values.shape) != stored:
            raise RuntimeError(f"{name} must have shape {stored}, got {list(values.shape)}")
        state[name] = torch.zeros(shape, dtype=values.dtype, device=device)
        state[name][reached] = values.to(device)
    cells_state = {"occupied": occupied, "allowed": occupied.clone(), "aabb": aabb}
    cells_state["density_ema_max"] = torch.zeros(cells, device=device)
    return {**state, **description["settings"], **{f"occupancy.{name}": each for name, each in cells_state.items()}}


def _sizes(name: str, sizes: Any, count: int) -> list[int]:
    """Returns the sizes that a file declares, if they are ``count`` positive whole numbers."""
    if not (isinstance(sizes, list) and len(sizes) == count and all(type(x) is int and x > 0 for x in sizes)):
        raise RuntimeError(f"{name} must be {count} positive whole numbers, got {str(sizes)[:80]}")
    return sizes
