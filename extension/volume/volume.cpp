// The ops on the CPU that compute rays and pixels by the same functors on both backends.
#include "volume/color_error_ops.h"
#include "volume/composite_ops.h"
#include "volume/pixel_colors_ops.h"
#include "volume/ray_sums_ops.h"
#include "volume/walk_rays.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  ColorErrorOps<CpuRays>::implement(m);
  CompositeOps<CpuRays>::implement(m);
  PixelColorsOps<CpuRays>::implement(m);
  RaySumsOps<CpuRays>::implement(m);
}

}  // namespace voxelfield
