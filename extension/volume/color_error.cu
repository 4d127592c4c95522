// Errors of colours on CUDA: every block sums rows, then one block sums the blocks' sums, both in a fixed order.
#include <algorithm>

#include "common/backend.cuh"
#include "common/sums.cuh"
#include "volume/color_error_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kRowsPerBlock = 4 * kThreads;
constexpr int64_t kMaxBlocks = 1024;

template <typename T>
__global__ void __launch_bounds__(kThreads) color_error_kernel(ColorErrors<T> errors, T* __restrict__ partial) {
  __shared__ T scratch[kThreads / kWarp];
  const int64_t counted = errors.counted_rows();
  T sum = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < counted;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    sum += errors.weighted_square(row);
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    color_error_total_kernel(ColorErrors<T> errors, const T* __restrict__ partial, int64_t parts,
                             T* __restrict__ result) {
  __shared__ T scratch[kThreads / kWarp];
  T sum = 0;
  for (int64_t part = threadIdx.x; part < parts; part += kThreads) sum += partial[part];
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) *result = sum * errors.scale();
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    color_error_backward_kernel(ColorErrors<T> errors, const T* __restrict__ grad, T* __restrict__ grad_colors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < errors.rows) errors.write_gradient(row, errors.counted_rows(), 2 * *grad * errors.scale(), grad_colors);
}

struct CudaColorError : CudaBackend {
  static int64_t parts(int64_t rows) { return std::min((rows + kRowsPerBlock - 1) / kRowsPerBlock, kMaxBlocks); }

  template <typename T>
  static void color_error(const ColorErrors<T>& errors, T* partial, T* result) {
    const int64_t count = parts(errors.rows);
    if (count > 0) launch(color_error_kernel<T>, blocks(count, 1), kThreads, 0, errors, partial);
    launch(color_error_total_kernel<T>, 1, kThreads, 0, errors, partial, count, result);
  }

  template <typename T>
  static void color_error_backward(const ColorErrors<T>& errors, const T* grad, T* grad_colors) {
    const unsigned count = blocks(errors.rows, kThreads);
    if (count > 0) launch(color_error_backward_kernel<T>, count, kThreads, 0, errors, grad, grad_colors);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { ColorErrorOps<CudaColorError>::implement(m); }

}  // namespace voxelfield
