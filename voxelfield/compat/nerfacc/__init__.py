"""The interface of nerfacc 0.5.3 (Li et al. 2023) on voxelfield's kernels, on CUDA and on the CPU.

A program changes its import and nothing else::

    import voxelfield.compat.nerfacc as nerfacc

Submodules have nerfacc's names too, such as ``voxelfield.compat.nerfacc.volrend``. Values are nerfacc's within float32
rounding; docs/nerfacc.md lists the differences.
"""

from __future__ import annotations

from voxelfield.compat.nerfacc.data_specs import RayIntervals, RaySamples
from voxelfield.compat.nerfacc.estimators.occ_grid import OccGridEstimator
from voxelfield.compat.nerfacc.estimators.prop_net import PropNetEstimator
from voxelfield.compat.nerfacc.grid import ray_aabb_intersect, traverse_grids
from voxelfield.compat.nerfacc.pack import pack_info
from voxelfield.compat.nerfacc.pdf import importance_sampling, searchsorted
from voxelfield.compat.nerfacc.scan import exclusive_prod, exclusive_sum, inclusive_prod, inclusive_sum
from voxelfield.compat.nerfacc.volrend import (
    accumulate_along_rays,
    render_transmittance_from_alpha,
    render_transmittance_from_density,
    render_visibility_from_alpha,
    render_visibility_from_density,
    render_weight_from_alpha,
    render_weight_from_density,
    rendering,
)

__version__ = "0.5.3"

__all__ = [
    "OccGridEstimator",
    "PropNetEstimator",
    "RayIntervals",
    "RaySamples",
    "__version__",
    "accumulate_along_rays",
    "exclusive_prod",
    "exclusive_sum",
    "importance_sampling",
    "inclusive_prod",
    "inclusive_sum",
    "pack_info",
    "ray_aabb_intersect",
    "render_transmittance_from_alpha",
    "render_transmittance_from_density",
    "render_visibility_from_alpha",
    "render_visibility_from_density",
    "render_weight_from_alpha",
    "render_weight_from_density",
    "rendering",
    "searchsorted",
    "traverse_grids",
]
