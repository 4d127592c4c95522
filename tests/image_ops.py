"""The ops that render images, called with defaults for arguments that image backends always give."""

from __future__ import annotations

from voxelfield import _library
from voxelfield.ops._internal import fields
from voxelfield.ops.compositing import MIN_TRANSMITTANCE
from voxelfield.ops.render_grid import cells_to_walk
from voxelfield.ops.selection import MIN_WEIGHT

DEFAULTS = {
    **{"across": 1, "lens": None, "clip": None, "blocks": [], "boxes": []},
    **{"min_transmittance": MIN_TRANSMITTANCE, "min_weight": MIN_WEIGHT},
}


def _with_defaults(row):
    def render(c2w, intrinsics, width, height, occupied, aabb_occupancy, **field):
        _library.ensure_loaded(intrinsics.device.type)
        occupied, resolution = cells_to_walk(occupied)
        given = {"c2w": c2w, "intrinsics": intrinsics, "width": width, "height": height, "occupied": occupied}
        given |= {"resolution": resolution, "aabb_occupancy": aabb_occupancy}
        return row.by_name(**{name: x for name, x in DEFAULTS.items() if name in row.arguments} | given | field)

    return render


render_pyramid_image = _with_defaults(fields.render_pyramid_image)
render_grid_image = _with_defaults(fields.render_grid_image)
render_baked_image = _with_defaults(fields.render_baked_image)
