"""The model file: the part of a trained model that rendering needs, in the safetensors format.

Features that rendering cannot read are left out, because they are too far from all occupied cells; a compressed bit per
cell stores which cells are occupied. The other features are quantised to 8 bits and compressed, or stored as float16.
The decoder's weights are stored as they are. Metadata contain the configuration and a checksum of everything, so the
file describes itself, and damage is detected. Loading executes nothing from the file, its settings are plain data, and
the sizes that it declares are compared with its own before memory is allocated. A file is read once, and the bytes that
were verified are those that are used.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from voxelfield import ops
from voxelfield.components.registry import recorded
from voxelfield.files import read_regular, write_file
from voxelfield.foundation.checks import check_choice
from voxelfield.foundation.errors import shown
from voxelfield.grids.boxes import check_box
from voxelfield.grids.pyramid import VoxelPyramid
from voxelfield.grids.working_copies import Combination, sample_levels
from voxelfield.models.model import Model
from voxelfield.rendering.bricks import can_bake, lattice_spacing
from voxelfield.rendering.cameras import Cameras
from voxelfield.rendering.march import visible_cells, visible_samples
from voxelfield.rendering.render import shaded
from voxelfield.trained.checkpoint_file import contents_of
from voxelfield.trained.trained_model import TrainedModel

FORMAT = 9
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

# Rays at once, to bound memory.
_CHUNK = 1 << 17

# Largest magnitude of a code, so that codes fit a signed byte.
_LARGEST_CODE = 127

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
    for kind, corrections in (("tones", run.tones), ("exposure", run.exposures)):
        tensors |= {f"{kind}/{name}": value for name, value in (corrections or {}).items()}
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
    # A single string, because the order of several metadata entries, and thus the file, would vary from run to run.
    write_file(path, save(on_cpu, metadata={_NAME: with_checksum(json.dumps(description), on_cpu)}))


def read_model_file(path: Path, device: torch.device) -> dict[str, Any]:
    """Reads a file that :func:`save_model` wrote, and returns the entries that a checkpoint of the run would have.

    Features that were left out are zero, and the reasons why cells are empty are unknown. Errors are those of
    :func:`voxelfield.load`.
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
        raise ModelFileError(f"{path} has format {shown(version)}; this version reads format {FORMAT}: {remedy}")
    if text != with_checksum(text[_CHECKSUM_DIGITS:], tensors):
        raise ModelFileError(f"{path} is damaged: its checksum does not match")
    with contents_of(path, ModelFileError):
        return {
            "config": dict(description["config"]),
            "step": int(description["steps"]),
            "model": _unpack(description, tensors, device, len(content)),
            **{
                kind: {name.removeprefix(f"{kind}/"): x for name, x in tensors.items() if name.startswith(f"{kind}/")}
                for kind in ("tones", "exposure")
            },
        }


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
    others = ("occupancy.", "step/", "tones/", "exposure/")  # no module can have a name with a slash
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


