"""Tensors without their zeros: most of an optimizer's moments belong to space that no sample was ever near."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Elements that are kept or left out together: enough that a bit for each costs little, few enough to follow a surface.
_CHUNK = 8
# Smaller tensors are not worth the trouble.
_MIN_ELEMENTS = 1 << 16
# Of chunks, above which a tensor stays as it is.
_MAX_KEPT = 0.9
_MARK = "zeros left out"
_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_without_zeros(state: Any) -> Any:
    """Copies a state, and leaves out the zeros of large tensors; :func:`put_back_zeros` restores each bit.

    Args:
        state: Nested dicts, lists and tuples of tensors (any device) and other values, which are taken over.

    Returns:
        The same nesting with copies of the tensors on the CPU, and in place of large ones that are zero for the most
        part dicts of what is left of them.
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
        mapped = type(value)((key, _map(item, leaf, packed)) for key, item in value.items())
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
    chunks = flat[:whole].view(-1, _CHUNK)
    # Bits are compared, because negative zeros must survive.
    kept = (chunks.view(_SAME_SIZE[tensor.element_size()]) != 0).any(dim=1)
    if int(kept.sum()) > _MAX_KEPT * len(chunks):
        return _copy(tensor)
    rest = _copy(flat[whole:])
    bits = torch.from_numpy(np.packbits(kept.cpu().numpy()))
    left = {"kept": bits, "chunks": chunks[kept].cpu(), "rest": rest}
    return {_MARK: _CHUNK, "shape": tuple(tensor.shape), **left}


def _copy(tensor: Tensor) -> Tensor:
    # Never a view: torch.save writes all of the memory that a view belongs to.
    return tensor.detach().to("cpu", copy=True)


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        shape, bits, chunks, rest = (packed[key] for key in ("shape", "kept", "chunks", "rest"))
        flat = torch.zeros(torch.Size(shape).numel(), dtype=chunks.dtype, device=chunks.device)
        whole = flat.numel() - rest.numel()
        rows = flat[:whole].view(-1, packed[_MARK])
        kept = np.unpackbits(bits.cpu().numpy(), count=len(rows))
        rows[torch.from_numpy(kept).bool().to(rows.device)] = chunks
        flat[whole:] = rest
        return flat.view(shape)
    except torch.OutOfMemoryError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError, RuntimeError) as error:
        raise ValueError(f"a tensor whose zeros were left out must have chunks that fit its shape: {error}") from error
