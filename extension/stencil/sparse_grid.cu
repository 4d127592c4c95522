// The ops on sparse grids on CUDA.
#include "common/backend.cuh"
#include "stencil/sparse_grid_ops.h"

namespace voxelfield {

namespace {

template <int Width>
__global__ void __launch_bounds__(kThreads) share_touched_kernel(const __grid_constant__ ShareTouched share) {
  const int64_t vertex = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (vertex >= share.vertices || !share.any(vertex)) return;
  const int32_t begin = share.begins[vertex], end = share.begins[vertex + 1];
  for (int32_t channel = 0; channel < share.channels; channel += Width) {
    const auto at = [&](int32_t i) { return share.sums + int64_t{share.copies[i]} * share.channels + channel; };
    Vector<float, Width> sum{};
    for (int32_t i = begin; i < end; ++i) sum += load<Width>(at(i));
    for (int32_t i = begin; i < end; ++i) store_global(at(i), sum);
  }
  share.add_copies(vertex);
}

struct CudaSparseGrid : CudaBackend {
  static void share_touched(const ShareTouched& share) {
    dispatch_vector_width<4, 2, 1>(vector_width(4, {share.channels}, share.sums), [&](auto width) {
      launch(share_touched_kernel<width.value>, blocks(share.vertices, kThreads), kThreads, 0, share);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { SparseGridOps<CudaSparseGrid>::implement(m); }

}  // namespace voxelfield
