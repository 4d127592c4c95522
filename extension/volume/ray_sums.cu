// Sums over the samples of each ray on CUDA: a warp takes a ray, and its threads consecutive numbers of the ray's rows.
#include "common/backend.cuh"
#include "common/sums.cuh"
#include "volume/ray_sums_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kWarps = kThreads / kWarp;

__device__ __forceinline__ int64_t own_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}

// Sums have a fixed order, so that every run returns the same bits.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const T* __restrict__ values, PackedRays rays, int64_t channels, T* __restrict__ sums) {
  const int64_t ray = own_warp();
  if (ray >= rays.count) return;
  const RaySpan span = rays[ray];
  const int lane = threadIdx.x % kWarp;
  for (int64_t c = 0; c < channels; ++c) {
    T sum = 0;
    for (int64_t i = span.begin + lane; i < span.end; i += kWarp) sum += values[i * channels + c];
    sum = warp_sum(sum);
    if (lane == 0) sums[ray * channels + c] = sum;
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    spread_kernel(const T* __restrict__ sums, PackedRays rays, int64_t channels, T* __restrict__ values) {
  const int64_t ray = own_warp();
  const int lane = threadIdx.x % kWarp;
  if (ray < rays.count) {
    const RaySpan span = rays[ray];
    for (int64_t k = span.begin * channels + lane; k < span.end * channels; k += kWarp) {
      values[k] = sums[ray * channels + k % channels];
    }
    return;
  }
  // The warps behind those of the rays clear the rows of no ray.
  const int64_t thread = (ray - rays.count) * kWarp + lane;
  const int64_t threads = (static_cast<int64_t>(gridDim.x) * kWarps - rays.count) * kWarp;
  const RaySpan before = rays.before(), behind = rays.behind();
  for (int64_t k = thread; k < before.end * channels; k += threads) values[k] = 0;
  for (int64_t k = behind.begin * channels + thread; k < behind.end * channels; k += threads) values[k] = 0;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    exclusive_sum_kernel(const T* __restrict__ values, PackedRays rays, int64_t channels, T* __restrict__ sums) {
  const int64_t ray = own_warp();
  if (ray >= rays.count) return;
  const RaySpan span = rays[ray];
  const int lane = threadIdx.x % kWarp;
  for (int64_t c = 0; c < channels; ++c) {
    T passed = 0;
    for (int64_t first = span.begin; first < span.end; first += kWarp) {
      const int64_t i = first + lane;
      const TeamScan<T> scan = team_scan<kWarp>(i < span.end ? values[i * channels + c] : T(0), lane);
      if (i < span.end) sums[i * channels + c] = passed + scan.before;
      passed += scan.total;
    }
  }
}

struct Cuda : CudaBackend {
  template <typename T>
  static void sum(const T* values, const PackedRays& rays, int64_t channels, T* sums) {
    sum_kernel<<<blocks(rays.count, kWarps), kThreads, 0, stream()>>>(values, rays, channels, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename T>
  static void spread(const T* sums, const PackedRays& rays, int64_t channels, T* values) {
    constexpr int64_t kClearingWarps = 64 * kWarps;
    spread_kernel<<<blocks(rays.count + kClearingWarps, kWarps), kThreads, 0, stream()>>>(sums, rays, channels, values);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename T>
  static void exclusive_sum(const T* values, const PackedRays& rays, int64_t channels, T* sums) {
    exclusive_sum_kernel<<<blocks(rays.count, kWarps), kThreads, 0, stream()>>>(values, rays, channels, sums);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("sum_along_rays", TORCH_BOX(&RaySumsOps<Cuda>::sum_along_rays));
  m.impl("exclusive_sum_along_rays", TORCH_BOX(&RaySumsOps<Cuda>::exclusive_sum_along_rays));
  m.impl("spread_along_rays", TORCH_BOX(&RaySumsOps<Cuda>::spread_along_rays));
}

}  // namespace voxelfield
