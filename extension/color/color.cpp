#include <numeric>

#include "color/pixel_ops.h"
#include "color/view_encoding_ops.h"
#include "common/backend.h"

namespace voxelfield {
namespace {

// The partial sums cover fixed ranges of rows, so a sum does not depend on the number of threads.
struct CpuRows : CpuBackend {
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

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  AppendViewOps<CpuRows>::implement(m);
  PixelOps<CpuRows>::implement(m);
}

}  // namespace voxelfield
