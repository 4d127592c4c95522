// Processes the rays of packed samples on CUDA, with one team of threads per ray. Short rays get smaller teams, so that
// few threads are idle.
#pragma once

#include <algorithm>
#include <type_traits>

#include "rays/packing.cuh"
#include "volume/keep_rule.cuh"

namespace voxelfield {

constexpr int kShortRayTeam = 8;
constexpr int64_t kShortRay = 24;                // average number of samples
constexpr int64_t kClearedRows = 64 * kThreads;  // per clearing block, which processes no rays
constexpr int64_t kClearingBlocks = 64;          // maximum number

// Calls f with the size of the teams as a compile-time constant.
template <typename F>
void dispatch_team(const PackedRays& rays, const F& f) {
  const bool are_short = rays.samples <= kShortRay * rays.count;
  are_short ? f(std::integral_constant<int, kShortRayTeam>{}) : f(std::integral_constant<int, kWarp>{});
}

// The minimum number of blocks of a walk that must be resident on a multiprocessor; 0 if there is no such requirement.
template <typename Walk>
constexpr int kWalkBlocks = 0;

// The first `walking` blocks walk rays, and the others clear the rows that belong to no ray.
template <int Size, typename Walk>
__global__ void __launch_bounds__(kThreads, kWalkBlocks<Walk>)
    walk_kernel(PackedRays rays, unsigned walking, Walk walk) {
  if (blockIdx.x >= walking) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x - walking) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x - walking) * kThreads;
    const RaySpan before = rays.before(), behind = rays.behind();
    for (int64_t i = before.begin + thread; i < before.end; i += threads) walk.clear(i);
    for (int64_t i = behind.begin + thread; i < behind.end; i += threads) walk.clear(i);
    return;
  }
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * (kThreads / Size) + threadIdx.x / Size;
  const RaySpan span = rays[ray];
  const int seat = threadIdx.x % Size;
  const ThreadTeam<Size> team{seat, seat == 0 && ray < rays.count};
  for (int64_t i = walk(ray, span, team) + seat; i < span.end; i += Size) walk.clear(i);
}

// Has the same interface as CpuRays.
struct CudaRays : CudaPacking {
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    dispatch_team(rays, [&](auto size) {
      const unsigned walking = blocks(rays.count, kThreads / size.value);
      const int64_t clearing = std::min((rays.samples + kClearedRows - 1) / kClearedRows, kClearingBlocks);
      if (walking + clearing == 0) return;
      launch(walk_kernel<size.value, Walk>, blocks(walking + clearing, 1), kThreads, 0, rays, walking, walk);
    });
  }
};

}  // namespace voxelfield
