#include <algorithm>

#include "color/pixel_ops.h"
#include "color/view_encoding_ops.h"
#include "common/backend.cuh"
#include "common/sums.cuh"

namespace voxelfield {
namespace {

constexpr int64_t kMaxSumBlocks = 1024;

template <typename F, typename T>
__global__ void __launch_bounds__(kThreads) sum_kernel(F f, T* __restrict__ partial) {
  __shared__ T scratch[kThreads / kWarp];
  const int64_t count = f.count();
  T sum = 0;
  for (int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; row < count;
       row += static_cast<int64_t>(gridDim.x) * kThreads) {
    sum += f(row);
  }
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

template <typename F, typename T>
__global__ void __launch_bounds__(kThreads) sum_total_kernel(F f, const T* __restrict__ partial, int64_t parts) {
  __shared__ T scratch[kThreads / kWarp];
  T sum = 0;
  for (int64_t part = threadIdx.x; part < parts; part += kThreads) sum += partial[part];
  sum = block_sum<kThreads>(sum, scratch);
  if (threadIdx.x == 0) f.finish(sum);
}

// Has the same interface as CpuRows.
struct CudaRows : CudaBackend {
  static int64_t sum_parts(int64_t rows) { return std::min((rows + 4 * kThreads - 1) / (4 * kThreads), kMaxSumBlocks); }

  template <typename T, typename F>
  static void sum(int64_t rows, const F& f, T* partial) {
    const int64_t parts = sum_parts(rows);
    if (parts > 0) launch(sum_kernel<F, T>, blocks(parts, 1), kThreads, 0, f, partial);
    launch(sum_total_kernel<F, T>, 1, kThreads, 0, f, partial, parts);
  }

  // Every thread reads the shared value itself, because it is in device memory.
  template <typename F>
  struct SharingRow {
    F f;

    VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const { f(row, f.shared()); }
  };

  template <typename F>
  static void for_each_row(int64_t rows, const F& f) {
    for_each(rows, SharingRow<F>{f});
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  AppendViewOps<CudaRows>::implement(m);
  PixelOps<CudaRows>::implement(m);
}

}  // namespace voxelfield
