"""The exceptions that refuse arguments, and words for running out of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class ArgumentTypeError(TypeError, RuntimeError):
    """An argument is of the wrong type or dtype. Also a RuntimeError, which torch's own functions raise here."""


class ArgumentValueError(ValueError, RuntimeError):
    """An argument has the wrong value, shape or device. Also a RuntimeError, which torch's own functions raise here."""


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
        raise torch.OutOfMemoryError(f"{sizes} ask for more memory than there is: {error}") from error


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tells whether torch, or a kernel below it, failed for want of memory."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "Storage size calculation overflowed")
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in words)
