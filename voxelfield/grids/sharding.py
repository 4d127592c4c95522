"""Grids whose features are divided among processes, and what cannot be done to them."""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import Tensor, nn

from voxelfield.ops._errors import ArgumentValueError


def is_sharded(module: nn.Module, features: Tensor) -> bool:
    """Tells whether a module's features are divided among processes, now or from the next sharding on.

    Between a forward pass and the next sharding ``fully_shard`` lends a module whole parameters, and keeps no change of
    them.
    """
    return _is_divided(features) or (getattr(module, "_is_fsdp_managed_module", False) and _is_lent(features))


def refuse_sharded(module: nn.Module, features: Tensor, operation: str) -> None:
    """Raises if features are sharded, because an operation needs them whole and may give them another shape.

    Args:
        module: Holds the features.
        features: The features.
        operation: Its name, for the message.

    Raises:
        ValueError: They are sharded.
    """
    if is_sharded(module, features):
        raise ArgumentValueError(
            f"features must be whole for {operation}, got those of a grid that fully_shard manages: name them in its "
            "ignored_params, or change the grid before it"
        )


def refuse_other_resolution(module: nn.Module, features: Tensor, saved: Any, key: str) -> None:
    """Raises if saved features have another shape than the features and either of them is sharded.

    Args:
        module: Holds the features.
        features: The features.
        saved: What the state dict has for them.
        key: Its name there.

    Raises:
        ValueError: The shapes differ, and the grid cannot adopt that of the state dict.
    """
    if not isinstance(saved, Tensor) or saved.shape == features.shape:
        return
    if is_sharded(module, features) or _is_divided(saved):
        raise ArgumentValueError(
            f"{key} must have shape {tuple(features.shape)} where fully_shard is in use, got {tuple(saved.shape)}: "
            "load a full state dict before fully_shard, or build the grid at the saved resolution"
        )


def _is_divided(values: Tensor) -> bool:
    # Only a process that has imported this module has such tensors, and the import takes long.
    tensors = sys.modules.get("torch.distributed.tensor")
    return tensors is not None and isinstance(values, tensors.DTensor)


def _is_lent(parameter: Tensor) -> bool:
    # A lent parameter looks like any other, such as one that fully_shard was told to ignore. torch has no function that
    # tells them apart, but the lender's attribute does. It is looked for only in modules that fully_shard manages.
    for holder in gc.get_referrers(parameter):
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        if attributes.get("_unsharded_param") is parameter:
            return True
    return False
