"""The model file: what rendering needs of a run, and no more, in the safetensors format.

Features are float16, unless one is too large for that, and those that no occupied cell can read are left out: the
occupied cells, a bit each, tell which are there. The decoder's weights are as they are. Metadata holds the run's
configuration, so the file describes itself. Nothing in it is executed.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from voxelfield.export.reached import reached_vertices
from voxelfield.files import atomic_write
from voxelfield.training.trained import TrainedRun, restore_run

FORMAT = 1
"""Layout version of the files. Raise it when an older voxelfield could not read them."""

MODEL_FILE = "model.safetensors"
"""The name under which a run directory holds its model file."""

_NAME = "voxelfield model"


class ModelFileError(ValueError):
    """A file is no usable voxelfield model; the message names the file and the reason in one line."""


def save_model(path: Path | str, run: TrainedRun) -> None:
    """Writes what a run has trained as one small file; atomically, replacing what is there.

    Args:
        path: File to write, usually ``*.safetensors``; its folder is created if needed.
        run: What to write, on any device.

    Raises:
        OSError: The file cannot be written.
    """
    occupied = run.occupancy.occupied
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
        ModelFileError: It is truncated, is no voxelfield model, or was written by a newer version. Flipped bits in
            its tensors are not noticed: the format has no checksums.
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
    try:
        field, occupancy = _unpack(description, tensors)
        config: DictConfig = OmegaConf.create(dict(description["config"]))
        return restore_run(config, field, occupancy, int(description["steps"]), device)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, IndexError, AttributeError, RuntimeError, OmegaConfBaseException) as error:
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
        whole = torch.zeros(shape, dtype=field[name].dtype)
        whole[reached_vertices(occupied, aabb, shape[:3], box)] = field[name]
        field[name] = whole
    field |= description["settings"]
    state = {"occupied": occupied, "possible": occupied, "highest": torch.zeros(cells), "aabb": aabb}
    return field, state
