"""Marching cubes, slab by slab, so that memory is bounded by a slab and not by the lattice."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from voxelfield.export.lattice import CHUNK, SLAB, Lattice, OccupiedVertices, in_chunks
from voxelfield.export.mesh_file import mesh_package
from voxelfield.export.surfaces import Surface

# A surface through a vertex of the lattice would make triangles without area, and vertices on no definite edge.
_CLOSEST = 1e-2
_BISECTIONS = 8


@torch.no_grad()
def extract_surface(surface: Surface, lattice: Lattice) -> tuple[Tensor, Tensor]:
    """Finds the triangles of a surface by marching cubes (Lewiner et al. 2003, by scikit-image).

    Marching cubes finds the edges of the lattice that the surface crosses; bisection of the surface's function along
    them finds the positions. So vertices lie on the surface to 1/256 of an edge, however steep the function is.

    Args:
        surface: The surface; its function is evaluated at the vertices that it names, on their device.
        lattice: Points whose cells are searched.

    Returns:
        (V, 3) vertices, world units, float32, and (F, 3) triangles, int64, counterclockwise as seen from outside; on
        the CPU.

    Raises:
        MissingPackageError: scikit-image is not installed.
    """
    reached = surface.vertices(lattice)
    bounds = [0, *range(SLAB + 1, lattice.shape[0], SLAB), lattice.shape[0]]
    edges, triangles, vertices = [], [], []
    last, count = torch.zeros(0, *lattice.shape[1:]), 0
    for layers in pairwise(bounds):
        first, values = layers[0] - len(last), torch.cat((last, _evaluate(surface, lattice, reached, layers)))
        last = values[-1:]
        steps, faces = _march(values)
        edges.append(_edges(steps, lattice, first))
        triangles.append(faces + count)
        count += len(steps)
        positive = values[steps.long().unbind(-1)] > 0
        vertices.append(_refined(surface, lattice, first, steps, positive))
    # Neighbouring slabs have the vertices on the layer between them in common.
    unique, index = torch.cat(edges).unique(return_inverse=True)
    merged = torch.zeros(len(unique), 3)
    merged[index] = torch.cat(vertices)
    return merged, index[torch.cat(triangles)]


@torch.no_grad()
def _evaluate(surface: Surface, lattice: Lattice, vertices: OccupiedVertices, layers: tuple[int, int]) -> Tensor:
    """Returns the values (n, Y, Z), on the CPU, of the layers from one on up to another, where these are reached."""
    reached = vertices.layers(*layers)
    values = torch.full(reached.shape, surface.elsewhere, device=reached.device)
    flat = values.view(-1)
    for part in reached.view(-1).nonzero()[:, 0].split(CHUNK):
        flat[part] = surface(lattice.layer_positions(part, layers[0]))
    return torch.where(values.abs() < _CLOSEST, torch.where(values < 0, -_CLOSEST, _CLOSEST), values).cpu()


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
        # scikit-image reads the mask at each cube's corner farthest from the origin.
        whole = known[:-1] & known[1:]
        whole = whole[:, :-1] & whole[:, 1:]
        mask = np.zeros(values.shape, dtype=bool)
        mask[1:, 1:, 1:] = (whole[:, :, :-1] & whole[:, :, 1:]).numpy()
    try:
        found = mesh_package("skimage.measure").marching_cubes(
            values.nan_to_num(-1.0).numpy(), 0.0, gradient_direction="ascent", mask=mask
        )
    except RuntimeError:  # every cube with a change of sign has an unknown corner
        return none
    steps, faces = (torch.from_numpy(np.ascontiguousarray(array)) for array in found[:2])
    return steps, faces.long()


def _edges(steps: Tensor, lattice: Lattice, first: int) -> Tensor:
    """Returns a number (V,) for the edge of the lattice that each vertex lies on, or for its cube if it is inside."""
    x, y, z = steps.long().unbind(-1)
    fraction = steps - steps.floor() > 0
    axis = torch.where(fraction.sum(dim=-1) == 1, fraction.byte().argmax(dim=-1), 3)
    return (((x + first) * lattice.shape[1] + y) * lattice.shape[2] + z) * 4 + axis


@torch.no_grad()
def _refined(surface: Surface, lattice: Lattice, first: int, steps: Tensor, positive: Tensor) -> Tensor:
    """Moves vertices along their edges to where the function changes its sign; returns world positions on the CPU.

    ``first`` is the first layer of a slab, ``steps`` are its vertices (V, 3), in steps from the first point of that
    layer, and ``positive`` says whether the function is above 0 at the lower ends of their edges (V,). Vertices within
    a cube, of which there are few, stay in place.
    """
    device = surface.device
    shift = torch.tensor([first, 0, 0], device=device)

    def refine(part: Tensor, inside: Tensor) -> Tensor:
        low = part.floor().long()
        along = (part - low > 0).float()
        begin, end = torch.zeros_like(along[:, 0]), torch.ones_like(along[:, 0])
        for _ in range(_BISECTIONS):
            middle = (begin + end) / 2
            same = (surface(lattice.positions(low + shift + along * middle[:, None])) > 0) == inside
            begin, end = torch.where(same, middle, begin), torch.where(same, end, middle)
        on_edge = along.sum(dim=-1, keepdim=True) == 1
        found = torch.where(on_edge, low + along * ((begin + end) / 2)[:, None], part)
        return lattice.positions(found.double() + shift).cpu()

    return in_chunks(refine, steps.to(device), positive.to(device))
