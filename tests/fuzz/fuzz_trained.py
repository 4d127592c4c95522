"""A small sound model file and a small sound checkpoint, and the same with another description and right checksums."""

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
from safetensors.torch import load, save

from voxelfield.export.model_file import _checksum, _with_checksum, save_model
from voxelfield.training.checkpoint import save_checkpoint
from voxelfield.training.config import preset
from voxelfield.training.run import Run, restore_run
from voxelfield.training.sealed_file import SealingFile

KEY = "voxelfield model"
_BOX = ((-1.0, -1.0, -1.0), (1.0, 1.0, 1.0))


@cache
def small_run() -> Run:
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
    occupancy = {"occupied": cells, "possible": cells, "highest": torch.zeros(3, 3, 3), "aabb": torch.tensor(_BOX)}
    return restore_run(settings, field.state_dict(), occupancy, 7, "cpu")


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


def model_with(description: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    """A model file with another description, or other tensors too, whose checksums are right."""
    tensors = load(model_bytes()) if tensors is None else tensors
    if isinstance(description, dict) and "checksums" in description:
        description = description | {"checksums": {name: _checksum(x) for name, x in tensors.items()}}
    return save(tensors, metadata={KEY: _with_checksum(json.dumps(description))})


@cache
def checkpoint_state() -> dict[str, Any]:
    """What a checkpoint of the run holds, as far as it is needed to draw."""
    run = small_run()
    return {
        "step": 7,
        "config": asdict(run.config),
        "field": run.field.state_dict(),
        "occupancy": run.occupancy.state_dict(),
    }


def checkpoint_bytes(state: dict[str, Any]) -> bytes:
    """A checkpoint of a state, whose checksums are right."""
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(Path(folder, "last.pt"), state)
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
    sealed = io.BytesIO()
    seal = SealingFile(sealed)
    seal.write(file.getvalue())
    seal.seal()
    return sealed.getvalue()


def _stored(content: bytes, info: zipfile.ZipInfo) -> bytes:
    """The bytes of an entry that is stored as it is, whatever its checksum says."""
    start = info.header_offset
    name, extra = (int.from_bytes(content[start + at : start + at + 2], "little") for at in (26, 28))
    return content[start + 30 + name + extra :][: min(info.compress_size, len(content))]
