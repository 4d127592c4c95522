"""Tensors without their zeros.

Most of a pyramid and of an optimizer's moments belongs to space that no sample was ever near, and is zero from the
beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.ops._errors import is_out_of_memory

# Elements that are kept or left out together: enough that a bit for each costs little, few enough to follow a surface.
_CHUNK = 8
# Smaller tensors are not worth the trouble.
_MIN_ELEMENTS = 1 << 16
# Of chunks, above which a tensor stays as it is.
_MAX_KEPT = 0.9
_MARK = "left out in chunks of"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Elements that are looked at together, to bound memory. On a CPU, torch leaves so few to a single thread, which does
# not wait for others on a busy machine.
_CPU_PIECE = 1 << 15
_DEVICE_PIECE = 1 << 22


def copy_without_zeros(state: Any) -> Any:
    """Copies a state, large tensors without runs of zeros; the inverse restores each bit.

    Args:
        state: Nested dicts, lists and tuples of tensors (any device) and other values, which are taken over.

    Returns:
        The same nesting with copies of the tensors on the CPU, and in place of large ones from which much can be left
        out dicts of the rest.
    """
    return _map(state, lambda value: _pack(value) if isinstance(value, Tensor) else value)


def put_back_zeros(state: Any) -> Any:
    """Restores what :func:`copy_without_zeros` was given.

    Raises:
        ValueError: A part is not what that function makes.
    """
    return _map(state, lambda value: value, packed=_unpack)


def _map(value: Any, leaf: Callable[[Any], Any], packed: Callable[[dict[str, Any]], Tensor] | None = None) -> Any:
    # Exact types: only these are known to be made from their items alone.
    if type(value) in (dict, OrderedDict):
        if packed is not None and _MARK in value:
            return packed(value)
        mapped = type(value)((name, _map(item, leaf, packed)) for name, item in value.items())
        if isinstance(mapped, OrderedDict):
            mapped.__dict__.update(value.__dict__)  # a module's state has its version there
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map(item, leaf, packed) for item in value)
    return leaf(value)


def _pack(tensor: Tensor) -> Tensor | dict[str, Any]:
    whole = tensor.numel() // _CHUNK * _CHUNK
    if tensor.numel() < _MIN_ELEMENTS or tensor.element_size() not in _SAME_SIZE or tensor.is_sparse:
        return _copy(tensor)
    flat = tensor.detach().contiguous().view(-1)
    # Bits are compared, not numbers, because negative zeros must survive.
    chunks_of_all = flat[:whole].view(_SAME_SIZE[tensor.element_size()]).view(-1, _CHUNK)
    pieces = chunks_of_all.split((_CPU_PIECE if flat.device.type == "cpu" else _DEVICE_PIECE) // _CHUNK)
    # The eight truth values of a chunk are one word, which is faster to look at than any(dim=1).
    kept = [(piece != 0).view(torch.int64)[:, 0] != 0 for piece in pieces]
    counts: list[int] = torch.stack([which.sum() for which in kept]).tolist()
    if sum(counts) * _CHUNK > _MAX_KEPT * whole:
        return _copy(tensor)
    chunks = torch.empty(sum(counts), _CHUNK, dtype=_SAME_SIZE[tensor.element_size()])
    for piece, which, count, room in zip(pieces, kept, counts, chunks.split(counts), strict=True):
        if count > 0:
            # Not indexed by the truth values: on a CPU that takes several threads, which wait for one another.
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
    # Never a view: torch.save writes all of the memory that a view belongs to.
    return tensor.detach().to("cpu", copy=True)


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        shape, bits, chunks, rest = (packed[key] for key in ("shape", "kept", "chunks", "rest"))
        count = torch.Size(shape).numel()
        chunk_count, left = divmod(count, packed[_MARK])
        # Before memory is asked for: a bit tells of each chunk.
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
            f"a tensor that parts were left out of must have chunks that fit its shape: {error}"
        ) from error
