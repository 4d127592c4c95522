"""The exceptions that refuse arguments, and words for running out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from voxelfield.messages import clipped


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument is of the wrong type or dtype. Also a RuntimeError, which torch's own functions raise here."""


class ArgumentValueError(ValueError, RuntimeError):
    """An argument has the wrong value, shape or device. Also a RuntimeError, which torch's own functions raise here."""


def shown(value: object) -> str:
    """Returns a value as messages show it: in one line, and not all of it if that is long."""
    try:
        text = " ".join(repr(value).split())
    except ValueError:  # Python prints no number of thousands of digits
        return f"a {type(value).__name__}"
    return clipped(text)


@contextmanager
def explain_memory(**arguments: Tensor) -> Iterator[None]:
    """Names the arguments that ask for more memory than there is.

    Args:
        **arguments: What the size of the results follows from, by name.

    Raises:
        torch.OutOfMemoryError: The code in the ``with`` block ran out of memory.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        sizes = " and ".join(f"{name} of shape {tuple(value.shape)}" for name, value in arguments.items())
        raise torch.OutOfMemoryError(f"{sizes} ask for more memory than there is") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Tells whether Python, torch, or a kernel of this library, failed for want of memory."""
    if not isinstance(error, RuntimeError):
        return isinstance(error, MemoryError)
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in _OUT_OF_MEMORY)


# Below the stable ABI the reason is lost. The calls that allocate are named instead, and fail for no other one.
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
