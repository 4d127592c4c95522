// Geometry and view side by side, on CUDA.
#include "common/backend.cuh"
#include "mlp/view_encoding_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { AppendViewOps<CudaBackend>::implement(m); }

}  // namespace voxelfield
