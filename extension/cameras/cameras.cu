#include "cameras/lens_ops.h"
#include "cameras/pixel_rays_ops.h"
#include "common/backend.cuh"

namespace voxelfield {
namespace {

// A block collects its origins and directions in shared memory. Writing three numbers per ray directly to global memory
// would not coalesce. Pinholes have an instance of their own, because lenses take registers.
template <bool kPinholes>
__global__ void __launch_bounds__(kThreads) cast_rays_kernel(int64_t rays, PixelRays pixels) {
  if constexpr (kPinholes) pixels.lenses = Lens{nullptr};
  __shared__ float origins[3 * kThreads], directions[3 * kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads, row = first + threadIdx.x;
  if (row < rays) pixels.cast(row, origins + 3 * threadIdx.x, directions + 3 * threadIdx.x);
  __syncthreads();
  const int numbers = 3 * static_cast<int>(min(rays - first, int64_t{kThreads}));
  for (int k = threadIdx.x; k < numbers; k += kThreads) {
    pixels.origins[3 * first + k] = origins[k];
    pixels.directions[3 * first + k] = directions[k];
  }
}

struct CudaCameras : CudaBackend {
  static void for_each(int64_t rays, const PixelRays& pixels) {
    if (rays == 0) return;
    const auto kernel = pixels.lenses.row == nullptr ? cast_rays_kernel<true> : cast_rays_kernel<false>;
    launch(kernel, blocks(rays, kThreads), kThreads, 0, rays, pixels);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  LensOps<CudaBackend>::implement(m);
  PixelRaysOps<CudaCameras>::implement(m);
}

}  // namespace voxelfield
