"""Combines the features of a pyramid's dense levels at a sample: concatenated, or added up."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from voxelfield import ops
from voxelfield.foundation.errors import ArgumentTypeError
from voxelfield.ops._grids import Padding, known_stencil
from voxelfield.ops._internal.accumulate import accumulate_trilinear_
from voxelfield.ops.pyramid import Reduction

_ALL = [slice(None)]


@dataclass(frozen=True)
class Combination:
    """How the features of several levels are combined at a sample.

    Attributes:
        reduce: ``"concat"`` or ``"sum"``, as for :func:`voxelfield.ops.sample_pyramid`.
        channels: For each level of a sum, the rising numbers of the features to which it adds, or None if it has all of
            them, as the first level must. Empty if all levels have all.
    """

    reduce: Reduction = "concat"
    channels: tuple[tuple[int, ...] | None, ...] = ()

    def sample(self, levels: Sequence[Tensor], points: Tensor, padding: Padding) -> Tensor:
        """Samples the first of the levels, or all of them.

        Args:
            levels: (X_l, Y_l, Z_l, C_l) features, coarse to fine.
            points: (N, 3) in the unit cube.
            padding: As for :func:`voxelfield.ops.sample_pyramid`.

        Returns:
            (N, sum of C_l), or (N, C) for a sum.

        Raises:
            TypeError: Levels have different dtypes; otherwise as :func:`voxelfield.ops.sample_pyramid`.
        """
        (first, _), *others = self._groups(len(levels))
        sampled = ops.sample_pyramid(levels[first], points, reduce=self.reduce, padding=padding)
        for part, columns in others:
            dtype = levels[part][0].dtype
            if dtype != sampled.dtype:
                raise ArgumentTypeError(f"levels must be of one dtype, got {sampled.dtype} and {dtype}")
            values = ops.sample_pyramid(levels[part], points, reduce="sum", padding=padding)
            widths = [sampled[:, column].shape[1] for column in columns]
            for column, more in zip(columns, values.split(widths, dim=1), strict=True):
                # Not in place: a frozen coarse level, or one that torch.func does not transform, could not be written.
                total = sampled[:, column] + more
                sampled = torch.slice_scatter(sampled, total, 1, column.start, column.stop, column.step or 1)
        return sampled

    def accumulate(
        self,
        sums: Sequence[Tensor],
        values: Tensor,
        points: Tensor,
        padding: Padding,
        slabs: Sequence[tuple[int, int]] | None,
    ) -> None:
        """Adds the gradients ``values`` of :meth:`sample` to tensors like the levels, or slabs of these.

        ``values`` may have more columns, which are not read. See
        :func:`voxelfield.ops._internal.accumulate.accumulate_trilinear_`.
        """
        for part, columns in self._groups(len(sums)):
            some = slabs and slabs[part]
            taken = _taken(values, columns)
            accumulate_trilinear_(sums[part], taken, points, reduce=self.reduce, padding=padding, slabs=some)

    def point_gradient(self, levels: Sequence[Tensor], values: Tensor, points: Tensor, padding: Padding) -> Tensor:
        """Returns the gradient of the points (N, 3), given the gradient of :meth:`sample`."""
        stencil = known_stencil(padding, True, "linear", self.reduce == "sum", False)
        gradients = [
            stencil.point_gradient(_taken(values, columns), levels[part], points, None)
            for part, columns in self._groups(len(levels))
        ]
        return sum(gradients[1:], start=gradients[0])

    def _groups(self, levels: int) -> Iterator[tuple[slice, list[slice]]]:
        """Yields consecutive levels with the same channels, and the columns of a sample for these channels."""
        begin = 0
        for channels, same in groupby(self.channels[:levels] or (None,) * levels):
            end = begin + len(list(same))
            yield slice(begin, end), _ALL if channels is None else _progressions(channels)
            begin = end


def _progressions(numbers: Sequence[int]) -> list[slice]:
    """Returns rising numbers as arithmetic progressions, whose columns can be read without an index tensor.

    An index would have to be copied to the device, which a captured CUDA graph does not allow.
    """
    found: list[slice] = []
    start = 0
    while start < len(numbers):
        end, step = start + 1, 1
        if end < len(numbers):
            step = numbers[end] - numbers[start]
        while end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        found.append(slice(numbers[start], numbers[end - 1] + 1, step))
        start = end
    return found


def _taken(values: Tensor, columns: list[slice]) -> Tensor:
    return values if columns is _ALL else torch.cat([values[:, column] for column in columns], dim=1)
