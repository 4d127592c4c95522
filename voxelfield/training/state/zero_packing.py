"""Compact storage of tensors without their zeros.

Most elements of a pyramid and of its optimizer's moments belong to space that no sample has ever reached, and have been
zero from the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.ops._errors import is_out_of_memory

# Number of elements stored or left out together: large enough that one bit each costs little, small enough to follow a
# surface.
_CHUNK = 8
# Smaller tensors are copied as they are.
_MIN_ELEMENTS = 1 << 16
# Fraction of stored chunks above which a tensor is copied as it is.
_MAX_KEPT = 0.9
_MARK = "left out in chunks of"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Number of elements processed at once, to bound memory. On a CPU, torch uses a single thread for so few elements, which
# avoids waiting for other threads on a busy machine.
_CPU_PIECE = 1 << 15
_DEVICE_PIECE = 1 << 22


def copy_without_zeros(state: Any) -> Any:
    """Copies a state, storing large tensors without runs of zeros; the inverse restores every bit.

    Args:
        state: Nested dicts, lists and tuples of tensors (any device) and other values, which are kept as they are.

    Returns:
        The same nesting with copies of the tensors on the CPU; large tensors with many zeros are replaced by dicts of
        their nonzero chunks.
    """
    return _map(state, lambda value: _pack(value) if isinstance(value, Tensor) else value)


def put_back_zeros(state: Any) -> Any:
    """Restores a state from the result of :func:`copy_without_zeros`.

    Raises:
        ValueError: A part is not in the format of that function.
    """
    return _map(state, lambda value: value, packed=_unpack)


def _map(value: Any, leaf: Callable[[Any], Any], packed: Callable[[dict[str, Any]], Tensor] | None = None) -> Any:
    # Exact types only: subclasses may not be constructible from their items alone.
    if type(value) in (dict, OrderedDict):
        if packed is not None and _MARK in value:
            return packed(value)
        mapped = type(value)((name, _map(item, leaf, packed)) for name, item in value.items())
        if isinstance(mapped, OrderedDict):
            mapped.__dict__.update(value.__dict__)  # holds the version metadata of a module's state dict
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map(item, leaf, packed) for item in value)
    return leaf(value)


def _pack(tensor: Tensor) -> Tensor | dict[str, Any]:
    whole = tensor.numel() // _CHUNK * _CHUNK
    if tensor.numel() < _MIN_ELEMENTS or tensor.element_size() not in _SAME_SIZE or tensor.is_sparse:
        return _copy(tensor)
    flat = tensor.detach().contiguous().view(-1)
    # Bits are compared instead of numbers, because negative zeros must be preserved.
    chunks_of_all = flat[:whole].view(_SAME_SIZE[tensor.element_size()]).view(-1, _CHUNK)
    pieces = chunks_of_all.split((_CPU_PIECE if flat.device.type == "cpu" else _DEVICE_PIECE) // _CHUNK)
    # The eight booleans of a chunk form one 64-bit word, which is faster to test than any(dim=1).
    kept = [(piece != 0).view(torch.int64)[:, 0] != 0 for piece in pieces]
    counts: list[int] = torch.stack([which.sum() for which in kept]).tolist()
    if sum(counts) * _CHUNK > _MAX_KEPT * whole:
        return _copy(tensor)
    chunks = torch.empty(sum(counts), _CHUNK, dtype=_SAME_SIZE[tensor.element_size()])
    for piece, which, count, room in zip(pieces, kept, counts, chunks.split(counts), strict=True):
        if count > 0:
            # Not boolean indexing, which on a CPU uses several threads that wait for one another.
            room.copy_(piece.index_select(0, which.nonzero()[:, 0]))
    bits = np.concatenate([np.packbits(which.cpu().numpy()) for which in kept])
    return {
        _MARK: _CHUNK,
        "shape": tuple(tensor.shape),
        "kept": torch.from_numpy(bits),
        "chunks": chunks,
        "rest": _copy(flat[whole:]),
    }


def _copy(tensor: Tensor) -> Tensor:
    # Never a view, because torch.save writes the whole storage of a view.
    return tensor.detach().to("cpu", copy=True)


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        shape, bits, chunks, rest = (packed[key] for key in ("shape", "kept", "chunks", "rest"))
        count = torch.Size(shape).numel()
        chunk_count, left = divmod(count, packed[_MARK])
        # Checked before memory is allocated: there is one bit per chunk.
        if len(bits) != -(-chunk_count // 8) or rest.numel() != left:
            raise ValueError(f"{len(bits)} bytes of bits do not tell of {count} numbers")
        flat = torch.zeros(count, dtype=rest.dtype, device=chunks.device)
        whole = flat.numel() - rest.numel()
        rows = flat[:whole].view(chunks.dtype).view(-1, packed[_MARK])
        kept = np.unpackbits(bits.cpu().numpy(), count=len(rows))
        rows[torch.from_numpy(kept).bool().to(rows.device)] = chunks
        flat[whole:] = rest
        return flat.view(shape)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"a tensor saved without all of its chunks must have chunks that fit its shape: {error}"
        ) from error
