// Work on rays of packed samples on the CPU: rays in parallel, each by one thread.
#pragma once

#include "common/backend.h"
#include "rays/packed_rays.h"
#include "volume/keep_rule.h"

namespace voxelfield {

struct CpuRays : CpuBackend {
  // Calls walk(ray, span, team) for every ray, which returns the first sample that it did not deal with, and
  // walk.clear(i) for the samples from there on and for those that belong to no ray.
  template <typename Walk>
  static void for_each_ray(const PackedRays& rays, const Walk& walk) {
    constexpr int64_t kRaysPerTask = 64;
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
