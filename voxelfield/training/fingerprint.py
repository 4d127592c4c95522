"""Fingerprints of training data and of trained fields, to detect changes."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield.datasets.scene import Split


def fingerprint(split: Split) -> dict[str, Tensor]:
    """Returns checksums (CRC-32) of training data.

    Args:
        split: N cameras, and the local images, on the CPU.

    Returns:
        ``images`` int64, of each local image with its mask, and ``cameras`` (N,) int64, of each pose with its
        intrinsics.
    """
    cameras = split.cameras
    lens = None if cameras.lens is None else cameras.lens.rows
    columns = (cameras.c2w.flatten(1), cameras.intrinsics, cameras.sizes, lens, cameras.rolling)
    # zlib releases Python's interpreter lock.
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        images = list(pool.map(lambda index: _image(split, index), split.local_indices))
    rows = torch.cat([column for column in columns if column is not None], dim=1)
    return {"images": torch.tensor(images), "cameras": torch.tensor([_checksum(camera) for camera in rows])}


def fingerprint_of_weights(*modules: nn.Module) -> str:
    """Returns a digest (BLAKE2b) of the parameters and buffers of modules on any device.

    Floating-point values are rounded to float16, as which a GPU reads the grids that a CPU reads as float32.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, value in (entry for module in modules for entry in module.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {tuple(value.shape)};".encode())
            rounded = value.half() if value.is_floating_point() else value
            digest.update(rounded.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def changes(saved: Mapping[str, Any], now: Mapping[str, Tensor], names: Sequence[str]) -> str:
    """Describes how the present data differ from a checkpoint's, in words that follow "scene"; "" if equal."""
    count = len(now["images"])
    if len(saved["images"]) != count:
        return f"has {count} training images, but the checkpoint was trained on {len(saved['images'])}"
    for part in ("images", "cameras"):
        differ = (saved[part].cpu() != now[part]).nonzero()[:, 0].tolist()
        if differ:
            first = f"{len(differ)} of {count}, the first is {names[differ[0]]}"
            return f"has different training {part} from the checkpoint ({first})"
    return ""


def _image(split: Split, index: int) -> int:
    checksum, mask = _checksum(split.image(index)), split.mask(index)
    return checksum if mask is None else _checksum(mask, checksum)


def _checksum(values: Tensor, before: int = 0) -> int:
    return zlib.crc32(values.contiguous().view(torch.uint8).numpy().data, before)
