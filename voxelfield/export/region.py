"""The part of space that is exported."""

from __future__ import annotations

from dataclasses import dataclass

from voxelfield.export.geometry.lattice import Lattice
from voxelfield.fields.field import RadianceField
from voxelfield.grids.boxes import Box, box_extent, parse_box


@dataclass(frozen=True)
class Region:
    """A box of a field, and the size of its voxels there.

    Args:
        box: Lower and upper corner, world units.
        voxels: Edges of a voxel along x, y and z, world units.
    """

    box: Box
    voxels: tuple[float, float, float]

    @classmethod
    def of(cls, field: RadianceField, number: int = 1) -> Region:
        """Returns a box of a field, with the voxels of its finest level.

        Args:
            field: The field.
            number: Number of the nested box, 1 being the smallest; other fields have one box.

        Raises:
            ValueError: There is no such box.
        """
        count = 1 if field.warp is None else field.warp.count
        if not 1 <= number <= count:
            raise ValueError(f"box must be 1 to {count}, as many as the field has, got {number}")
        x, y, z = field.grid.voxel_size.tolist()
        if field.warp is None:
            return cls(parse_box(field.aabb), (x, y, z))
        return cls(field.warp.world_box(number), field.warp.voxels_in_world((x, y, z), number))

    @property
    def voxel(self) -> float:
        """The shortest edge of a voxel, world units."""
        return min(self.voxels)

    def lattice(self, resolution: int | None) -> Lattice:
        """Returns points on and between the faces of the box.

        Args:
            resolution: Cells along the box's longest edge; None: about as many as there are voxels along each.
        """
        if resolution is None:
            return Lattice.over(self.box, self.voxels)
        return Lattice.over(self.box, (max(box_extent(self.box)) / resolution,) * 3)
