"""The base class of grids: what rendering and training read of a field's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from voxelfield.foundation.autograd import needs_long_path
from voxelfield.grids.resampling import refuse_sharded
from voxelfield.grids.working_copies import WorkingCopies


class Grid(nn.Module):
    """Features in a box, in levels from coarse to fine; the defaults are those of a grid without features.

    Attributes:
        aabb: (2, 3) the box, in world units or in the field's warped coordinates.
        resolution: Number of vertices along x, y and z.
        voxel_size: (3,) distances between neighbouring vertices.
        channels: Number of features at a position.
        active: Number of levels that are read, counted from the coarsest.
        working_copies: The copies that :meth:`enable_copies` has made, or None.
    """

    if TYPE_CHECKING:  # no attributes of the class, which would hide a buffer of the name

        @property
        def aabb(self) -> Tensor:
            """As above."""

        @property
        def resolution(self) -> tuple[int, int, int]:
            """As above."""

        @property
        def voxel_size(self) -> Tensor:
            """As above."""

        @property
        def channels(self) -> int:
            """As above."""

    active: int = 0
    working_copies: WorkingCopies | None = None

    @property
    def levels(self) -> list[nn.Parameter]:
        """The features of each level (X_l, Y_l, Z_l, C_l), coarse to fine."""
        return []

    @property
    def blocks(self) -> list[Tensor | None]:
        """For each level, its block table if it is sparse, otherwise None."""
        return [None] * len(self.levels)

    @property
    def sampled_levels(self) -> list[Tensor]:
        """The tensors that are sampled: the copies of :meth:`enable_copies`, if any, otherwise the active levels."""
        levels, copies = self.levels[: self.active], self.working_copies
        return list(levels) if copies is None or needs_long_path() else list(copies.current(levels))

    @property
    def finest_resolution(self) -> tuple[int, int, int]:
        """Number of vertices along x, y and z of the finest level that is read."""
        return self.resolution

    def finest_voxels(self) -> tuple[Tensor, tuple[int, int, int]]:
        """Returns the distances (3,) between vertices of the finest level that is read, and its cells.

        Returns:
            The distances along x, y and z, float64, in the units of :attr:`aabb`; and how many of them its edges have.
        """
        x, y, z = (max(vertices - 1, 1) for vertices in self.finest_resolution)
        return self.aabb.double().diff(dim=0)[0] / self.aabb.new_tensor((x, y, z), dtype=torch.float64), (x, y, z)

    def resize(
        self,
        mean_resolution: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        aabb: Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Changes the mean resolution, the cube root of the number of voxels, and crops to a box; here does nothing."""

    def enable_copies(self, dtype: torch.dtype, *, allocate_gradients: bool = True) -> list[Tensor]:
        """Makes the active levels read copies and accumulate gradients in place; see :class:`WorkingCopies`.

        Inactive levels get no gradient. A change of the resolution, of the box or of the active levels ends this, and
        so does ``load_state_dict``.

        Args:
            dtype: Dtype of the copies: float16, bfloat16 or float32.
            allocate_gradients: Allocate the gradients now, and not in the first backward pass.

        Returns:
            The copies, one for each active level, for :meth:`voxelfield.grids.adam.GridAdam.set_working`. With another
            optimizer they are rounded anew after every backward pass.

        Raises:
            TypeError: A level is not a float32 parameter, or ``dtype`` is not one of the three.
            ValueError: A level is sharded, or has ``align_corners=False``.
        """
        if not self.levels:
            return []
        for level in self.levels:
            refuse_sharded(level, "enable_copies")
        self.working_copies = self._new_copies(dtype)
        for index, level in enumerate(self.levels):
            level.grad = torch.zeros_like(level) if index < self.active and allocate_gradients else None
        return self.working_copies.copies

    def _new_copies(self, dtype: torch.dtype) -> WorkingCopies:
        """Returns copies of the active levels, which :meth:`enable_copies` has found whole."""
        return WorkingCopies(self.levels[: self.active], dtype)

    def refresh_copies(self) -> None:
        """Copies the features into the copies of :meth:`enable_copies`, if there are any.

        Needed only after changes that the copies do not notice by themselves; see :class:`WorkingCopies`.
        """
        if self.working_copies is not None:
            self.working_copies.refresh()
