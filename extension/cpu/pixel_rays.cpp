// Rays through pixels of photographs, on the CPU.
#include "../pixel_rays_ops.h"
#include "backend.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 1024;

struct Cpu : CpuBackend {
  static void pixel_rays(const ImagesView& images, const int64_t* index, int64_t n, const PixelRayPointers& out) {
    for_each_range(n, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) out.write(images, index[row], row);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { m.impl("pixel_rays", TORCH_BOX(&PixelRaysOps<Cpu>::pixel_rays)); }

}  // namespace voxelfield
