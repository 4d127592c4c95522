"""Folding the dimension that ``torch.vmap`` maps over into dimensions that the stencil ops have already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from voxelfield.ops._derivatives import MaybeTensor, Stencil


class Folding:
    """Turns the inputs of ``size`` mapped calls into those of a single one, and its result back.

    Sources that are the same in all calls are not repeated if points can share them: the calls' points are then more
    points of the same source. Otherwise the calls become elements of the batch.

    Args:
        stencil: Of the mapped calls.
        size: Length of the dimension that is mapped over.
        source_dims: Where each source has that dimension, None where it has not; None if the op has no sources.

    Attributes:
        stencil: Of the single call.
    """

    def __init__(self, stencil: Stencil, size: int, source_dims: Sequence[int | None] | None = None) -> None:
        self._size = size
        self._shared = source_dims is not None and stencil.shareable and all(dim is None for dim in source_dims)
        self._axis = int(self._shared and stencil.batched)
        self._merges = self._shared or stencil.batched
        self._lead = int(stencil.with_gradient)
        self.stencil = stencil if self._merges else stencil.as_batch()

    def points(self, x: MaybeTensor, dim: int | None) -> MaybeTensor:
        """Folds points, or directions."""
        return None if x is None else self._fold(x, dim, self._axis)

    def values(self, x: Tensor, dim: int | None) -> Tensor:
        """Folds values."""
        return self._fold(x, dim, self._axis + self._lead)

    def sources(self, sources: Sequence[Tensor], dims: Sequence[int | None]) -> Sequence[Tensor]:
        """Folds sources."""
        return sources if self._shared else [self._fold(x, dim, 0) for x, dim in zip(sources, dims, strict=True)]

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns what becomes of a source of some shape."""
        return (self._size * shape[0], *shape[1:]) if self._merges else (self._size, *shape)

    def unfold_points(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result like points with the mapped dimension, and where it is."""
        return self.unfold(x, self._axis), self._axis

    def unfold_values(self, x: Tensor) -> tuple[Tensor, int]:
        """Returns a result like values with the mapped dimension, and where it is."""
        return self.unfold(x, self._axis + self._lead), self._axis + self._lead

    def unfold(self, x: Tensor, axis: int = 0) -> Tensor:
        """Returns a result with the mapped dimension at an axis."""
        return x.unflatten(axis, (self._size, x.shape[axis] // self._size)) if self._merges else x

    def _fold(self, x: Tensor, dim: int | None, axis: int) -> Tensor:
        if dim is None:
            x = x.unsqueeze(axis).expand(*x.shape[:axis], self._size, *x.shape[axis:])
        else:
            x = x.movedim(dim, axis)
        return x.flatten(axis, axis + 1) if self._merges else x
