"""Copies of a state, with compact storage of tensors without their zeros.

Most elements of a pyramid and of its optimizer's moments belong to space that no sample has ever reached, and have been
zero from the beginning.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from voxelfield.foundation.errors import is_out_of_memory
from voxelfield.messages import clipped

# Number of bytes stored or left out together: large enough that one bit each costs little, small enough to follow a
# surface.
_CHUNK = 32
# Smaller tensors are copied as they are.
_MIN_BYTES = 1 << 18
# Fraction of stored chunks above which a tensor is copied as it is.
_MAX_STORED = 0.9
# Number of chunks that are searched at once. On a CPU, torch uses a single thread for so few, which avoids waiting for
# other threads on a busy machine.
_CPU_PIECE, _DEVICE_PIECE = 1 << 12, 1 << 19
_MARK = "nonzero chunks"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def copy_without_zeros(state: Any) -> Any:
    """Copies a state, storing large tensors without runs of zeros; the inverse restores every bit.

    A state consists of nested dicts, lists, tuples and sets of tensors (any device), plain Python values, and what
    :func:`pack_streams` returns. The result has copies of the tensors on the CPU; large tensors with many zeros are
    replaced by dicts of their nonzero chunks.

    Raises ValueError for a value of a type that a safe load would reject, for example a Path or a NumPy scalar.
    """
    return _map(state, _pack, "state")


def put_back_zeros(state: Any, device: torch.device | str = "cpu") -> Any:
    """Restores a state from the result of :func:`copy_without_zeros`, on a device.

    Raises ValueError if it is damaged, or has a tensor of more bytes than are stored for it, such as one with a stride
    of 0 or the memory of another, or a list or dict that occurs twice.
    """
    addresses: set[int] = set()

    def restored(value: Any, name: str) -> Any:
        if isinstance(value, dict):
            return _unpack({key: restored(x, name) if isinstance(x, Tensor) else x for key, x in value.items()})
        if not isinstance(value, Tensor):
            return value
        memory = None if value.layout is not torch.strided or value.is_meta else value.untyped_storage()
        if memory is None or value.nbytes > memory.nbytes() or memory.data_ptr() in addresses:
            raise ValueError(f"{name} must be a tensor that is stored in full, got {tuple(value.shape)}")
        if value.nbytes > 0:
            addresses.add(memory.data_ptr())
        return value.to(device)

    return _map(state, restored, "state", set())


def _map(value: Any, leaf: Callable[[Any, str], Any], name: str, holders: set[int] | None = None) -> Any:
    if name.count("[") > 200:  # more may exceed Python's recursion limit
        raise ValueError(f"{clipped(name)} is nested too deeply")
    kind = type(value)
    if holders is not None and kind in (dict, OrderedDict, list, tuple, set) and len(value) > 0:
        # Lists of lists that occur twice would become any number of copies.
        if id(value) in holders:
            raise ValueError(f"{name} must not be in two places of a file")
        holders.add(id(value))
    # Exact types only: subclasses may not be constructible from their items alone.
    if kind in (dict, OrderedDict) and _MARK not in value:
        mapped = kind(
            (_map(key, leaf, f"a key of {name}", holders), _map(item, leaf, f"{name}[{key!r}]", holders))
            for key, item in value.items()
        )
        if isinstance(mapped, OrderedDict):
            mapped.__dict__.update(value.__dict__)  # the version metadata of a module's state dict
        return mapped
    if kind in (list, tuple, set):
        return kind(_map(item, leaf, f"{name}[{index}]", holders) for index, item in enumerate(value))
    return leaf(value, name)


def _pack(value: Any, name: str) -> Any:
    # Exact types: subclasses such as np.float64 or an IntEnum pickle as themselves, not as the plain type.
    if type(value) in _PLAIN or (type(value) is dict and _MARK in value):
        return value
    if type(value) not in (Tensor, nn.Parameter):
        raise ValueError(
            f"{name} is a {type(value).__module__}.{type(value).__qualname__}: "
            "a checkpoint stores tensors and plain Python values only"
        )
    value = value.detach()
    if value.nbytes >= _MIN_BYTES:
        packer = _Packer()
        packer.add(value)
        packed = packer.packed(value.shape, value.dtype)
        if packed is not None:
            return packed
    # Never a view, because torch.save writes the whole storage of a view.
    return value.to("cpu", copy=True)


def pack_streams(pieces: Iterable[tuple[int, Tensor]], shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Packs a tensor as :func:`copy_without_zeros` does, without materialising it.

    Its elements are given in pieces, contiguous on any device, each with the number of a stream. A stream is a part of
    the tensor; its pieces are in order, but pieces of other streams may be in between.
    """
    streams: dict[int, _Packer] = {}
    for number, piece in pieces:
        streams.setdefault(number, _Packer()).add(piece)
    whole = _Packer()
    for _, stream in sorted(streams.items()):
        whole.append(stream)
    packed = whole.packed(shape, dtype) if math.prod(shape) * dtype.itemsize >= _MIN_BYTES else None
    return whole.bytes().view(dtype).view(tuple(shape)) if packed is None else packed


