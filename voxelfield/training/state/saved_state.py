"""Checks of the saved state of a module before the module adopts it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from voxelfield.grids.boxes import check_box

# Grids are saved in the dtype in which they were read, and converted when they are loaded.
_DTYPES_OF_GRIDS = (torch.float32, torch.float16, torch.bfloat16)


def check_state(name: str, module: nn.Module, state: Mapping[str, Any], grids: Collection[Tensor] = ()) -> None:
    """Rejects a state with tensors of dtypes or contents that no module of this kind can have saved.

    Names and shapes are left to ``load_state_dict``, which does not check dtypes where it assigns tensors.

    Args:
        name: Name of the module, for messages.
        module: A module of the same kind, on any device.
        state: The state to adopt.
        grids: Parameters of the module that may have any floating-point dtype of grids.

    Raises:
        ValueError: A tensor has another dtype than in the module, a truth value is none, or a box is not a box.
    """
    converted = {id(grid) for grid in grids}
    for key, own in module.state_dict(keep_vars=True).items():
        saved = state.get(key)
        if not isinstance(own, Tensor) or not isinstance(saved, Tensor):
            continue
        allowed = _DTYPES_OF_GRIDS if id(own) in converted else (own.dtype,)
        if saved.dtype not in allowed:
            raise ValueError(f"{name}.{key} must be {' or '.join(map(str, allowed))}, got {saved.dtype}")
        # A file can hold any byte where torch writes 0 or 1, and compiled code relies on these.
        if saved.dtype == torch.bool and saved.numel() > 0 and int(saved.contiguous().view(torch.uint8).max()) > 1:
            raise ValueError(f"{name}.{key} must hold truth values, got other bytes than 0 and 1")
        if key.rpartition(".")[2] == "aabb":
            check_box(f"{name}.{key}", saved)
