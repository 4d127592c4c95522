"""A small sound model file, checkpoint and camera path, and files of other content whose checksums are right."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from voxelfield.settings import preset
from voxelfield.trained.checkpoint_file import pack_checkpoint, write_checkpoint
from voxelfield.trained.model_file import save_model, with_checksum
from voxelfield.trained.trained_model import TrainedModel, restore_trained_model

KEY = "voxelfield model"
_BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


@cache
def small_run() -> TrainedModel:
    """A field of noise, of which some cells are occupied."""
    torch.manual_seed(0)
    settings = preset(
        *("scene=lego", f"scene.aabb={[list(corner) for corner in _BOX]}", "trainer=smoke", "model=sh"),
        *("model.resolutions=[4]", "trainer.stages=[{step: 0, resolution: 4}]", "trainer.occupancy.resolution=3"),
    )
    field = settings.model.build(torch.tensor(_BOX), settings.trainer.resolutions, "cpu")
    with torch.no_grad():
        for level in field.grid.levels:
            level.copy_(torch.randn_like(level).half())
    cells = torch.rand(3, 3, 3) < 0.6
    empty = torch.zeros(3, 3, 3)
    occupancy = {
        "occupancy.occupied": cells,
        "occupancy.allowed": cells,
        "occupancy.density_ema_max": empty,
        "occupancy.aabb": torch.tensor(_BOX),
    }
    return restore_trained_model(settings, field.state_dict(prefix="field.") | occupancy, 7, "cpu")


@cache
def model_bytes(quality: str = "standard") -> bytes:
    """A model file."""
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder, "model.safetensors"), small_run(), quality=quality)
        return Path(folder, "model.safetensors").read_bytes()


def model_description(content: bytes) -> dict[str, Any]:
    """The description in a model file."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    description: dict[str, Any] = json.loads(header["__metadata__"][KEY][8:])
    return description


def model_with(description: Any, tensors: dict[str, Tensor] | None = None) -> bytes:
    """A model file with another description, or other tensors too, whose checksums are right."""
    tensors = load(model_bytes()) if tensors is None else tensors
    return save(tensors, metadata={KEY: with_checksum(json.dumps(description), tensors)})


@cache
def checkpoint_state() -> dict[str, Any]:
    """What a checkpoint of the run holds, as far as it is needed to draw."""
    run = small_run()
    return {"step": 7, "config": asdict(run.config), "model": run.model.state_dict()}


def checkpoint_bytes(state: dict[str, Any]) -> bytes:
    """A checkpoint of a state, whose checksums are right."""
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder, "last.pt"), pack_checkpoint(state))
        return Path(folder, "last.pt").read_bytes()


def raw_checkpoint_bytes(state: Any) -> bytes:
    """What torch.save makes of anything."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def description_bytes() -> bytes:
    """The description of the model file, as JSON."""
    return json.dumps(model_description(model_bytes())).encode()


def model_of_description(text: bytes) -> bytes:
    """A model file whose description is such a text, with right checksums.

    Raises:
        ValueError: The text is not JSON.
    """
    return model_with(json.loads(text))


def with_right_checksums(content: bytes) -> bytes:
    """A checkpoint of the bytes of a zip archive, with its checksums made right.

    Raises:
        ValueError: The entries cannot be read.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            entries = [(info, _stored(content, info)) for info in archive.infolist()]
    except Exception as error:
        raise ValueError("no archive") from error
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for info, data in entries:
            archive.writestr(zipfile.ZipInfo(info.filename), data)
    return file.getvalue()


