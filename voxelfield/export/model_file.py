"""The model file: what rendering needs of a run, and no more, in the safetensors format.

Features that no occupied cell can read are left out: the occupied cells, a bit each, tell which are there. The others
are rounded to steps of which a byte counts, and compressed (:mod:`voxelfield.export.quantized`), or float16 where that
is asked for. The decoder's weights are as they are. Metadata holds the run's configuration and a checksum of every
tensor, so the file describes itself, and damage is noticed. Nothing in it is executed.
"""

from __future__ import annotations

import json
import math
import zlib
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from voxelfield.export.quantized import dequantize, pack_codes, quantize, unpack_codes
from voxelfield.export.reached import reached_vertices
from voxelfield.export.visible import visible_cells
from voxelfield.files import atomic_write
from voxelfield.ops._checks import check_choice
from voxelfield.rendering.cameras import Cameras
from voxelfield.training.trained import TrainedRun, restore_run
from voxelfield.training.views import render_settings

FORMAT = 2
"""Layout version of the files. Raise it when an older voxelfield could not read them."""

MODEL_FILE = "model.safetensors"
"""The name under which a run directory holds its model file."""

Quality = Literal["exact", "standard", "small"]
"""How features are stored: as float16, or in steps that are fine or coarse."""

# Steps from zero to a channel's largest feature. On Lego's default, the first costs a few hundredths of a dB.
_STEPS: dict[Quality, int | None] = {"exact": None, "standard": 127, "small": 64}

# Cells along each axis in which the smallest files tell what cameras see.
_VISIBLE_CELLS = 256

_NAME = "voxelfield model"


class ModelFileError(ValueError):
    """A file is no usable voxelfield model; the message names the file and the reason in one line."""


class _InconsistentError(Exception):
    """Parts of a file contradict one another."""


# What contradictory parts raise when they are put together.
_DAMAGED = (
    *(KeyError, TypeError, IndexError, AttributeError, RuntimeError),
    _InconsistentError,
    OmegaConfBaseException,
)


def save_model(
    path: Path | str,
    run: TrainedRun,
    *,
    quality: Quality = "standard",
    cameras: Cameras | None = None,
    steps: int | None = None,
) -> None:
    """Writes what a run has trained as one small file; atomically, replacing what is there.

    Args:
        path: File to write, usually ``*.safetensors``; its folder is created if needed.
        run: What to write, on any device.
        quality: ``exact`` keeps features as float16. ``standard`` and ``small`` round them to fine and to coarse steps;
            a grid that holds a feature which is not finite is kept exactly.
        cameras: With these, cells count as occupied only where one of the cameras' pixels shows a sample, on a finer
            grid of cells. What none of them sees is lost, so they should be those of the training images.
        steps: Steps from zero to a channel's largest feature, 1 to 127, instead of those of ``quality``.

    Raises:
        ValueError: ``quality`` is none of the choices, or ``steps`` is out of range.
        OSError: The file cannot be written.
    """
    check_choice("quality", quality, tuple(_STEPS))
    steps = _STEPS[quality] if steps is None else steps
    occupied = run.occupancy.occupied
    if cameras is not None:
        settings_of_rays = render_settings(run.trainer, run.field)
        occupied = visible_cells(run.field, run.occupancy, settings_of_rays, cameras, _VISIBLE_CELLS)
    bits = torch.from_numpy(np.packbits(occupied.cpu().numpy()))
    tensors = {"occupancy.bits": bits, "occupancy.aabb": run.occupancy.aabb}
    grids = {id(level) for level in run.field.grid.levels}
    shapes, settings = {}, {}
    for name, item in run.field.state_dict(keep_vars=True).items():
        if not isinstance(item, Tensor):  # a module's extra state
            settings[name] = item
            continue
        value = item.detach()
        if id(item) in grids:
            shapes[name] = list(value.shape)
            value = value[reached_vertices(occupied, run.occupancy.aabb, value.shape[:3], run.field.grid.aabb)]
            if steps is not None and bool(value.isfinite().all()):
                codes, tensors[f"step.{name}"] = quantize(value, steps)
                value = pack_codes(codes)
            else:
                narrow = value.half()
                value = narrow if bool(narrow.isfinite().all()) else value
        tensors[f"field.{name}"] = value
    description = {
        "format": FORMAT,
        "steps": run.steps,
        "shapes": shapes,
        "settings": settings,
        "occupancy": list(occupied.shape),
        "config": OmegaConf.to_container(run.config, resolve=True),
    }
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    description["checksums"] = {name: _checksum(tensor) for name, tensor in stored.items()}
    with atomic_write(Path(path)) as file:
        file.write(save(stored, metadata={_NAME: json.dumps(description)}))


