// Compositing on CUDA.
#include "volume/composite_ops.h"
#include "volume/walk_rays.cuh"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { CompositeOps<CudaRays>::implement(m); }

}  // namespace voxelfield
