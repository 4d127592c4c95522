// Ray marching on CUDA: a thread walks a ray.
#include "../digest.h"
#include "../march_ops.h"
#include "backend.cuh"

namespace voxelfield {
namespace {

__global__ void __launch_bounds__(kThreads) count_kernel(RayBatch rays, int64_t* __restrict__ counts) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (ray < rays.count) counts[ray] = count_on_ray(rays, ray);
}

__global__ void __launch_bounds__(kThreads)
    place_kernel(RayBatch rays, const int64_t* __restrict__ ray_offsets, RaySamplePointers out) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (ray < rays.count) place_on_ray(rays, ray, ray_offsets[ray], ray_offsets[ray + 1], out);
}

struct Cuda : CudaBackend {
  static void count_samples(const RayBatch& rays, int64_t* counts) {
    count_kernel<<<blocks(rays.count, kThreads), kThreads, 0, stream()>>>(rays, counts);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  static void place_samples(const RayBatch& rays, const int64_t* ray_offsets, const RaySamplePointers& out) {
    place_kernel<<<blocks(rays.count, kThreads), kThreads, 0, stream()>>>(rays, ray_offsets, out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("count_ray_samples", TORCH_BOX(&MarchOps<Cuda>::count_ray_samples));
  m.impl("place_ray_samples", TORCH_BOX(&MarchOps<Cuda>::place_ray_samples));
}

}  // namespace voxelfield
