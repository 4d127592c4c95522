"""Tensors without what needs no storing: zeros, and initial values that can be computed again.

Most of a pyramid and of an optimizer's moments belongs to space that no sample was ever near.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from voxelfield.grids.uniform_noise import UniformNoise, chunk_size

# Elements that are kept or left out together: enough that a bit for each costs little, few enough to follow a surface.
_CHUNK = 8
# Smaller tensors are not worth the trouble.
_MIN_ELEMENTS = 1 << 16
# Of chunks, above which a tensor stays as it is.
_MAX_KEPT = 0.9
_MARK = "left out in chunks of"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_without_known(state: Any, noise: Mapping[str, UniformNoise] | None = None) -> Any:
    """Copies a state, large tensors without what can be told without storing it; the inverse restores each bit.

    Left out are runs of zeros, and runs of the noise that a tensor consisted of at first.

    Args:
        state: Nested dicts, lists and tuples of tensors (any device) and other values, which are taken over.
        noise: What tensors consisted of at first, by their keys in whichever dict holds them.

    Returns:
        The same nesting with copies of the tensors on the CPU, and in place of large ones from which much can be left
        out dicts of the rest.
    """
    known = noise or {}
    return _map(state, lambda value, key: _pack(value, known.get(key)) if isinstance(value, Tensor) else value)


def put_back_known(state: Any) -> Any:
    """Restores what :func:`copy_without_known` was given.

    Raises:
        ValueError: A part is not what that function makes.
    """
    return _map(state, lambda value, key: value, packed=_unpack)


def _map(
    value: Any,
    leaf: Callable[[Any, Any], Any],
    packed: Callable[[dict[str, Any]], Tensor] | None = None,
    key: Any = None,
) -> Any:
    # Exact types: only these are known to be made from their items alone.
    if type(value) in (dict, OrderedDict):
        if packed is not None and _MARK in value:
            return packed(value)
        mapped = type(value)((name, _map(item, leaf, packed, name)) for name, item in value.items())
        if isinstance(mapped, OrderedDict):
            mapped.__dict__.update(value.__dict__)  # a module's state has its version there
        return mapped
    if type(value) in (list, tuple):
        return type(value)(_map(item, leaf, packed) for item in value)
    return leaf(value, key)


def _pack(tensor: Tensor, noise: UniformNoise | None) -> Tensor | dict[str, Any]:
    whole = tensor.numel() // _CHUNK * _CHUNK
    if tensor.numel() < _MIN_ELEMENTS or tensor.element_size() not in _SAME_SIZE or tensor.is_sparse:
        return _copy(tensor)
    flat = tensor.detach().contiguous().view(-1)
    pieces = list(_pieces(flat[:whole]))
    # The eight truth values of a chunk are one word, which is faster to look at than any(dim=1).
    kept = [((_differences(*piece, noise) != 0).view(torch.int64)[:, 0] != 0).cpu() for piece in pieces]
    counts = [int(which.sum()) for which in kept]
    if sum(counts) * _CHUNK > _MAX_KEPT * whole:
        return _copy(tensor)
    # The differences are computed again where there are any, so that memory is taken only for what is stored.
    chunks = torch.empty(sum(counts), _CHUNK, dtype=_SAME_SIZE[tensor.element_size()])
    for piece, which, count, room in zip(pieces, kept, counts, chunks.split(counts), strict=True):
        if count > 0:
            # Not indexed by the truth values: on a CPU that takes several threads, which wait for one another.
            rows = which.nonzero()[:, 0].to(flat.device)
            room.copy_(_differences(*piece, noise).index_select(0, rows))
    bits = np.concatenate([np.packbits(which.numpy()) for which in kept])
    return {
        _MARK: _CHUNK,
        "shape": tuple(tensor.shape),
        "kept": torch.from_numpy(bits),
        "chunks": chunks,
        "rest": _copy(flat[whole:]),
        "noise": None if noise is None else asdict(noise),
    }


def _copy(tensor: Tensor) -> Tensor:
    # Never a view: torch.save writes all of the memory that a view belongs to.
    return tensor.detach().to("cpu", copy=True)


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        shape, bits, chunks, rest = (packed[key] for key in ("shape", "kept", "chunks", "rest"))
        noise = None if packed["noise"] is None else UniformNoise(**packed["noise"])
        flat = torch.zeros(torch.Size(shape).numel(), dtype=rest.dtype, device=chunks.device)
        whole = flat.numel() - rest.numel()
        rows = flat[:whole].view(chunks.dtype).view(-1, packed[_MARK])
        kept = np.unpackbits(bits.cpu().numpy(), count=len(rows))
        rows[torch.from_numpy(kept).bool().to(rows.device)] = chunks
        if noise is not None:
            for start, piece in _pieces(flat[:whole]):
                piece.view(chunks.dtype).bitwise_xor_(_bits_of(noise, start, piece))
        flat[whole:] = rest
        return flat.view(shape)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"a tensor that parts were left out of must have chunks that fit its shape: {error}"
        ) from error


def _differences(start: int, piece: Tensor, noise: UniformNoise | None) -> Tensor:
    """Returns the bits, in rows of a chunk, in which a piece of a tensor differs from noise, or else from zero."""
    # Bits are compared, not numbers, because negative zeros must survive.
    bits = piece.view(_SAME_SIZE[piece.element_size()])
    return (bits if noise is None else bits ^ _bits_of(noise, start, piece)).view(-1, _CHUNK)


def _pieces(flat: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yields parts of a tensor that are worked on one after the other, each after the index of its first element."""
    size = chunk_size(flat.device)
    for start in range(0, len(flat), size):
        yield start, flat[start : start + size]


def _bits_of(noise: UniformNoise, start: int, like: Tensor) -> Tensor:
    values = torch.empty_like(like)
    noise.write(values, start)
    return values.view(_SAME_SIZE[like.element_size()])