def feature_importance(model: Model, cameras: Cameras, rays: int) -> list[Tensor]:
    r"""Estimates how much images change with each feature.

    A feature's importance is the mean, over the colour values of all images, of the squared derivative in the feature.
    If the features' errors are small and independent, the sum of importance times squared error over all features is
    the images' mean squared error.

    Derivatives are taken of one random combination of a pixel's colour channels, over a random background; the mean
    of its square is the sum of the channels' squares. They are taken in the features interpolated at a ray's samples,
    squared, and distributed to the surrounding vertices, as if samples were independent.

    Rays are divided evenly among the cameras, and their pixels are random. The result is (X, Y, Z, C) float32 for each
    level of the grid, on the field's device; zero for inactive levels.
    """
    field, grid, settings, device = model.field, model.field.grid, model.settings, model.device
    cameras = cameras.to(device)
    numbers = torch.arange(len(cameras), device=device).repeat_interleave(-(-rays // max(len(cameras), 1)))
    sizes = cameras.all_sizes().to(device, torch.float32)
    random = torch.Generator(device).manual_seed(0)  # the same run gives the same file
    sums = [torch.zeros(level.shape, device=device, requires_grad=True) for level in grid.levels]
    first, combination, sparse = (
        (grid.grids[0], grid.combination, grid.sparse_grids)
        if isinstance(grid, VoxelPyramid)
        else (grid, Combination(), [])
    )
    dense = len(sums) - len(sparse)
    for chosen in numbers.split(_CHUNK):
        pixels = torch.rand(len(chosen), 2, generator=random, device=device) * sizes[chosen]
        cast = cameras.rays(chosen, pixels, field.aabb)
        with torch.no_grad():
            samples, _ = visible_samples(field, cast, model.occupancy, settings)
            features = grid(samples.positions)
            points = first.to_unit(samples.positions)
        features.requires_grad_()
        with torch.enable_grad():
            density, rgb = field.decoder(features, cast.directions, samples.ray_index)
            limit = settings.min_transmittance
            seen = ops.composite(density, rgb, samples.t, samples.dt, samples.ray_offsets, min_transmittance=limit)
            behind = torch.rand(len(cast), 3, generator=random, device=device)
            emitted, _ = shaded(field, seen, rgb, samples, cast.directions)
            colour = emitted + (1 - seen.opacity)[:, None] * behind
            mixed = (colour * torch.randn(colour.shape, generator=random, device=device)).sum()
            (slope,) = torch.autograd.grad(mixed, features)
            active = sums[: grid.active]
            read = sample_levels(active, sparse[: len(active) - dense], points, combination, first.padding)
        squares = slope.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).square()
        read.backward(squares[:, : read.shape[1]])
    for atlas, each in zip(sums[dense:], sparse, strict=True):
        each.share(atlas.grad)
    return [torch.zeros_like(x) if x.grad is None else x.grad / max(3 * len(numbers), 1) for x in sums]


def reached_vertices(
    occupied: Tensor, occupied_box: Tensor, resolution: Sequence[int], aabb: Tensor, margin: float = 0.0
) -> Tensor:
    """Marks the vertices whose values contribute at some position in an occupied cell, or near one, (X, Y, Z) bool.

    Positions may be as far as ``margin`` from a cell of ``occupied`` (X', Y', Z') along each axis, world units; those
    that rounding puts a little outside of a cell count as inside. The result is the same on every device.
    """
    reached = occupied
    low, high = (corner.tolist() for corner in occupied_box.double())
    begin, end = (corner.tolist() for corner in aabb.double())
    # From the last axis to the first: the largest arrays are then copied in whole rows.
    for axis, vertices in reversed([*enumerate(resolution)]):
        cells = reached.shape[axis]
        spacing = (end[axis] - begin[axis]) / max(vertices - 1, 1)
        at = begin[axis] + spacing * torch.arange(vertices, dtype=torch.float64)
        # A vertex contributes up to its neighbours. Beyond the faces, positions read the outermost vertices.
        to_cells, reach = cells / (high[axis] - low[axis]), spacing + margin
        first = ((at - reach - low[axis]) * to_cells - 1e-3).floor().long()
        stop = ((at + reach - low[axis]) * to_cells + 1e-3).floor().long() + 1
        first[0], stop[-1] = 0, cells
        reached = _any_between(reached, axis, first.clamp(0, cells), stop.clamp(0, cells))
    return reached


def _any_between(cells: Tensor, axis: int, first: Tensor, stop: Tensor) -> Tensor:
    """Returns, along an axis, whether any cell in [first, stop) is set."""
    found = torch.zeros((), dtype=torch.bool, device=cells.device)
    # Where there are many vertices, there are few cells between them, and the other way round: this reads each cell
    # about twice, and makes nothing larger than its result.
    for offset in range(int((stop - first).max())):
        at = (first + offset).minimum(stop - 1).clamp(min=0)
        found = cells.index_select(axis, at.to(cells.device)) | found
    sizes = [-1 if each == axis else 1 for each in range(3)]
    return found & (stop > first).view(sizes).to(cells.device)


def steps_by_spread(levels: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Returns the step (C_l,) float32 of each channel of levels (N_l, C_l), a fraction of its standard deviation.

    In the level with the most vertices, it is ``fraction``; in one of n vertices, it is smaller by the square root of
    n's ratio to their number, because more samples read each.
    """
    largest = max(len(values) for values in levels)
    scales = [fraction * (len(values) / max(largest, 1)) ** 0.5 for values in levels]
    # A level without values has steps of zero.
    padded = [values.float() if len(values) else values.new_zeros(1, values.shape[1]).float() for values in levels]
    return [scale * values.std(dim=0, correction=0) for scale, values in zip(scales, padded, strict=True)]


def steps_by_importance(
    levels: Sequence[Tensor], importance: Sequence[Tensor], error: float
) -> tuple[list[Tensor], list[Tensor]]:
    """Chooses steps so that rounding changes images by a given error, to which each channel contributes alike.

    For small independent errors, that takes the fewest bits. Features whose absence changes images less than the
    rounding of an average one become zero. ``error`` is the root of the mean squared error. Returns the features
    (N_l, C_l) and the step of each level's channels (C_l,) float32, infinite where nothing matters.
    """
    allowed = error**2 / max(sum(values.numel() for values in levels), 1)
    rounded = [x.where(w * x.float().square() >= allowed, 0) for x, w in zip(levels, importance, strict=True)]
    return rounded, [(12 * allowed / weight.mean(dim=0).clamp(min=1e-30)).sqrt() for weight in importance]


def quantize(values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds finite features (N, C) to whole multiples of their channel's step; returns codes, int8, and steps.

    A step that is less than a 127th of the channel's largest feature is enlarged to that.
    """
    values = values.float()
    largest = values.abs().amax(dim=0) if len(values) else values.new_zeros(values.shape[1])
    # No step need be longer than the largest feature; infinite ones could not be stored.
    step = torch.maximum(torch.minimum(step, 4 * largest), largest / _LARGEST_CODE)
    # A channel of zeros, or of numbers so small that their step is zero, has the code 0 throughout.
    codes = torch.where(step > 0, values / step, 0).nan_to_num_().round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
    return codes.to(torch.int8), step


def pack(values: Tensor) -> Tensor:
    """Compresses a tensor's bytes without loss to (B,) uint8 on the CPU.

    DEFLATE with its search for repetitions limited to runs of one byte: neighbouring features hardly predict one
    another, apart from runs of zeros. It is smaller than the whole search, and takes a hundredth of the time.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_RLE)
    plain = values.cpu().contiguous().numpy().tobytes()
    return torch.frombuffer(bytearray(compressor.compress(plain) + compressor.flush()), dtype=torch.uint8)


def unpack(packed: Tensor, size: int) -> Tensor:
    """Returns the ``size`` bytes that :func:`pack` was given, (size,) uint8, in bounded memory.

    Raises:
        RuntimeError: The data are damaged, or contain another number of bytes.
    """
    # DEFLATE makes at most 1032 bytes of one, so a larger size is rejected before memory is allocated.
    if size > 1032 * packed.numel():
        raise RuntimeError(f"compressed data must be {size} bytes, but {packed.numel()} bytes cannot contain that many")
    decompressor = zlib.decompressobj()
    try:
        plain = decompressor.decompress(packed.numpy().data, size + 1)
    except zlib.error as error:
        raise RuntimeError(f"compressed data is damaged: {error}") from error
    if len(plain) != size or not decompressor.eof:
        found = f"more than {size}" if len(plain) > size else f"{len(plain)}"
        raise RuntimeError(f"compressed data must be {size} bytes, got {found}")
    return torch.from_numpy(np.frombuffer(bytearray(plain), dtype=np.uint8))
