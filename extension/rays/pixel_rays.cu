// Rays through pixels of photographs, on CUDA: each thread casts a ray.
#include "common/backend.cuh"
#include "rays/pixel_rays_ops.h"

namespace voxelfield {
namespace {

__global__ void __launch_bounds__(kThreads)
    pixel_rays_kernel(ImagesView images, const int64_t* __restrict__ index, int64_t rays, PixelRayPointers out) {
  // Written straight to memory, three numbers for each ray would not coalesce.
  __shared__ float origins[3 * kThreads], directions[3 * kThreads];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads, row = first + threadIdx.x;
  if (row < rays) {
    const int64_t each = images.rays_per_pixel(), chosen = row / each, square = row - chosen * each;
    const int64_t pixel = images.pixel(index[chosen]);
    const Ray ray = images.ray(pixel, square);
    for (int axis = 0; axis < 3; ++axis) {
      origins[3 * threadIdx.x + axis] = ray.origin[axis];
      directions[3 * threadIdx.x + axis] = ray.direction[axis];
    }
    out.near[row] = ray.near;
    out.far[row] = ray.far;
    if (square == 0) {
      Vector<float, 4> rgba;
      images.color(pixel, rgba.lane);
      store(out.rgba + 4 * chosen, rgba);
    }
  }
  __syncthreads();
  const int numbers = 3 * static_cast<int>(min(rays - first, static_cast<int64_t>(kThreads)));
  for (int k = threadIdx.x; k < numbers; k += kThreads) {
    out.origins[3 * first + k] = origins[k];
    out.directions[3 * first + k] = directions[k];
  }
}

struct Cuda : CudaBackend {
  static void pixel_rays(const ImagesView& images, const int64_t* index, int64_t pixels, const PixelRayPointers& out) {
    const int64_t rays = pixels * images.rays_per_pixel();
    pixel_rays_kernel<<<blocks(rays, kThreads), kThreads, 0, stream()>>>(images, index, rays, out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { m.impl("pixel_rays", TORCH_BOX(&PixelRaysOps<Cuda>::pixel_rays)); }

}  // namespace voxelfield
