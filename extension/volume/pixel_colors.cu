// Colours of pixels on CUDA.
#include "common/backend.cuh"
#include "volume/pixel_colors_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { PixelColorsOps<CudaBackend>::implement(m); }

}  // namespace voxelfield
