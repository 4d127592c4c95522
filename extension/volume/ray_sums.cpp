// Sums over the samples of each ray on the CPU.
#include "volume/ray_sums_ops.h"
#include "volume/walk_rays.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { RaySumsOps<CpuRays>::implement(m); }

}  // namespace voxelfield
