// The ops on CUDA that compute rays and pixels by the same functors on both backends.
#include "volume/color_error_ops.h"
#include "volume/composite_ops.h"
#include "volume/pixel_colors_ops.h"
#include "volume/ray_sums_ops.h"
#include "volume/walk_rays.cuh"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  ColorErrorOps<CudaRays>::implement(m);
  CompositeOps<CudaRays>::implement(m);
  PixelColorsOps<CudaRays>::implement(m);
  RaySumsOps<CudaRays>::implement(m);
}

}  // namespace voxelfield
