"""Compact storage of features: quantised to multiples of a step, then entropy-coded."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

LARGEST_CODE = 127
"""Largest magnitude of a code, so that codes fit a signed byte."""


def steps_by_spread(levels: Sequence[Tensor], fraction: float) -> list[Tensor]:
    """Chooses steps from the standard deviation of each channel.

    Args:
        levels: (N_l, C_l) finite features of each level.
        fraction: Step of the level with the most vertices, in standard deviations of each channel. In a level of n
            vertices, it is smaller by the square root of n's ratio to their number, because more samples read each.

    Returns:
        The step of each level's channels (C_l,) float32, on the device of ``levels``.
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
    rounding of an average one become zero.

    Args:
        levels: (N_l, C_l) finite features of each level.
        importance: (N_l, C_l) of each level, see :func:`voxelfield.export.importance.feature_importance`.
        error: Root of the mean squared error that rounding may cause.

    Returns:
        Features like ``levels``, and the step of each level's channels (C_l,) float32, infinite where nothing matters.
    """
    allowed = error**2 / max(sum(values.numel() for values in levels), 1)
    rounded = [x.where(w * x.float().square() >= allowed, 0) for x, w in zip(levels, importance, strict=True)]
    return rounded, [(12 * allowed / weight.mean(dim=0).clamp(min=1e-30)).sqrt() for weight in importance]


def quantize(values: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds features to whole multiples of their channel's step.

    Args:
        values: (N, C) finite features.
        step: (C,) positive steps wanted. One that is less than a 127th of the channel's largest feature is enlarged to
            that.

    Returns:
        codes (N, C) int8 and the steps (C,) float32, on the device of ``values``.
    """
    values = values.float()
    largest = values.abs().amax(dim=0) if len(values) else values.new_zeros(values.shape[1])
    # No step need be longer than the largest feature; infinite ones could not be stored.
    step = torch.maximum(torch.minimum(step, 4 * largest), largest / LARGEST_CODE)
    # A channel of zeros, or of numbers so small that their step is zero, has the code 0 throughout.
    codes = torch.where(step > 0, values / step, 0).nan_to_num_().round_().clamp_(-LARGEST_CODE, LARGEST_CODE)
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
