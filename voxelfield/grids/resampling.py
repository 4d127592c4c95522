"""Resampling of grids and of the matching optimizer state."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from voxelfield import ops, processes
from voxelfield.foundation.checks import coordinate_dtype, is_divided
from voxelfield.foundation.errors import ArgumentValueError
from voxelfield.ops._grids import Padding

# All wrappers that exist, because a parameter does not know which of them reduce its gradient.
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()


def _remember_wrapper(module: nn.Module, name: str, submodule: nn.Module) -> None:
    if isinstance(module, DistributedDataParallel):
        _wrappers.add(module)


# Torch calls it when a module gets a submodule, which a wrapper does when it is made.
register_module_module_registration_hook(_remember_wrapper)


def vertex_axes(corners: Tensor, resolution: Sequence[int], align_corners: bool) -> list[Tensor]:
    """Returns the coordinates along x, y and z of the vertices that fill a box with these corners (2, 3)."""
    axes = []
    for low, high, size in zip(*corners, resolution, strict=True):
        index = torch.arange(size, device=corners.device, dtype=corners.dtype)
        if not align_corners:
            fractions = (index + 0.5) / size
        else:
            fractions = index / (size - 1) if size > 1 else torch.full_like(index, 0.5)
        axes.append(torch.lerp(low, high, fractions))
    return axes


def sample_vertices(
    values: Tensor, corners: Tensor, resolution: Sequence[int], padding: Padding = "border", align_corners: bool = True
) -> Tensor:
    """Samples (X, Y, Z, C) trilinearly at the vertices that fill a box given by its corners (2, 3) in the unit cube.

    A grid of one or two axes is sampled linearly in the same way.

    No temporary tensor has more than ``SLAB_ELEMENTS`` elements, unless the vertices at one x need more.
    """
    corners = corners.to(coordinate_dtype(values.dtype))
    result = values.new_empty((*resolution, values.shape[-1]))
    x, *others = vertex_axes(corners, resolution, align_corners)
    at_once = max(1, processes.SLAB_ELEMENTS // (math.prod(map(len, others)) * max(values.shape[-1], 3)))
    for some, slab in zip(x.split(at_once), result.split(at_once), strict=True):
        points = torch.stack(torch.meshgrid(some, *others, indexing="ij"), dim=-1)
        slab.copy_(ops.sample_trilinear(values, points, padding=padding, align_corners=align_corners))
    return result


def refuse_computed(features: Tensor, operation: str) -> None:
    """Raises if torch computes features from other parameters, which would keep their shape, or if they are sharded."""
    if not isinstance(features, nn.Parameter):
        raise ArgumentValueError(
            f"features must be a parameter for {operation}, got values that are computed: remove their parametrization"
        )
    refuse_sharded(features, operation)


def refuse_sharded(features: Tensor, operation: str) -> None:
    """Raises if features are divided among processes, now or from the next resharding on.

    Between a forward pass and that, ``fully_shard`` replaces parameters by whole ones, and changes to those are lost.
    """
    if is_divided(features) or _is_lent(features):
        raise ArgumentValueError(
            f"features must be whole for {operation}, got those of a grid that fully_shard manages: use "
            "DistributedDataParallel, or name them in its ignored_params and all-reduce their gradient"
        )


def _is_lent(features: Tensor) -> bool:
    # A parameter that fully_shard has made whole looks like any other, for example one of its ignored_params, and torch
    # has no function to tell them apart. FSDP refers to it by this attribute.
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    referrers = (getattr(holder, "__dict__", holder) for holder in gc.get_referrers(features))
    return any(isinstance(names, dict) and names.get("_unsharded_param") is features for names in referrers)


def replace_values(parameter: nn.Parameter, values: Tensor) -> None:
    """Replaces a parameter's values by a tensor of any shape, without replacing the Parameter object; drops its grad.

    A ``DistributedDataParallel`` that reduces its gradient refuses to be called from then on.
    """
    parameter.grad = None
    # As long as the graph of an earlier step is referenced, for example by a loss stored for logging, autograd
    # reuses the Parameter's gradient accumulator, which still has the old shape, and the next backward pass
    # would fail. Autograd discards the accumulator when the dtype changes, so the dtype is changed for a moment.
    other = torch.float32 if values.dtype != torch.float32 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=values.device)
    parameter.data = values
    if processes.count() > 1:
        # With the accumulator, DistributedDataParallel has lost its hook: it might never notice that processes differ.
        for wrapper in _wrappers:
            if any(own is parameter for own in wrapper.parameters()):
                wrapper.register_forward_pre_hook(_refuse_outdated)


def _refuse_outdated(*_: Any) -> None:
    raise RuntimeError(
        "DistributedDataParallel must be a new one after features are resized (upsample, refit, allocate, "
        "load_state_dict), got one that would no longer reduce their gradient: wrap the model again"
    )


def migratable_state(parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], list[str]]:
    """Returns the optimizer's state for a parameter, and the keys of the entries that have the parameter's shape."""
    if not any(trained is parameter for group in optimizer.param_groups for trained in group["params"]):
        raise ArgumentValueError(
            "optimizer must have this grid's features in one of its parameter groups, but does not"
        )
    if parameter not in optimizer.state:
        return {}, []
    state = optimizer.state[parameter]
    shaped = []
    for key, value in state.items():
        follows = isinstance(value, Tensor) and value.shape == parameter.shape
        if not isinstance(value, Tensor) or (value.numel() == 1 and not follows):
            continue
        if not follows or not value.is_floating_point():
            raise ArgumentValueError(
                f"optimizer: {type(optimizer).__name__} stores {key!r} as {value.dtype} of shape "
                f"{tuple(value.shape)}, which cannot follow features of shape {tuple(parameter.shape)}. "
                "To restart this grid's optimization, drop it first with `del optimizer.state[grid.features]`"
            )
        shaped.append(key)
    return state, shaped
