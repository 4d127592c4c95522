// The ops on sparse grids on the CPU.
#include "common/backend.h"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { SparseGridOps<CpuBackend>::implement(m); }

}  // namespace voxelfield
