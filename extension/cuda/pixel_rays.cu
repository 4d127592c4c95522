// Rays through pixels of photographs, on CUDA: a thread a ray.
#include "../pixel_rays_ops.h"
#include "backend.cuh"

namespace voxelfield {
namespace {

__global__ void pixel_rays_kernel(ImagesView images, const int64_t* __restrict__ index, int64_t n,
                                  PixelRayPointers out) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row < n) out.write(images, index[row], row);
}

struct Cuda : CudaBackend {
  static void pixel_rays(const ImagesView& images, const int64_t* index, int64_t n, const PixelRayPointers& out) {
    pixel_rays_kernel<<<blocks(n, kThreads), kThreads, 0, stream()>>>(images, index, n, out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("pixel_rays", TORCH_BOX(&PixelRaysOps<Cuda>::pixel_rays)); }

}  // namespace voxelfield
