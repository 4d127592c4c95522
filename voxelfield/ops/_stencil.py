"""The interface that grids and cells share, for the derivatives and the batching of the stencil ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from voxelfield.ops._autograd import MaybeTensor

Shapes = tuple[tuple[int, ...], ...]


class Stencil(Protocol):
    """The rule that finds the corners of a point: the options of one call and the raw ops that take them."""

    @property
    def with_gradient(self) -> bool:
        """Whether values and results are stacked with their three derivatives in a leading dimension of 4."""

    shareable: ClassVar[bool]
    """Whether all points of one element of a batch read the same source."""

    def batched(self, point_dims: int) -> bool:
        """Tells whether sources and points have a leading batch dimension, given the points' number of dimensions."""

    def gather(self, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor) -> Tensor:
        """Runs the raw op :math:`S`."""

    def splat(self, values: Tensor, points: Tensor, direction: MaybeTensor, shapes: Shapes) -> tuple[Tensor, ...]:
        """Runs the raw op :math:`S^*` for sources of these shapes."""

    def point_gradient(
        self, values: Tensor, sources: Sequence[Tensor], points: Tensor, direction: MaybeTensor
    ) -> Tensor:
        """Runs the raw op :math:`P`."""

    def select(self, values: Tensor, shapes: Shapes, wanted: Sequence[bool]) -> Tensor:
        """Returns the columns of ``values`` that belong to the wanted sources."""
