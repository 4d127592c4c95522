"""Argument checks shared by the ops. Each message names the argument, the expected value and the actual one."""

from __future__ import annotations

import contextlib
import operator
import sys
import warnings
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from voxelfield.foundation import constants
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, shown
from voxelfield.foundation.private_torch import functorch_active, is_mapped

FLOATING = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NARROW = frozenset((torch.float16, torch.bfloat16))
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)


def is_divided(values: Tensor) -> bool:
    """Returns whether a tensor is divided among processes."""
    # DTensors can exist only if this module has been imported; importing it here would take long.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(values, tensors.DTensor)


def check_tensor(name: str, value: Any, shape: tuple[int | str, ...], why: str = "") -> None:
    """Raises unless ``value`` is a dense tensor of the given shape.

    A string matches any length, and a first ``"..."`` any number of dimensions, which only numbers may follow.
    """
    check_dense(name, value)
    found = value.shape
    # A loop, because every op makes this check, and a generator takes longer.
    fits = len(found) == len(shape)
    for got, want in zip(found, shape, strict=False):
        fits = fits and (got == want or isinstance(want, str))
    if not fits and shape[:1] == ("...",):
        fits = len(shape) == 1 or found[1 - len(shape) :] == shape[1:]
    if not fits:
        wanted = ", ".join(str(s) for s in shape)
        raise ArgumentValueError(f"{name} must have shape ({wanted}){why}, got {tuple(found)}")


def check_dense(name: str, value: object) -> None:
    """Raises unless ``value`` is a dense tensor, and all of it is on this device."""
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise ArgumentValueError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    if type(value) is not Tensor and is_divided(value):
        raise ArgumentTypeError(
            f"{name} must be a whole tensor, got a DTensor: fully_shard gathers parameters only in forward() of the "
            "module that it was given, such as a whole VoxelPyramid, and in methods for register_fsdp_forward_method"
        )


def check_has_values(name: str, value: Tensor) -> None:
    """Raises if a tensor whose values are read has none."""
    if value.is_meta:
        raise ArgumentValueError(f"{name} must have values, but it is on the device meta")


def check_dtype(name: str, value: Tensor, allowed: tuple[torch.dtype, ...], why: str = "") -> None:
    """Raises unless the tensor has one of the allowed dtypes."""
    if value.dtype not in allowed:
        wanted = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        raise ArgumentTypeError(f"{name} must be {wanted}{why}, got {str(value.dtype).removeprefix('torch.')}")


def check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    """Raises unless ``value`` is one of the allowed strings."""
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentValueError(f"{name} must be one of {list(allowed)}, got {shown(value)}")


def check_same_device(name: str, value: Tensor, other_name: str, other: Tensor) -> None:
    """Raises unless both tensors are on the same device."""
    if value.device != other.device:
        raise ArgumentValueError(
            f"{name} must be on the device of {other_name}, {other.device}, but it is on {value.device}"
        )


def check_field(
    name: str,
    value: Tensor,
    shape: tuple[int | str, ...],
    dtype: torch.dtype | tuple[torch.dtype, ...],
    other_name: str = "",
    other: Tensor | None = None,
    why: str = "",
) -> None:
    """Raises unless ``value`` is a tensor of the given shape and dtypes, on the device of ``other`` if that is given.

    Reads no values, so that the check does not synchronise with the device.
    """
    check_tensor(name, value, shape)
    check_dtype(name, value, dtype if isinstance(dtype, tuple) else (dtype,), why)
    if other is not None:
        check_same_device(name, value, other_name, other)


def check_result(name: str, value: Tensor, shape: tuple[int, ...], points: Tensor) -> None:
    """Raises unless a function's result for ``points`` has the given shape, at most 32 bits and the points' device.

    Without this check, a result of shape (N, 1) instead of (N,) would be broadcast to N x N values.
    """
    check_tensor(name, value, shape, f" for {points.shape[0]} points")
    check_dtype(name, value, (torch.float32, torch.float16, torch.bfloat16))
    check_same_device(name, value, "points", points)


def check_fraction(name: str, value: float) -> None:
    """Raises unless a number lies in [0, 1]."""
    if not lies_within(name, value, 0, 1):
        raise ArgumentValueError(f"{name} must lie in [0, 1], got {shown(value)}")


def lies_within(name: str, value: float, low: float, high: float) -> bool:
    """Tells whether a number lies in [low, high]; raises if it is not a number."""
    try:
        # An int need not fit a float, as which kernels take it.
        return bool(low <= (float(value) if isinstance(value, int) else value) <= high)
    except (OverflowError, TypeError, ValueError, RuntimeError) as error:
        raise ArgumentTypeError(f"{name} must be a number, got {shown(value)}") from error


