// Errors of colours on the CPU: sums over fixed ranges of rows, so that the number of threads changes nothing.
#include <numeric>

#include "common/backend.h"
#include "volume/color_error_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kRowsPerTask = 8192;

struct Cpu : CpuBackend {
  static int64_t parts(int64_t rows) { return (rows + kRowsPerTask - 1) / kRowsPerTask; }

  template <typename T>
  static void color_error(const ColorErrors<T>& errors, T* partial, T* result) {
    const int64_t counted = errors.counted_rows();
    for_each_range(counted, kRowsPerTask, [&](int64_t begin, int64_t end) {
      T sum = 0;
      for (int64_t row = begin; row < end; ++row) sum += errors.weighted_square(row);
      partial[begin / kRowsPerTask] = sum;
    });
    *result = std::accumulate(partial, partial + parts(counted), T(0)) * errors.scale();
  }

  template <typename T>
  static void color_error_backward(const ColorErrors<T>& errors, const T* grad, T* grad_colors) {
    const int64_t counted = errors.counted_rows();
    const T factor = 2 * *grad * errors.scale();
    for_each_range(errors.rows, kRowsPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) errors.write_gradient(row, counted, factor, grad_colors);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { ColorErrorOps<Cpu>::implement(m); }

}  // namespace voxelfield