def _stored(content: bytes, info: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry that is stored as it is, whatever its checksum says."""
    start = info.header_offset
    name, extra = (int.from_bytes(content[start + at : start + at + 2], "little") for at in (26, 28))
    return content[start + 30 + name + extra :][: min(info.compress_size, len(content))]


SETTINGS: dict[str, list[Any]] = {
    "scene.name": ["${oc.env:HOME}", "${" * 400, "${scene.name}" * 400, "???", "a\nb", "../..", "\0", 5],
    "scene.aabb": [[[0, 0, 0], [1e30, 1e30, 1e30]], [[0, 0, 0], [1, 1, 1e-30]], [[-1e6] * 3, [1e6, 1e6, 0]], None],
    "warp.boxes": [12, 13, "${seed}"],
    "warp.ratio": [1 + 1e-12, 1e30],
    "warp.near": [1e30, -0.0, "nan"],
    "data.root": ["/dev", "\0", "${oc.env:HOME}"],
    "model.kind": ["dense", "pyramid", ["sh"], "\n"],
    "model.resolutions": [[4] * 100, [2**31], [4, 2], ["4"], []],
    "model.degree": [0, 3, 1e300, True],
    "model.density.initial": [1e-300, 1e300],
    "model.density.scale": [1e-300, 1e300],
    "trainer.render.voxels_per_step": [1e-5, 1e-300, 1e30, "0.5", "${seed}"],
    "trainer.render.min_weight": [0.0, 0.9999999],
    "trainer.evaluation.supersampling": [64, 65, 2**40],
    "trainer.chunk": [1, 2**62],
    "trainer.occupancy.resolution": [1, 2**20, 2**62],
    "trainer.stages": [[{"step": 0, "resolution": 2**62}], [{"step": 0, "resolution": 2}] * 999, []],
    "trainer.precision": ["float16", "bfloat16", "float64"],
    "trainer.pixel_averaging": ["encoded", ["linear_light"]],
    "camera.test_steps": [2**62, -1],
    "device": ["cuda:99", "cpu\n"],
    "seed": [2**64 - 1, -(2**64)],
}
"""Crafted values of settings, by their keys."""


@st.composite
def crafted_settings(draw: st.DrawFn, config: dict[str, Any]) -> dict[str, Any]:
    """Settings of which one or two have crafted values."""
    config = json.loads(json.dumps(config))
    for key in draw(st.lists(st.sampled_from(sorted(SETTINGS)), min_size=1, max_size=2, unique=True)):
        *groups, last = key.split(".")
        group = config
        for name in groups:
            group = group[name]
        group[last] = draw(st.sampled_from(SETTINGS[key]))
    return config


_DTYPES = [torch.float16, torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.bool]


@st.composite
def crafted_tensors(draw: st.DrawFn, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model file, one of which has another dtype, shape or content, or is gone."""
    name = draw(st.sampled_from(sorted(tensors)))
    value = tensors[name]
    way = draw(st.sampled_from(["dtype", "number", "flat", "first", "scalar", "larger", "gone"]))
    if way == "gone":
        return {key: x for key, x in tensors.items() if key != name}
    changed = {
        "dtype": lambda: value.to(draw(st.sampled_from(_DTYPES))),
        "number": lambda: value.float() * draw(st.sampled_from([0.0, -1.0, 1e30, 1e-40, float("nan"), float("inf")])),
        "flat": lambda: value.flatten(),
        "first": lambda: value[:1],
        "scalar": lambda: value.new_ones(()),
        "larger": lambda: torch.cat([value, value]),
    }[way]()
    if way == "number" and not value.is_floating_point():
        changed = changed.nan_to_num().clamp(0, 255)
    return tensors | {name: (changed.to(value.dtype) if way == "number" else changed).contiguous().clone()}


def model_tensors(quality: str) -> dict[str, Tensor]:
    """The tensors of a model file."""
    return load(model_bytes(quality))


def path_content() -> dict[str, Any]:
    """A camera path with all that ``voxelfield render`` reads of one."""
    pose = [1.0, 0, 0, 2, 0, 1, 0, 3, 0, 0, 1, 4, 0, 0, 0, 1]
    frames = [{"camera_to_world": pose, "fov": 50.0, "aspect": 1.5}] * 2
    sizes = {"render_height": 20, "render_width": 30, "fps": 24}
    return sizes | {"camera_type": "perspective", "camera_path": frames}
