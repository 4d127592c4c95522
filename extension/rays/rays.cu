#include "rays/cut_rays_ops.h"
#include "rays/march_levels_ops.h"
#include "rays/march_ops.h"
#include "rays/packing.cuh"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  MarchLevelsOps<CudaPacking>::implement(m);
  MarchOps<CudaPacking>::implement(m);
  CutRaysOps<CudaPacking>::implement(m);
}

}  // namespace voxelfield