def truth_of(name: str, value: object) -> bool:
    """Returns whether a value is true; raises if it is neither, as a tensor of several elements."""
    try:
        return bool(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{name} must be True or False, got {shown(value)}") from error


def check_not_negative(name: str, value: float) -> None:
    """Raises unless a number is finite and not negative."""
    if not lies_within(name, value, 0, sys.float_info.max):
        raise ArgumentValueError(f"{name} must be finite and not negative, got {shown(value)}")


def check_finite(name: str, value: float) -> None:
    """Raises unless a number is finite."""
    if not lies_within(name, value, -sys.float_info.max, sys.float_info.max):
        raise ArgumentValueError(f"{name} must be finite, got {shown(value)}")


def as_coordinates(points: Tensor, source: Tensor) -> Tensor:
    """Widens 16-bit points to the dtype that ``source`` requires; leaves all else to the checks of the kernels."""
    if isinstance(points, Tensor) and isinstance(source, Tensor) and points.dtype in NARROW:
        return widen_positions("points", points, coordinate_dtype(source.dtype))
    return points


def widen_positions(name: str, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Widens 16-bit positions to ``dtype`` and warns about them once per process; returns others unchanged."""
    global _warned_of_narrow_positions
    if positions.dtype not in NARROW:
        return positions
    if not _warned_of_narrow_positions and not is_compiling():
        _warned_of_narrow_positions = True
        warnings.warn(
            f"{name} is {str(positions.dtype).removeprefix('torch.')} and is widened: 16-bit coordinates cannot tell "
            "neighbouring cells of a large grid apart. Compute positions in float32, outside of autocast",
            stacklevel=2,
        )
    return positions.to(dtype)


_warned_of_narrow_positions = False


def check_ray_offsets(ray_offsets: Tensor, samples: int, like_name: str, like: Tensor) -> Tensor:
    """Raises unless ``ray_offsets`` (R + 1,) are integers on the device of ``like``, and fit the number of samples.

    They must not decrease and must lie in 0..samples. This is not checked on CUDA, because that would synchronise; the
    kernels clamp the offsets that they read (``PackedRays`` in extension/rays/packed_rays.h).

    Returns:
        The offsets, converted to int64 if they are int32.
    """
    check_field("ray_offsets", ray_offsets, ("R + 1",), (torch.int64, torch.int32), like_name, like)
    ray_offsets = ray_offsets.long()
    if ray_offsets.shape[0] == 0:
        raise ArgumentValueError("ray_offsets must have R + 1 entries, at least one, got none")
    check_order(ray_offsets, samples, like_name)
    return ray_offsets


def check_order(ray_offsets: Tensor, samples: int, like_name: str) -> None:
    """Raises unless offsets do not decrease and lie in 0..samples, if their values can be read."""
    if offsets_fit(ray_offsets, samples):
        return
    falls = ray_offsets[1:] < ray_offsets[:-1]
    if falls.any():
        ray = int(falls.nonzero()[0])
        first, last = ray_offsets[ray : ray + 2].tolist()
        raise ArgumentValueError(f"ray_offsets must not decrease, got {first} followed by {last} at ray {ray}")
    first, last = int(ray_offsets[0]), int(ray_offsets[-1])
    raise ArgumentValueError(f"ray_offsets must lie in 0..{samples}, as {like_name} has rows, got {first}..{last}")


def offsets_fit(ray_offsets: Tensor, samples: int) -> bool:
    """Tells whether offsets do not decrease and lie in 0..samples; True if their values cannot be read."""
    if not is_readable(ray_offsets):
        return True
    if ray_offsets.numel() <= _FEW:
        offsets = [0, *ray_offsets.tolist(), samples]
        return offsets == sorted(offsets)
    return torch.equal(ray_offsets, ray_offsets.clamp(0, samples).cummax(0).values)


# Up to this many numbers, a comparison in Python takes less time than a few calls of torch.
_FEW = 128


def check_index(name: str, index: Tensor, count: int, what: str) -> None:
    """Raises if an index lies outside 0..count - 1.

    This is not checked on CUDA, because that would synchronise; the kernels clamp indices.
    """
    if index.numel() == 0 or not is_readable(index):
        return
    lowest, highest = (int(x) for x in index.aminmax())
    if lowest < 0 or highest >= count:
        raise ArgumentValueError(f"{name} must lie in 0..{count - 1}, {what}, got {lowest}..{highest}")


def check_at_least_one(name: str, value: Any) -> None:
    """Raises unless ``value`` is an integer of at least 1, of Python or NumPy; a bool is none."""
    if not isinstance(value, int):
        with contextlib.suppress(TypeError):
            value = operator.index(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentValueError(f"{name} must be an int of at least 1, got {shown(value)}")


def check_degree(name: str, degree: object) -> None:
    """Raises unless there are spherical harmonics of the degree."""
    if not isinstance(degree, int) or not 0 <= degree <= constants.MAX_DEGREE:
        raise ArgumentValueError(f"{name} must be an int in 0..{constants.MAX_DEGREE}, got {shown(degree)}")


def is_readable(x: Tensor) -> bool:
    """Tells whether values can be read without waiting for a device."""
    # Tracers use tensor subclasses that have no values, and torch.func has wrappers without any.
    if is_compiling() or type(x) is not Tensor or not x.is_cpu:
        return False
    return not (functorch_active() and is_mapped(x))


def coordinate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of coordinates and of arithmetic for features of the given dtype."""
    return torch.float64 if dtype in _DOUBLE else torch.float32


_DOUBLE = (torch.float64, torch.complex128)
