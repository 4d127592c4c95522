"""The base class of grids: what rendering and training read of a field's features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

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
        """The tensors from which the active levels are read: working copies, or the levels themselves."""
        return list(self.levels[: self.active])

    def resize(
        self,
        resolution: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        aabb: Sequence[Sequence[float]] | Tensor | None = None,
    ) -> None:
        """Changes the resolution, the cube root of the number of voxels, and crops to a box; here does nothing."""

    def enable_copies(self, dtype: torch.dtype, *, allocate_gradients: bool = True) -> list[Tensor]:
        """Makes copies of the levels in a dtype, which are read in their place, and returns them."""
        return []

    def refresh_copies(self) -> None:
        """Copies the features into the copies of :meth:`enable_copies`, if there are any.

        Needed only after changes that the copies do not notice by themselves; see :class:`WorkingCopies`.
        """
        if self.working_copies is not None:
            self.working_copies.refresh()