class _Packer:
    """The nonzero chunks of bytes that are given piece by piece."""

    def __init__(self) -> None:
        self._stored: list[Tensor] = []
        self._chunks: list[Tensor] = []
        self._rest = torch.empty(0, dtype=torch.uint8)

    def add(self, piece: Tensor) -> None:
        """Adds the bytes of a contiguous tensor."""
        # Bits are compared instead of numbers, because negative zeros must be preserved.
        flat = piece.contiguous().view(-1).view(torch.uint8)
        if len(self._rest) > 0:
            flat = torch.cat((self._rest.to(flat.device), flat))
        flat = flat.clone() if flat.storage_offset() % 8 else flat
        whole = len(flat) // _CHUNK * _CHUNK
        rows = flat[:whole].view(torch.int64).view(-1, _CHUNK // 8)
        pieces = rows.split(_CPU_PIECE if flat.device.type == "cpu" else _DEVICE_PIECE)
        stored = [(piece != 0).any(dim=1) for piece in pieces]
        self._stored.append(torch.cat(stored).cpu())
        self._chunks += [piece[which].cpu() for piece, which in zip(pieces, stored, strict=True)]
        self._rest = flat[whole:].to("cpu", copy=True)

    def append(self, other: _Packer) -> None:
        """Adds the bytes that another one has been given."""
        if len(self._rest) > 0:  # the other's chunks begin within a chunk here
            self.add(other.bytes())
            return
        self._stored += other._stored
        self._chunks += other._chunks
        self._rest = other._rest

    def packed(self, shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any] | None:
        """Returns the chunks of a tensor; None if too few are left out."""
        mask = torch.cat(self._stored)
        if mask.sum() > _MAX_STORED * len(mask):
            return None
        bits = torch.from_numpy(np.packbits(mask.numpy()))
        chunks = torch.cat(self._chunks)
        return {_MARK: chunks, "rest": self._rest, "stored": bits, "shape": tuple(shape), "dtype": dtype}

    def bytes(self) -> Tensor:
        """Returns all bytes, with zeros."""
        mask = torch.cat(self._stored)
        whole = len(mask) * _CHUNK
        found = torch.zeros(whole + len(self._rest), dtype=torch.uint8)
        rows, places, used = found[:whole].view(torch.int64).view(-1, _CHUNK // 8), mask.nonzero()[:, 0], 0
        for chunks in self._chunks:
            rows[places[used : used + len(chunks)]] = chunks
            used += len(chunks)
        found[whole:] = self._rest
        return found


def _unpack(packed: dict[str, Any]) -> Tensor:
    try:
        chunks, rest, bits, shape, dtype = (packed[key] for key in (_MARK, "rest", "stored", "shape", "dtype"))
        size = torch.Size(shape).numel() * dtype.itemsize
        # Checked before memory is allocated: there is one bit per chunk.
        if len(bits) != -(-(size // _CHUNK) // 8) or rest.numel() != size % _CHUNK:
            raise ValueError(f"{len(bits)} bytes of bits do not describe {size} bytes")
        flat = torch.zeros(size, dtype=torch.uint8, device=chunks.device)
        rows = flat[: size - rest.numel()].view(torch.int64).view(-1, _CHUNK // 8)
        stored = np.unpackbits(bits.cpu().numpy(), count=len(rows))
        rows[torch.from_numpy(stored).bool().to(rows.device)] = chunks
        flat[size - rest.numel() :] = rest
        return flat.view(dtype).view(shape)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise ValueError(f"a tensor without its zeros must have chunks that fit its shape: {error}") from error
