"""Checks for grids whose features are sharded across processes."""

from __future__ import annotations

import gc
from typing import Any

from torch import Tensor, nn

from voxelfield.ops._checks import is_divided
from voxelfield.ops._errors import ArgumentValueError


def is_sharded(module: nn.Module, features: Tensor) -> bool:
    """Returns whether a module's features are sharded across processes, now or from the next resharding on.

    Between a forward pass and the next resharding, ``fully_shard`` replaces a module's parameters by unsharded ones;
    changes to those are lost.
    """
    return is_divided(features) or (getattr(module, "_is_fsdp_managed_module", False) and _is_lent(features))


def refuse_sharded(module: nn.Module, features: Tensor, operation: str) -> None:
    """Raises if features are sharded, because an operation needs all of them and may change their shape.

    Args:
        module: The module that holds the features.
        features: The features.
        operation: Name of the operation, for the message.

    Raises:
        ValueError: The features are sharded.
    """
    if is_sharded(module, features):
        raise ArgumentValueError(
            f"features must be whole for {operation}, got those of a grid that fully_shard manages: name them in its "
            "ignored_params, or change the grid before it"
        )


def refuse_other_resolution(module: nn.Module, features: Tensor, saved: Any, key: str) -> None:
    """Raises if saved features have another shape than the features and either of them is sharded.

    Args:
        module: The module that holds the features.
        features: The features.
        saved: The entry for the features in the state dict, if any.
        key: Its key in the state dict.

    Raises:
        ValueError: The shapes differ and the grid cannot adopt the saved one.
    """
    if not isinstance(saved, Tensor) or saved.shape == features.shape:
        return
    if is_sharded(module, features) or is_divided(saved):
        raise ArgumentValueError(
            f"{key} must have shape {tuple(features.shape)} where fully_shard is in use, got {tuple(saved.shape)}: "
            "load a full state dict before fully_shard, or build the grid at the saved resolution"
        )


def _is_lent(parameter: Tensor) -> bool:
    # An unsharded parameter looks like any other parameter, for example one in fully_shard's ignored_params. torch has
    # no function to tell them apart, so look for the attribute by which FSDP refers to it. This search is done only for
    # modules that fully_shard manages.
    for holder in gc.get_referrers(parameter):
        attributes = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
        if attributes.get("_unsharded_param") is parameter:
            return True
    return False
