// The ops of this folder on CUDA.
#include "color/pixel_ops.h"
#include "color/row_sums.cuh"
#include "color/view_encoding_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  AppendViewOps<CudaRows>::implement(m);
  PixelOps<CudaRows>::implement(m);
}

}  // namespace voxelfield