def load_model(path: Path | str, device: torch.device | str = "cpu") -> TrainedRun:
    """Loads a model file; none of its scene's files are needed.

    Args:
        path: What :func:`save_model` wrote.
        device: Where field and occupancy go, such as ``"cuda"``.

    Returns:
        The run. Features that were left out are zero: it renders as before, but knows nothing of empty cells.

    Raises:
        FileNotFoundError: There is no such file.
        ModelFileError: It is truncated or damaged, is no voxelfield model, or was written by another version.
        ValueError: Its configuration does not make sense.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no model file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[_NAME])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, KeyError, ValueError) as error:
        raise ModelFileError(f"{path} is no voxelfield model, or damaged: {error}") from error
    if not isinstance(description, dict):
        raise ModelFileError(f"{path} is no voxelfield model: its description is a {type(description).__name__}")
    if description.get("format") != FORMAT:
        raise ModelFileError(
            f"{path} has format {description.get('format')}; this version reads format {FORMAT}: upgrade voxelfield"
        )
    checksums = description.get("checksums")
    if not isinstance(checksums, dict) or checksums.keys() != tensors.keys():
        raise ModelFileError(f"{path} is damaged: its tensors are not those of its description")
    for name, tensor in tensors.items():
        if _checksum(tensor) != checksums[name]:
            raise ModelFileError(f"{path} is damaged: the checksum of {name} is not that of its description")
    try:
        field, occupancy = _unpack(description, tensors)
        config: DictConfig = OmegaConf.create(dict(description["config"]))
        return restore_run(config, field, occupancy, int(description["steps"]), device)
    except torch.OutOfMemoryError:
        raise
    except _DAMAGED as error:
        reason = " ".join(str(error).split())
        raise ModelFileError(f"{path} is damaged: its parts do not fit together ({reason})") from error


def _unpack(description: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the states of field and occupancy."""
    cells = description["occupancy"]
    flags = np.unpackbits(tensors["occupancy.bits"].numpy(), count=math.prod(cells))
    occupied, aabb = torch.from_numpy(flags).bool().view(cells), tensors["occupancy.aabb"]
    field: dict[str, Any] = {name.removeprefix("field."): x for name, x in tensors.items() if name.startswith("field.")}
    box = field[next((name for name in field if name.endswith("aabb")), "grid.aabb")]
    for name, shape in description["shapes"].items():
        reached = reached_vertices(occupied, aabb, shape[:3], box)
        values, step = field[name], tensors.get(f"step.{name}")
        if step is not None:
            values = dequantize(_codes(values, int(reached.sum()), shape[3]), step)
        whole = torch.zeros(shape, dtype=values.dtype)
        whole[reached] = values
        field[name] = whole
    field |= description["settings"]
    state = {"occupied": occupied, "possible": occupied, "highest": torch.zeros(cells), "aabb": aabb}
    return field, state


def _codes(packed: Tensor, rows: int, channels: int) -> Tensor:
    try:
        return unpack_codes(packed, rows, channels)
    except ValueError as error:
        raise _InconsistentError(str(error)) from error


def _checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
