// Sums over the samples of each ray on CUDA.
#include "volume/ray_sums_ops.h"
#include "volume/walk_rays.cuh"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { RaySumsOps<CudaRays>::implement(m); }

}  // namespace voxelfield
