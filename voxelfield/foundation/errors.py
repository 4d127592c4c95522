"""Exceptions for invalid arguments, and error messages for running out of memory."""

from __future__ import annotations

import torch

from voxelfield.messages import clipped


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument has the wrong type or dtype. Also a RuntimeError, which torch's own functions raise in this case."""


class ArgumentValueError(ValueError, RuntimeError):
    """An argument has the wrong value, shape or device. Also a RuntimeError, as raised by torch's own functions."""


def shown(value: object) -> str:
    """Formats a value for an error message: on one line, and truncated if it is long."""
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # integers of thousands of digits, lists in lists
        return f"a {type(value).__name__}"
    return clipped(text)


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether Python, torch or a kernel of this library ran out of memory."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


# Errors that cross the stable ABI lose their reason and name only the failing call. The calls listed here allocate, and
# fail for no other reason.
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "Storage size calculation overflowed",
    "aoti_torch_empty_strided",
    "aten::clone",
    "aten::contiguous",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_zeros",
    "aten::to",
    "std::bad_alloc",
)
