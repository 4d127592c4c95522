#include "cameras/lens_ops.h"
#include "cameras/pixel_rays_ops.h"
#include "common/backend.h"

namespace voxelfield {

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  LensOps<CpuBackend>::implement(m);
  PixelRaysOps<CpuBackend>::implement(m);
}

}  // namespace voxelfield
