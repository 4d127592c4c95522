// Processes the rays of packed samples on the CPU. Rays run in parallel, each in one thread.
#pragma once

#include "rays/packing.h"
#include "volume/keep_rule.h"

namespace voxelfield {

struct CpuRays : CpuPacking {
  static constexpr int64_t kRaysPerTask = 64;

  // Calls walk(ray, span, team) for every ray. It returns the first sample that it did not process. Also calls
  // walk.clear(i) for all samples of the ray from that one on, and for all samples that belong to no ray.
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) {
        const RaySpan span = rays[ray];
        for (int64_t i = walk(ray, span, SingleThread{}); i < span.end; ++i) walk.clear(i);
      }
    });
    for (const RaySpan& rows : {rays.before(), rays.behind()}) {
      for (int64_t i = rows.begin; i < rows.end; ++i) walk.clear(i);
    }
  }
};

}  // namespace voxelfield
