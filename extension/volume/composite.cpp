// Compositing on the CPU.
#include "volume/composite_ops.h"
#include "volume/walk_rays.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { CompositeOps<CpuRays>::implement(m); }

}  // namespace voxelfield
