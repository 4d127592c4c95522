// Processes the rays of packed samples on the CPU. Rays run in parallel, each in one thread. Also sums over rows: the
// partial sums cover fixed ranges of rows, so the result does not depend on the number of threads.
#pragma once

#include <numeric>

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

  // The number of partial sums for a number of rows.
  static int64_t sum_parts(int64_t rows) { return (rows + kSummedRows - 1) / kSummedRows; }

  // Calls f.finish(sum), where `sum` is the sum of f(row) over the first f.count() rows.
  template <typename T, typename F>
  static void sum(int64_t /*rows*/, const F& f, T* partial) {
    const int64_t count = f.count();
    for_each_range(count, kSummedRows, [&](int64_t begin, int64_t end) {
      T sum = 0;
      for (int64_t row = begin; row < end; ++row) sum += f(row);
      partial[begin / kSummedRows] = sum;
    });
    f.finish(std::accumulate(partial, partial + sum_parts(count), T(0)));
  }

  // Calls f(row, f.shared()) for all rows, and evaluates f.shared() once.
  template <typename F>
  static void for_each_row(int64_t rows, const F& f) {
    const auto shared = f.shared();
    for_each(rows, [&](int64_t row) { f(row, shared); }, kSummedRows);
  }

 private:
  static constexpr int64_t kSummedRows = 8192;
};

}  // namespace voxelfield
