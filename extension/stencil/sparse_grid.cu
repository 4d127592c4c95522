// The ops on sparse grids on CUDA.
#include "common/backend.cuh"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { SparseGridOps<CudaBackend>::implement(m); }

}  // namespace voxelfield
