// Geometry and view side by side, on the CPU.
#include "common/backend.h"
#include "mlp/view_encoding_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { AppendViewOps<CpuBackend>::implement(m); }

}  // namespace voxelfield
