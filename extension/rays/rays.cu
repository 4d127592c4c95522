// The ops of this room on CUDA.
#include "rays/march_ops.h"
#include "rays/packing.cuh"
#include "rays/pixel_rays_ops.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  MarchOps<CudaPacking>::implement(m);
  PixelRaysOps<CudaPacking>::implement(m);
}

}  // namespace voxelfield
