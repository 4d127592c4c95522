"""The model file: what rendering needs of a run, and no more, in the safetensors format.

Features that no occupied cell can read are left out: the occupied cells, a bit each and compressed, tell which are
there. The others are rounded to steps of which a byte counts, and compressed (:mod:`voxelfield.export.quantized`), or
float16 where that is asked for. The decoder's weights are as they are. Metadata holds the run's configuration, a
checksum of every tensor and one of all this, so the file describes itself, and damage is noticed. Nothing in it is
executed, its settings are plain data, and what it declares is compared with its size before memory is allocated. A file
is read once, and what was verified is what is used, whatever happens to the file afterwards.
"""

from __future__ import annotations

import contextlib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from voxelfield.export.importance import feature_importance
from voxelfield.export.quantized import pack, quantize, steps_by_importance, steps_by_spread, unpack
from voxelfield.export.reached import reached_vertices
from voxelfield.fields.field import RadianceField
from voxelfield.files import atomic_write, read_regular
from voxelfield.grids.boxes import check_box
from voxelfield.models.model import Model
from voxelfield.ops._checks import check_choice
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.occupancy import OccupancyGrid
from voxelfield.rendering.visible_cells import visible_cells
from voxelfield.training.config import RunConfig

FORMAT = 5
"""Layout version of the files. Raise it when an older voxelfield could not read them."""

"""The name under which a run directory holds its model file."""

Quality = Literal["exact", "standard", "small"]
"""How features are stored: as float16, or in steps that are fine or coarse."""


@dataclass(frozen=True)
class Rounding:
    """How coarsely features are rounded.

    Attributes:
        share: Without cameras: the step of the finest level, as a fraction of each channel's standard deviation
            (:func:`voxelfield.export.quantized.steps_by_spread`).
        error: With cameras: the root of the mean squared error that rounding may cause in their images, whose numbers
            lie in 0..1 (:func:`voxelfield.export.quantized.steps_by_importance`).
    """

    share: float
    error: float

    def __post_init__(self) -> None:
        for name in ("share", "error"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"Rounding.{name} must be positive and finite, got {value}")


STANDARD_ROUNDING = Rounding(share=0.125, error=0.001)
"""For ``quality="standard"``."""

SMALL_ROUNDING = Rounding(share=0.5, error=0.0015)
"""For ``quality="small"``."""

_ROUNDING: dict[Quality, Rounding | None] = {
    "exact": None,
    "standard": STANDARD_ROUNDING,
    "small": SMALL_ROUNDING,
}

# Rays for each vertex of the finest level from which its importance is estimated.
_RAYS_PER_VERTEX = 4

# A grid may hold this many features for every byte of the file, if it holds more than the number below. Most of a grid
# is empty and takes no bytes; Lego's has about twenty features for a byte of its smallest file.
_FEATURES_PER_BYTE = 256
_FEATURES_OF_ANY_FILE = 1 << 26

# 512 along each axis.
_MAX_CELLS = 1 << 27

_NAME = "voxelfield model"
_CHECKSUM_DIGITS = 8


class Trained(Protocol):
    """The content of a model file.

    :class:`voxelfield.training.trained_model.TrainedModel` implements it and documents the attributes.
    """

    @property
    def model(self) -> Model:
        """The model, which says how rays are sampled."""
        ...

    @property
    def field(self) -> RadianceField:
        """The field."""
        ...

    @property
    def occupancy(self) -> OccupancyGrid:
        """The cells in which rays are sampled."""
        ...

    @property
    def config(self) -> RunConfig:
        """All settings."""
        ...

    @property
    def steps(self) -> int:
        """Steps of training done."""
        ...


class ModelParts(NamedTuple):
    """The content of a model file, as read.

    Attributes:
        config: All settings, as the file has them.
        field: State of the field.
        occupancy: State of the occupancy grid, without the reasons why cells are empty.
        steps: Steps of training done.
    """

    config: Mapping[str, Any]
    field: dict[str, Any]
    occupancy: dict[str, Tensor]
    steps: int


class ModelFileError(ValueError):
    """A file is not a usable voxelfield model; the message names the file and the reason in one line."""


# Exceptions raised when contradictory parts are combined.
_DAMAGED = (KeyError, TypeError, IndexError, AttributeError, RuntimeError, OverflowError)


