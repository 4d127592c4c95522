// Colours of pixels on the CPU.
#include "common/backend.h"
#include "volume/pixel_colors_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { PixelColorsOps<CpuBackend>::implement(m); }

}  // namespace voxelfield
