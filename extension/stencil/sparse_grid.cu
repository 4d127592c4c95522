#include "common/backend.cuh"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

namespace {

template <int Width>
__global__ void __launch_bounds__(kThreads) sum_touched_kernel(const __grid_constant__ SumTouchedDuplicates all) {
  const int64_t vertex = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vertex >= all.vertices || !all.any(vertex)) return;
  const int32_t begin = all.begins[vertex], end = all.begins[vertex + 1];
  for (int32_t channel = 0; channel < all.channels; channel += Width) {
    const auto at = [&](int32_t i) { return all.sums + int64_t{all.copies[i]} * all.channels + channel; };
    Vector<float, Width> sum{};
    for (int32_t i = begin; i < end; ++i) sum += load<Width>(at(i));
    for (int32_t i = begin; i < end; ++i) store_global(at(i), sum);
  }
  all.add_copies(vertex);
}

struct CudaSparseGrid : CudaBackend {
  static void sum_touched(const SumTouchedDuplicates& all) {
    dispatch_vector_width<4, 2, 1>(vector_width(4, {all.channels}, all.sums), [&](auto width) {
      launch(sum_touched_kernel<width.value>, blocks(all.vertices, kThreads), kThreads, 0, all);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { SparseGridOps<CudaSparseGrid>::implement(m); }

}  // namespace voxelfield
