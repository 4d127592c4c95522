// Sums over the samples of each ray on the CPU: rays in parallel.
#include <algorithm>

#include "common/backend.h"
#include "volume/ray_sums_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;

struct Cpu : CpuBackend {
  template <typename T>
  static void sum(const T* values, const PackedRays& rays, int64_t channels, T* sums) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) {
        const RaySpan span = rays[ray];
        T* out = sums + ray * channels;
        std::fill_n(out, channels, T(0));
        for (int64_t i = span.begin; i < span.end; ++i) {
          for (int64_t c = 0; c < channels; ++c) out[c] += values[i * channels + c];
        }
      }
    });
  }

  template <typename T>
  static void spread(const T* sums, const PackedRays& rays, int64_t channels, T* values) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) {
        const RaySpan span = rays[ray];
        for (int64_t i = span.begin; i < span.end; ++i) {
          std::copy_n(sums + ray * channels, channels, values + i * channels);
        }
      }
    });
    for (const RaySpan& span : {rays.before(), rays.behind()}) {
      std::fill(values + span.begin * channels, values + span.end * channels, T(0));
    }
  }

  template <typename T>
  static void exclusive_sum(const T* values, const PackedRays& rays, int64_t channels, T* sums) {
    for_each_range(rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) {
        const RaySpan span = rays[ray];
        for (int64_t k = (span.begin + 1) * channels; k < span.end * channels; ++k) {
          sums[k] = sums[k - channels] + values[k - channels];
        }
      }
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("sum_along_rays", TORCH_BOX(&RaySumsOps<Cpu>::sum_along_rays));
  m.impl("exclusive_sum_along_rays", TORCH_BOX(&RaySumsOps<Cpu>::exclusive_sum_along_rays));
  m.impl("spread_along_rays", TORCH_BOX(&RaySumsOps<Cpu>::spread_along_rays));
}

}  // namespace voxelfield
