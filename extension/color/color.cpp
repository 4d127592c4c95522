// The ops of this folder on the CPU.
#include "color/pixel_ops.h"
#include "color/row_sums.h"
#include "color/view_encoding_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  AppendViewOps<CpuRows>::implement(m);
  PixelOps<CpuRows>::implement(m);
}

}  // namespace voxelfield
