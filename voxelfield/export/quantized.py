"""Features in few bytes: rounded to equal steps, and coded by how often each step occurs."""

from __future__ import annotations

import zlib

import numpy as np
import torch
from torch import Tensor


def quantize(values: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Rounds features to whole multiples of a step of each channel's own.

    Args:
        values: (N, C) finite features.
        steps: Steps from zero to the channel's largest absolute value, 1 to 127.

    Returns:
        codes (N, C) int8 and the steps' sizes (C,) float32, on the device of ``values``.

    Raises:
        ValueError: ``steps`` is out of range, or a feature is not finite.
    """
    if not 1 <= steps <= 127:
        raise ValueError(f"steps must lie in 1..127, got {steps}")
    if not bool(values.isfinite().all()):
        raise ValueError("values must be finite, got NaN or infinity")
    values = values.float()
    largest = values.abs().amax(dim=0) if len(values) else values.new_zeros(values.shape[1])
    size = largest / steps
    # A channel of zeros, or of numbers so small that their step is zero, has the code 0 throughout.
    codes = torch.where(size > 0, values / size, 0).nan_to_num_().round_().clamp_(-steps, steps)
    return codes.to(torch.int8), size


def dequantize(codes: Tensor, size: Tensor) -> Tensor:
    """Returns the features (N, C), float32, that codes (N, C) and steps (C,) stand for."""
    return codes.float() * size


def pack_codes(codes: Tensor) -> Tensor:
    """Compresses codes without loss, channel after channel.

    Huffman's code alone (DEFLATE without its search for repetitions) comes within a few percent of the codes' entropy,
    because neighbouring features hardly predict one another, and takes a tenth of the time.

    Args:
        codes: (N, C) int8, any device.

    Returns:
        (B,) uint8 on the CPU.
    """
    compressor = zlib.compressobj(9, zlib.DEFLATED, zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    plain = codes.t().contiguous().cpu().numpy().tobytes()
    return torch.frombuffer(bytearray(compressor.compress(plain) + compressor.flush()), dtype=torch.uint8)


def unpack_codes(packed: Tensor, rows: int, channels: int) -> Tensor:
    """Returns what :func:`pack_codes` was given: (rows, channels) int8 on the CPU.

    Raises:
        ValueError: The bytes are damaged, or hold another number of codes.
    """
    try:
        plain = zlib.decompress(packed.numpy().tobytes())
    except zlib.error as error:
        raise ValueError(f"compressed features are damaged: {error}") from error
    codes = np.frombuffer(plain, dtype=np.int8)
    if codes.size != rows * channels:
        raise ValueError(f"compressed features must be {rows} x {channels} codes, got {codes.size}")
    return torch.from_numpy(codes.copy()).view(channels, rows).t()
