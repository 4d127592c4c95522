"""A closed mesh of few triangles, on which programs walk and against which they test for collisions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from voxelfield.config import Count
from voxelfield.export.lattice import BOX, Lattice, box_lattice, in_chunks, occupied_layers
from voxelfield.export.mesh import LEVEL_LENGTH, keep_largest_component, upright
from voxelfield.export.mesh_file import Y_UP, mesh_package
from voxelfield.export.registry import ExportFormat, ExportSource, Option
from voxelfield.export.surfaces import half_absorbing_density
from voxelfield.files import write_file
from voxelfield.foundation.checks import check_at_least_one
from voxelfield.models.model import Model
from voxelfield.ops.distances import march_cubes
from voxelfield.progress import tracked
from voxelfield.rendering.cameras import Cameras

_RESOLUTION = 64


@torch.no_grad()
def collision_mesh(
    model: Model, cameras: Cameras | None = None, *, resolution: int = _RESOLUTION, box: int = 1
) -> tuple[Tensor, Tensor]:
    """Returns a closed mesh around everything that is solid, including what nobody can reach.

    A cell is solid if the density at one of the points in it, which are a voxel apart, is so large that two voxels
    absorb half of the light. So are cells that no path through empty cells connects to a camera or to the outside of
    the box. Marching cubes between solid and empty cells give the mesh, whose triangles are merged where it is flat.
    Loose parts are left out as in :meth:`voxelfield.export.mesh.FieldSurface.mesh`.

    Args:
        model: The model.
        cameras: Cameras that stand in empty space; None: only the outside is empty for certain.
        resolution: Cells along the longest edge of the box, at most one for each voxel.
        box: Number of the nested box, see :class:`voxelfield.export.mesh.FieldSurface`.

    Returns:
        (V, 3) vertices, world units, float32, and (F, 3) triangles, int64, counterclockwise as seen from outside; on
        the CPU.

    Raises:
        MissingPackageError: A package of the extra ``mesh`` is not installed.
        ValueError: The resolution is below 1, there is no such box, or nothing is solid.
    """
    # Before anything is computed.
    _, ndimage, simplifying = map(mesh_package, ("skimage.measure", "scipy.ndimage", "fast_simplification"))
    check_at_least_one("resolution", resolution)
    lattice, voxel = box_lattice(model, box)
    along = -(-max(lattice.shape) // resolution)  # points of a cell along each axis
    solid = _solid(model, lattice, half_absorbing_density(LEVEL_LENGTH * voxel), along)
    if not bool(solid.any()):
        raise ValueError("field must have something solid for a collision mesh, got none: it is empty, or a fog")
    empty = F.pad(~solid, (1,) * 6, value=True)  # the outside
    parts = torch.from_numpy(ndimage.label(empty.numpy())[0])
    reached = parts[:1, 0, 0]
    if cameras is not None:
        cells = (cameras.c2w[:, :3, 3].cpu().double() - lattice.low) / (along * lattice.spacing)
        within = ((cells >= 0) & (cells < torch.tensor(solid.shape))).all(dim=1)
        reached = torch.cat((reached, parts[(cells[within].long() + 1).unbind(-1)]))
    reached = reached[reached > 0]
    inside = ~torch.isin(parts, reached)
    steps, faces = keep_largest_component(*march_cubes(inside.float() - 0.5, inside_above=True), 1e-3)
    # In units of cells, nothing is merged that is not flat.
    merged, triangles = simplifying.simplify(steps.double().numpy(), faces.int().numpy(), target_count=1, lossless=True)
    vertices = lattice.positions(along * (torch.from_numpy(merged) - 1) + (along - 1) / 2)
    return vertices, torch.from_numpy(triangles).long()


def _solid(model: Model, lattice: Lattice, level: float, along: int) -> Tensor:
    """Returns which cells (X, Y, Z) of ``along`` points of a lattice have a density above a level, on the CPU."""
    occupied, layers = occupied_layers(model, lattice), []
    for first in tracked(range(0, lattice.shape[0], along), "finding what is solid"):
        dense = occupied(first, min(first + along, lattice.shape[0]))
        flat = dense.view(-1)
        points = lattice.layer_positions(flat.nonzero()[:, 0], first)
        flat[flat.clone()] = in_chunks(lambda part: model.field.density(part) > level, points)
        layers.append(F.max_pool3d(dense[None].float(), along, ceil_mode=True)[0].cpu() > 0)
    return torch.cat(layers)


def _write(path: Path, source: ExportSource, **options: int) -> str:
    vertices, faces = collision_mesh(source.model, source.training_cameras(), **options)
    turn = Y_UP @ source.once(upright).to(Y_UP)
    mesh = mesh_package("trimesh").Trimesh((vertices @ turn.T).numpy(), faces.numpy(), process=False)
    write_file(path, mesh.export(file_type="glb", include_normals=False))
    return f"{len(faces)} triangles"


COLLISION = ExportFormat(
    name="collision",
    help="few triangles around all that is solid, to walk on and to collide with: glb; needs the scene",
    opens="game engines",
    write=_write,
    suffixes=(".glb",),
    options=(Option("resolution", f"cells along the longest edge (default: {_RESOLUTION})", Count, "N"), BOX),
)
