"""Errors of kernels and of torch's dispatcher, in words for the caller of a function."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from voxelfield.foundation.checks import check_dense, lies_within
from voxelfield.foundation.errors import ArgumentTypeError, ArgumentValueError, is_out_of_memory

# A failed check in C++: the function, the file and line, and the message, which begins with the kind if that is a type.
_CHECK = re.compile(r"[^,]+, .*?\.(?:h|cpp|cuh|cu):\d+, (TypeError: )?(.* must .*)", re.DOTALL)


def explain(error: RuntimeError, arguments: Iterable[tuple[str, str, Any]], tensors: dict[str, Tensor]) -> None:
    """Raises an error of a kernel or of torch's dispatcher again, in words for the caller; returns for other errors.

    Args:
        error: What running an op raised.
        arguments: Name, type in the schema and value of each argument.
        tensors: The tensors among them, those in lists as NAME[i].
    """
    if isinstance(error, (ArgumentTypeError, ArgumentValueError)):
        return
    if is_out_of_memory(error):
        sizes = " and ".join(f"{name} of shape {tuple(x.shape)}" for name, x in tensors.items())
        raise torch.OutOfMemoryError(f"{sizes} need more memory than is available" if sizes else str(error)) from error
    # The dispatcher refuses what is no tensor or has no kernels, but not None, and does not always name the argument.
    for name, kind, x in arguments:
        if kind == "Tensor" or (kind == "Optional[Tensor]" and x is not None):
            check_dense(name, x)
        elif kind == "List[Tensor]":
            for i, each in enumerate(x):
                check_dense(element_name(name, i, len(x)), each)
        elif kind == "float":
            lies_within(name, x, -math.inf, math.inf)
    if match := _CHECK.fullmatch(str(error)):
        raise (ArgumentTypeError if match[1] else ArgumentValueError)(match[2]) from error


def element_name(name: str, i: int, count: int) -> str:
    """Returns the name of a tensor in a list; one alone may be an argument of a public function, as ``grid`` is."""
    return f"{name}[{i}]" if count > 1 else name.removesuffix("s")
