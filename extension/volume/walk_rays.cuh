// Work on rays of packed samples on CUDA: a group of threads takes a ray. Groups are as small as the rays are short, so
// that few threads idle.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/backend.cuh"
#include "rays/packed_rays.h"
#include "volume/keep_rule.cuh"

namespace voxelfield {

constexpr int kShortRayGroup = 8;
constexpr int64_t kShortRay = 24;                // samples, on average
constexpr int64_t kClearedRows = 16 * kThreads;  // for each block that has no ray
constexpr int64_t kClearingBlocks = 512;         // at most

// A thread's place in the group that shares its ray. Every thread of the warp must take part in any, sum and scans.
template <int Size>
struct RayGroup : TeamScanner<Size> {
  static constexpr int kSize = Size;
  bool leads;  // true for one thread of the group, if its ray exists

  __device__ __forceinline__ RayGroup(int seat, bool exists) : TeamScanner<Size>{seat}, leads(exists && seat == 0) {}

  // Over the whole warp, so that its threads stay together.
  static __device__ __forceinline__ bool any(bool value) { return __any_sync(kFullWarp, value); }

  template <typename T>
  static __device__ __forceinline__ T sum(T value) {
    return group_sum<Size>(value);
  }
};

// Calls f with the size of the groups as a constant.
template <typename F>
void dispatch_group(const PackedRays& rays, const F& f) {
  if (rays.samples <= kShortRay * rays.count) {
    f(std::integral_constant<int, kShortRayGroup>{});
  } else {
    f(std::integral_constant<int, kWarp>{});
  }
}

// The first `walking` blocks walk rays, the others clear the rows which belong to no ray.
template <int Group, typename Walk>
__global__ void __launch_bounds__(kThreads) walk_kernel(PackedRays rays, unsigned walking, Walk walk) {
  if (blockIdx.x >= walking) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x - walking) * kThreads + threadIdx.x;
    const int64_t threads = static_cast<int64_t>(gridDim.x - walking) * kThreads;
    const RaySpan before = rays.before(), behind = rays.behind();
    for (int64_t i = before.begin + thread; i < before.end; i += threads) walk.clear(i);
    for (int64_t i = behind.begin + thread; i < behind.end; i += threads) walk.clear(i);
    return;
  }
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * (kThreads / Group) + threadIdx.x / Group;
  const RaySpan span = rays[ray];
  const RayGroup<Group> group(threadIdx.x % Group, ray < rays.count);
  for (int64_t i = walk(ray, span, group) + group.seat; i < span.end; i += Group) walk.clear(i);
}

struct CudaRays : CudaBackend {
  // As for CpuRays.
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    dispatch_group(rays, [&](auto group) {
      const unsigned walking = blocks(rays.count, kThreads / group.value);
      const int64_t clearing = std::min((rays.samples + kClearedRows - 1) / kClearedRows, kClearingBlocks);
      if (walking + clearing == 0) return;
      launch(walk_kernel<group.value, Walk>, blocks(walking + clearing, 1), kThreads, 0, rays, walking, walk);
    });
  }
};

}  // namespace voxelfield
