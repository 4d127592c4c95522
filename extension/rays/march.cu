// Ray marching on CUDA: each thread walks a ray, or a segment of one where there are few rays.
#include "common/backend.cuh"
#include "rays/march_ops.h"
#include "rays/pack_rays.cuh"

namespace voxelfield {
namespace {

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const bool* __restrict__ occupied, OccupancyView grid, int64_t* __restrict__ words, int64_t bricks) {
  const int64_t brick = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (brick < bricks) words[brick] = pack_brick(occupied, grid.resolution, brick);
}

template <int Threads>
__global__ void __launch_bounds__(Threads)
    count_kernel(RaySegments rays, SegmentParts parts, int32_t* __restrict__ counts,
                 StepRange* __restrict__ step_ranges, int64_t* __restrict__ sums) {
  __shared__ int64_t scratch[Threads / kWarp];
  int64_t sum = 0;
  for (int64_t segment = parts.begin(blockIdx.x) + threadIdx.x; segment < parts.end(blockIdx.x); segment += Threads) {
    counts[segment] = count_on_segment(rays, segment, step_ranges);
    sum += counts[segment];
  }
  sum = block_sum<Threads>(sum, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

struct Cuda : CudaBackend {
  static void pack_bricks(const bool* occupied, const OccupancyView& grid, int64_t* words, int64_t count) {
    pack_kernel<<<blocks(count, kThreads), kThreads, 0, stream()>>>(occupied, grid, words, count);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  static void count_samples(const RaySegments& rays, const SegmentParts& parts, int32_t* counts, StepRange* step_ranges,
                            int64_t* sums) {
    const auto launch = [&](auto threads) {
      count_kernel<threads.value><<<static_cast<unsigned>(parts.parts()), threads.value, 0, stream()>>>(
          rays, parts, counts, step_ranges, sums);
    };
    // As many threads as a part has segments, up to 256: larger blocks would leave the device unevenly busy.
    if (parts.length() <= 64) {
      launch(std::integral_constant<int, 64>{});
    } else if (parts.length() <= 128) {
      launch(std::integral_constant<int, 128>{});
    } else {
      launch(std::integral_constant<int, 256>{});
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  static void place_samples(const Packing& packing, const MarchedSamples& samples) {
    launch_place_segments(packing, samples, stream());
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("pack_occupancy", TORCH_BOX(&MarchOps<Cuda>::pack_occupancy));
  m.impl("count_ray_samples", TORCH_BOX(&MarchOps<Cuda>::count_ray_samples));
  m.impl("place_ray_samples", TORCH_BOX(&MarchOps<Cuda>::place_ray_samples));
}

}  // namespace voxelfield
