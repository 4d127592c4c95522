"""Copies of a state, with compact storage of tensors without their zeros.

Most elements of a pyramid and of its optimizer's moments belong to space that no sample has ever reached, and have been
zero from the beginning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from voxelfield.ops._errors import is_out_of_memory

# Number of elements stored or left out together: large enough that one bit each costs little, small enough to follow a
# surface.
_CHUNK = 8
# Smaller tensors are copied as they are.
_MIN_ELEMENTS = 1 << 16
# Fraction of stored chunks above which a tensor is copied as it is.
_MAX_KEPT = 0.9
# Number of chunks processed at once, to bound memory. On a CPU, torch uses a single thread for so few elements, which
# avoids waiting for other threads on a busy machine.
_CPU_PIECE = 1 << 12
_DEVICE_PIECE = 1 << 19
_MARK = "left out in chunks of"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def copy_without_zeros(state: Any) -> Any:
    """Copies a state, storing large tensors without runs of zeros; the inverse restores every bit.

    Args:
        state: Nested dicts, lists, tuples and sets of tensors (any device) and plain Python values.

    Returns:
        The same nesting with copies of the tensors on the CPU; large tensors with many zeros are replaced by dicts of
        their nonzero chunks.

    Raises:
        TypeError: A value has a type that a safe load would reject, for example a Path or a NumPy scalar.
    """
    return _map(state, _pack, "state")


def put_back_zeros(state: Any) -> Any:
    """Restores a state from the result of :func:`copy_without_zeros`.

    Raises:
        ValueError: A part is not in the format of that function.
    """
    return _map(state, lambda value, _: _unpack(value) if isinstance(value, dict) else value, "state")


def _map(value: Any, leaf: Callable[[Any, str], Any], name: str) -> Any:
    kind = type(value)
    # Exact types only: subclasses may not be constructible from their items alone.
    if kind in (dict, OrderedDict) and _MARK not in value:
        mapped = kind(
            (_map(key, leaf, f"a key of {name}"), _map(item, leaf, f"{name}[{key!r}]")) for key, item in value.items()
        )
        if isinstance(mapped, OrderedDict):
            mapped.__dict__.update(value.__dict__)  # holds the version metadata of a module's state dict
        return mapped
    if kind in (list, tuple, set):
        return kind(_map(item, leaf, f"{name}[{index}]") for index, item in enumerate(value))
    return leaf(value, name)


def _pack(value: Any, name: str) -> Any:
    # Exact types: subclasses such as np.float64 or an IntEnum pickle as themselves, not as the plain type.
    if type(value) in _PLAIN:
        return value
    if type(value) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}: "
            "a checkpoint holds tensors and plain Python values only"
        )
    # Never a view, because torch.save writes the whole storage of a view.
    if value.numel() < _MIN_ELEMENTS or value.element_size() not in _SAME_SIZE or value.is_sparse:
        return value.detach().to("cpu", copy=True)
    flat = value.detach().contiguous().view(-1)
    whole = len(flat) // _CHUNK * _CHUNK
    piece_size = _CPU_PIECE if flat.device.type == "cpu" else _DEVICE_PIECE
    # Bits are compared instead of numbers, because negative zeros must be preserved.
    pieces = flat[:whole].view(_SAME_SIZE[value.element_size()]).view(-1, _CHUNK).split(piece_size)
    # The eight booleans of a chunk form one 64-bit word, which is faster to test than any(dim=1).
    kept = torch.cat([(piece != 0).view(torch.int64)[:, 0] != 0 for piece in pieces])
    if kept.sum() > _MAX_KEPT * len(kept):
        return value.detach().to("cpu", copy=True)
    return {
        _MARK: _CHUNK,
        "shape": tuple(value.shape),
        "kept": torch.from_numpy(np.packbits(kept.cpu().numpy())),
        "chunks": torch.cat([piece[which].cpu() for piece, which in zip(pieces, kept.split(piece_size), strict=True)]),
        "rest": flat[whole:].to("cpu", copy=True),
    }


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        shape, bits, chunks, rest = (packed[key] for key in ("shape", "kept", "chunks", "rest"))
        count = torch.Size(shape).numel()
        chunk_count, left = divmod(count, packed[_MARK])
        # Checked before memory is allocated: there is one bit per chunk.
        if len(bits) != -(-chunk_count // 8) or rest.numel() != left:
            raise ValueError(f"{len(bits)} bytes of bits do not tell of {count} numbers")
        flat = torch.zeros(count, dtype=rest.dtype, device=chunks.device)
        rows = flat[: count - left].view(chunks.dtype).view(-1, packed[_MARK])
        kept = np.unpackbits(bits.cpu().numpy(), count=len(rows))
        rows[torch.from_numpy(kept).bool().to(rows.device)] = chunks
        flat[count - left :] = rest
        return flat.view(shape)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"a tensor saved without all of its chunks must have chunks that fit its shape: {error}"
        ) from error
