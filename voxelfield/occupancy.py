"""Which cells of space hold matter, so that rays need not be sampled in the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class OccupancyGrid(nn.Module):
    """A box of cells, each occupied or empty; all are occupied at first.

    Args:
        resolution: Number of cells along x, y, z, or one int for all three.
        aabb: (2, 3) lower and upper corner, world units.

    Attributes:
        occupied: Buffer (X, Y, Z) bool.
        possible: Buffer (X, Y, Z) bool, the cells that may be occupied at all; see :meth:`confine`.
        aabb: Buffer (2, 3) float32.

    Raises:
        ValueError: A number of cells is below 1, or ``aabb`` is not a box.
    """

    occupied: Tensor
    possible: Tensor
    aabb: Tensor

    def __init__(self, resolution: int | Sequence[int], aabb: Tensor | Sequence[Sequence[float]]) -> None:
        super().__init__()
        shape = (resolution,) * 3 if isinstance(resolution, int) else tuple(resolution)
        if len(shape) != 3 or min(shape) < 1:
            raise ValueError(f"resolution must be one or three numbers of cells, each at least 1, got {resolution}")
        box = torch.as_tensor(aabb, dtype=torch.float32).clone()
        if box.shape != (2, 3) or not bool((box[0] < box[1]).all()):
            raise ValueError(f"aabb must be (2, 3) with lower < upper on each axis, got {box.tolist()}")
        self.register_buffer("occupied", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("possible", torch.ones(shape, dtype=torch.bool))
        self.register_buffer("aabb", box)

    @torch.no_grad()
    def confine(self, possible: Tensor, aabb: Tensor) -> None:
        """Rules out cells for good, and starts afresh: every cell left counts as occupied until the next update.

        Args:
            possible: (X, Y, Z) bool of this grid's resolution, such as a visual hull.
            aabb: (2, 3) the box of these cells, world units; becomes this grid's box.

        Raises:
            ValueError: ``possible`` has another shape or dtype.
        """
        if possible.shape != self.occupied.shape or possible.dtype != torch.bool:
            raise ValueError(
                f"possible must be bool of shape {tuple(self.occupied.shape)}, got {possible.dtype} "
                f"{tuple(possible.shape)}"
            )
        self.possible = possible.clone()
        self.occupied = possible.clone()
        self.aabb = aabb.clone()

    @torch.no_grad()
    def update(self, density: Tensor, aabb: Tensor, step: float, threshold: float) -> None:
        """Marks the cells in which a sample could reach an opacity, judged by a field's values at its vertices.

        A trilinear field has its extremes at vertices, so a cell is empty only if all vertices of all field cells that
        it overlaps stay below the threshold: no single sample of that opacity is lost.

        Args:
            density: (X, Y, Z) densities at the vertices of a dense grid over ``aabb``, per world unit.
            aabb: (2, 3) the field's box; the box of :meth:`confine`, if that was called.
            step: Distance between samples, world units.
            threshold: Opacity :math:`1 - e^{-density * step}` of one sample, above which a cell counts as occupied.

        Raises:
            ValueError: ``density`` has another shape, or ``threshold`` is outside (0, 1).
        """
        if density.dim() != 3:
            raise ValueError(f"density must have shape (X, Y, Z), got {tuple(density.shape)}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must lie in (0, 1), got {threshold}")
        # Largest value over each field cell, then over the field cells that each cell of this grid overlaps.
        kernel = [min(2, size) for size in density.shape]
        cells = F.max_pool3d(density[None, None], kernel, stride=1)
        highest = F.adaptive_max_pool3d(cells, tuple(self.occupied.shape))[0, 0]
        self.occupied = (-torch.expm1(-highest * step) > threshold) & self.possible
        self.aabb = aabb.clone()

    def fraction(self) -> float:
        """Returns the share of occupied cells; synchronises with the device."""
        return float(self.occupied.float().mean())

    def bounds(self) -> Tensor:
        """Returns the box (2, 3) of the occupied cells, world units.

        Raises:
            RuntimeError: No cell is occupied.
        """
        if not bool(self.occupied.any()):
            raise RuntimeError("no cell is occupied: the field is empty everywhere")
        low, high = torch.zeros(3), torch.zeros(3)
        for axis, size in enumerate(self.occupied.shape):
            others = [a for a in range(3) if a != axis]
            filled = self.occupied.any(dim=others[1]).any(dim=others[0]).nonzero()[:, 0].cpu()
            low[axis], high[axis] = filled[0] / size, (filled[-1] + 1) / size
        lower, upper = self.aabb.cpu()
        return torch.stack((lower + low * (upper - lower), lower + high * (upper - lower)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OccupancyGrid:
        geometry = self.aabb
        super()._apply(fn, recurse)
        self.aabb = geometry.to(self.aabb.device)  # .half() must not blur geometry
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "occupied")
        if isinstance(saved, Tensor) and saved.dim() == 3 and saved.shape != self.occupied.shape:
            self.occupied = torch.ones_like(saved, device=self.occupied.device)
            self.possible = torch.ones_like(self.occupied)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def extra_repr(self) -> str:
        """Shows the geometry in ``print(module)``."""
        return f"resolution={tuple(self.occupied.shape)}"