def save_model(
    path: Path | str,
    run: Trained,
    *,
    quality: Quality = "standard",
    cameras: Cameras | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Writes what a run has trained as one small file; atomically, replacing what is there.

    Args:
        path: File to write, usually ``*.safetensors``; its folder is created if needed.
        run: What to write, on any device.
        quality: ``exact`` keeps features as float16. ``standard`` and ``small`` round them to fine and to coarse steps;
            a run with a feature that is not finite is kept exactly.
        cameras: With these, cells count as occupied only where one of the cameras' pixels shows a sample, on a finer
            grid of cells, and steps follow how much each feature matters for their images. What none of them sees is
            lost, so they should be those of the training images.
        rounding: How coarsely to round, instead of as ``quality`` says; not with ``exact``.

    Raises:
        ValueError: ``quality`` is none of the choices, or ``rounding`` is given with ``exact``.
        OSError: The file cannot be written.
    """
    check_choice("quality", quality, tuple(_ROUNDING))
    if quality == "exact" and rounding is not None:
        raise ValueError(f'rounding must be None with quality="exact", which rounds nothing, got {rounding}')
    rounding = _ROUNDING[quality] if rounding is None else rounding
    settings_of_rays = run.model.settings
    occupied = run.occupancy.occupied
    if cameras is not None:
        occupied = visible_cells(run.field, run.occupancy, settings_of_rays, cameras)
    aabb, grid = run.occupancy.aabb, run.model.grid
    sparse = {id(each.features) for each in getattr(grid, "sparse_grids", [])}
    reached = [
        # Blocks exist only where something is visible.
        torch.ones(level.shape[:3], dtype=torch.bool, device=level.device)
        if id(level) in sparse
        else reached_vertices(occupied, aabb, level.shape[:3], grid.aabb)
        for level in grid.levels
    ]
    kept = [level.detach()[mask] for level, mask in zip(grid.levels, reached, strict=True)]
    bits = torch.from_numpy(np.packbits(occupied.cpu().numpy()))
    tensors = {"occupancy.bits": pack(bits), "occupancy.aabb": aabb}
    steps = None
    if rounding is not None and all(bool(values.isfinite().all()) for values in kept):
        if cameras is None:
            steps = steps_by_spread(kept, rounding.share)
        else:
            rays = _RAYS_PER_VERTEX * max(map(len, kept))
            importance = feature_importance(run.field, run.occupancy, settings_of_rays, cameras, rays)
            importance = [weight[mask] for weight, mask in zip(importance, reached, strict=True)]
            kept, steps = steps_by_importance(kept, importance, rounding.error)
    levels = {id(level): number for number, level in enumerate(grid.levels)}
    shapes, settings, whole = {}, {}, []
    for name, item in run.field.state_dict(keep_vars=True).items():
        if not isinstance(item, Tensor):  # a module's extra state
            settings[name] = item
            continue
        value = item.detach()
        if id(item) in levels:
            shapes[name] = list(value.shape)
            whole += [name] if id(item) in sparse else []
            value = kept[levels[id(item)]]
            if steps is not None:
                codes, tensors[f"step.{name}"] = quantize(value, steps[levels[id(item)]])
                value = pack(codes.t())  # channel after channel
            else:
                narrow = value.half()
                value = narrow if bool(narrow.isfinite().all()) else value
        tensors[f"field.{name}"] = value
    description = {
        "format": FORMAT,
        "steps": run.steps,
        "shapes": shapes,
        "whole": whole,
        "settings": settings,
        "occupancy": list(occupied.shape),
        "config": asdict(run.config),
    }
    stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    description["checksums"] = {name: _checksum(tensor) for name, tensor in stored.items()}
    with atomic_write(Path(path)) as file:
        # A single string, because the order of several metadata entries, and thus the file, would vary from run to run.
        file.write(save(stored, metadata={_NAME: _with_checksum(json.dumps(description))}))


def read_model(path: Path, device: torch.device) -> ModelParts:
    """Reads a model file. :func:`voxelfield.load` makes a run of it.

    Args:
        path: What :func:`save_model` wrote.
        device: Where the tensors go.

    Returns:
        What it holds. Features that were left out are zero.

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
        tensors = dict(sorted(load(content).items()))  # safetensors returns them in any order
        text = _metadata(content)
        # Files of format 2 and before have no checksum here.
        begin = 0 if text.startswith("{") else _CHECKSUM_DIGITS
        description = json.loads(text[begin:])
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not a voxelfield model, or is damaged: {_one_line(error)}") from error
    if not isinstance(description, dict):
        raise ModelFileError(f"{path} is not a voxelfield model: its description is a {type(description).__name__}")
    if begin > 0 and text != _with_checksum(text[begin:]):
        raise ModelFileError(f"{path} is damaged: the checksum of its description does not match")
    if description.get("format") != FORMAT:
        older = description.get("format") in range(FORMAT)
        remedy = "export the run again" if older else "upgrade voxelfield"
        raise ModelFileError(
            f"{path} has format {description.get('format')}; this version reads format {FORMAT}: {remedy}"
        )
    if begin == 0:
        raise ModelFileError(f"{path} is damaged: its description has no checksum")
    checksums = description.get("checksums")
    if not isinstance(checksums, dict) or checksums.keys() != tensors.keys():
        raise ModelFileError(f"{path} is damaged: its tensors do not match its description")
    for name, tensor in tensors.items():
        if _checksum(tensor) != checksums[name]:
            raise ModelFileError(f"{path} is damaged: the checksum of {name} does not match its description")
    with parts_of(path):
        field, occupancy = _unpack(description, tensors, device, len(content))
        return ModelParts(dict(description["config"]), field, occupancy, int(description["steps"]))


def _metadata(content: bytes) -> str:
    """Returns the text that a file has as metadata; its header is a JSON object, preceded by its size in 8 bytes."""
    size = int.from_bytes(content[:8], "little")
    text = json.loads(content[8 : 8 + size])["__metadata__"][_NAME]
    if not isinstance(text, str):
        raise TypeError(f"its description must be text, got a {type(text).__name__}")
    return text


@contextlib.contextmanager
def parts_of(path: Path) -> Iterator[None]:
    """Raises an error that names a file if its parts do not fit together.

    Args:
        path: The file.

    Raises:
        ModelFileError: What is done within fails, as putting contradictory parts together does.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except _DAMAGED as error:
        raise ModelFileError(f"{path} is damaged: its parts do not fit together ({_one_line(error)})") from error
    except ValueError as error:  # its configuration
        if str(path) in str(error):
            raise
        raise ModelFileError(f"{path}: {error}") from error


def _unpack(
    description: dict[str, Any], tensors: dict[str, Tensor], device: torch.device, size: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the states of field and occupancy on a device, from a file of a size in bytes."""
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
    field: dict[str, Any] = {name.removeprefix("field."): x for name, x in tensors.items() if name.startswith("field.")}
    box = field[next((name for name in field if name.endswith("aabb")), "grid.aabb")]
    for name, corners in (("occupancy.aabb", aabb), ("the grid's aabb", box)):
        check_box(name, corners)
    whole = description.get("whole", [])
    for name, shape in shapes.items():
        if name in whole:
            reached = torch.ones(shape[:3], dtype=torch.bool, device=device)
        else:
            reached = reached_vertices(occupied, aabb, shape[:3], box)
        values, step, stored = field[name], tensors.get(f"step.{name}"), [int(reached.sum()), shape[3]]
        if step is not None:
            if step.dtype != torch.float32 or step.shape != (shape[3],):
                raise RuntimeError(f"the steps of {name} must be {shape[3]} float32 numbers")
            codes = unpack(values, math.prod(stored)).view(torch.int8).view(stored[::-1]).t()
            values = codes.to(device).float() * step.to(device)
        if list(values.shape) != stored:
            raise RuntimeError(f"{name} must have shape {stored}, got {list(values.shape)}")
        field[name] = torch.zeros(shape, dtype=values.dtype, device=device)
        field[name][reached] = values.to(device)
    field |= description["settings"]
    state = {
        "occupied": occupied,
        "allowed": occupied.clone(),
        "density_ema_max": torch.zeros(cells, device=device),
        "aabb": aabb,
    }
    return field, state


def _sizes(name: str, sizes: Any, count: int) -> list[int]:
    """Returns sizes that a file declares, if they are positive whole numbers, and as many as there should be."""
    if not (isinstance(sizes, list) and len(sizes) == count and all(type(x) is int and x > 0 for x in sizes)):
        raise RuntimeError(f"{name} must be {count} positive whole numbers, got {str(sizes)[:80]}")
    return sizes


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500]


def _checksum(tensor: Tensor) -> int:
    """Returns the CRC-32 of a contiguous tensor's dtype, shape and bytes."""
    kind = zlib.crc32(f"{tensor.dtype} {list(tensor.shape)}".encode())
    return zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data, kind)


def _with_checksum(text: str) -> str:
    """Returns a text preceded by its CRC-32."""
    return f"{zlib.crc32(text.encode()):0{_CHECKSUM_DIGITS}x}{text}"
