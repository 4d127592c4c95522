"""Marching cubes, slab by slab, so that memory is bounded by a slab and not by the lattice."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from voxelfield.export.geometry.lattice import Lattice
from voxelfield.export.geometry.occupied import unravelled
from voxelfield.export.geometry.packages import mesh_package
from voxelfield.export.geometry.surface import Surface

SLAB = 16
"""Layers of cells that are extracted at once."""

CHUNK = 1 << 20
"""Points that are evaluated at once."""

# A surface through a vertex of the lattice would make triangles without area, and vertices whose edge is not certain.
_CLOSEST = 1e-2
_BISECTIONS = 8


@torch.no_grad()
def extract_surface(
    surface: Surface, lattice: Lattice, *, slab: int = SLAB, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Finds the triangles of a surface by marching cubes (Lewiner et al. 2003, by scikit-image).

    Marching cubes tells which edges of the lattice the surface crosses; where, bisection finds out by evaluating the
    surface's function along them. So vertices lie on the surface to 1/256 of an edge, however steep the function is.

    Args:
        surface: The surface; its function is evaluated at the vertices that it names, on their device.
        lattice: Points whose cells are searched.
        slab: Layers of cells at once.
        chunk: Evaluations at once.

    Returns:
        (V, 3) vertices, world units, float32, and (F, 3) triangles, int64, counterclockwise as seen from outside; on
        the CPU. The same for any ``slab``, but for the order.

    Raises:
        MissingPackageError: scikit-image is not installed.
    """
    reached = surface.vertices(lattice, chunk)
    parts = _Parts(lattice)
    last: Tensor | None = None
    for first in range(0, lattice.shape[0] - 1, slab):
        stop = min(first + slab, lattice.shape[0] - 1)
        layers = _evaluate(surface, lattice, reached.layers(first + (last is not None), stop + 1), stop + 1, chunk)
        values = layers if last is None else torch.cat((last, layers))
        last = values[-1:]
        places, triangles = _march(values.cpu())
        parts.add(_refined(surface, lattice, places, values, first, chunk), places, triangles, values.shape[0] - 1)
    return parts.joined()


def _evaluate(surface: Surface, lattice: Lattice, reached: Tensor, stop: int, chunk: int) -> Tensor:
    """Returns the values (n, Y, Z) of the layers before ``stop``, evaluated where they are reached."""
    values = torch.full(reached.shape, surface.elsewhere, device=reached.device)
    flat, first = values.view(-1), stop - reached.shape[0]
    for part in reached.view(-1).nonzero()[:, 0].split(chunk):
        flat[part] = surface(lattice.positions(unravelled(part, first, lattice)))
    return torch.where(values.abs() < _CLOSEST, torch.where(values < 0, -_CLOSEST, _CLOSEST), values)


def _march(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the vertices (V, 3), in steps from the first value, and triangles (F, 3) where values change their sign.

    Cubes with a corner that is NaN are left out.
    """
    none = torch.zeros(0, 3), torch.zeros(0, 3, dtype=torch.int64)
    if not (bool((values > 0).any()) and bool((values < 0).any())):
        return none
    known = values.isfinite()
    mask = None
    if not bool(known.all()):
        whole = known[:-1] & known[1:]
        whole = whole[:, :-1] & whole[:, 1:]
        whole = whole[:, :, :-1] & whole[:, :, 1:]
        # scikit-image asks of each cube the corner farthest from the origin.
        mask = torch.zeros_like(known)
        mask[1:, 1:, 1:] = whole
    try:
        found = mesh_package("skimage.measure").marching_cubes(
            values.nan_to_num(-1.0).numpy(),
            0.0,
            gradient_direction="ascent",
            mask=None if mask is None else mask.numpy(),
        )
    except RuntimeError:  # all cubes with a change of sign have a corner that is not known
        return none
    places, triangles = found[0], found[1]
    return torch.from_numpy(np.ascontiguousarray(places)), torch.from_numpy(np.ascontiguousarray(triangles)).long()


def _refined(surface: Surface, lattice: Lattice, places: Tensor, values: Tensor, first: int, chunk: int) -> Tensor:
    """Moves vertices along their edges to where the function changes its sign.

    Args:
        surface: The function.
        lattice: Whose edges these are.
        places: (V, 3) vertices, in steps from the first of the values.
        values: (n, Y, Z) the function at the points of the slab.
        first: The slab's first layer.
        chunk: Evaluations at once.

    Returns:
        (V, 3) world positions, on the CPU. Vertices within a cube, of which there are few, stay where they are.
    """
    device = values.device
    shift = torch.tensor([first, 0, 0], device=device)
    moved = []
    for part in places.to(device).split(chunk):
        low = part.floor().long()
        fraction = part - low
        on_edge = (fraction > 0).sum(dim=-1) == 1
        x, y, z = low.unbind(-1)
        inside = values[x, y, z] > 0
        begin, end = torch.zeros_like(fraction[:, 0]), torch.ones_like(fraction[:, 0])
        along = (fraction > 0).float()
        for _ in range(_BISECTIONS):
            middle = (begin + end) / 2
            same = (surface(lattice.positions(low + shift + along * middle[:, None])) > 0) == inside
            begin, end = torch.where(same, middle, begin), torch.where(same, end, middle)
        place = torch.where(on_edge[:, None], low + along * ((begin + end) / 2)[:, None], part)
        moved.append(lattice.positions(place.double() + shift).cpu())
    return torch.cat(moved) if moved else torch.zeros(0, 3)


class _Parts:
    """The vertices and triangles found so far, of slabs in their order.

    Args:
        lattice: The lattice in which they were found.
    """

    def __init__(self, lattice: Lattice) -> None:
        self._depth = lattice.shape[2]
        self._vertices: list[Tensor] = []
        self._triangles: list[Tensor] = []
        self._count = 0
        # The edges of the last layer that have vertices, sorted, and the numbers of these.
        self._seam = torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)

    def add(self, vertices: Tensor, places: Tensor, triangles: Tensor, layers: int) -> None:
        """Appends a slab; the vertices of its first layer are those of the last layer of the one before.

        Args:
            vertices: (V, 3) world positions.
            places: (V, 3) the same in steps from the slab's first point.
            triangles: (F, 3) their numbers in ``vertices``.
            layers: Number of the slab's layers of cells.
        """
        index = torch.full((len(vertices),), -1, dtype=torch.int64)
        edges, known = self._seam
        if len(edges):
            shared = (places[:, 0] == 0).nonzero()[:, 0]
            wanted = self._edges(places[shared])
            at = torch.searchsorted(edges, wanted).clamp(max=len(edges) - 1)
            found = edges[at] == wanted
            index[shared[found]] = known[at[found]]
        new = index < 0
        index[new] = torch.arange(int(new.sum())) + self._count
        self._count += int(new.sum())
        self._vertices.append(vertices[new])
        self._triangles.append(index[triangles])
        last = places[:, 0] == layers
        edges, order = self._edges(places[last]).sort()
        self._seam = edges, index[last][order]

    def joined(self) -> tuple[Tensor, Tensor]:
        """Returns the vertices (V, 3) and triangles (F, 3) of all slabs."""
        return torch.cat(self._vertices), torch.cat(self._triangles)

    def _edges(self, places: Tensor) -> Tensor:
        """Returns a number (S,) for the edge, within a layer, that each vertex (S, 3) lies on."""
        _, y, z = places.long().unbind(-1)
        return (y * self._depth + z) * 2 + (places[:, 2] > z).long()
