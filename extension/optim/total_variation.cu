// The gradient of total variation on CUDA: each vertex is compared with its six neighbours.
#include "common/backend.cuh"
#include "common/vector_width.h"
#include "optim/total_variation_ops.h"
#include "optim/walk_vertices.cuh"

namespace voxelfield {
namespace {

struct Smoothing {
  VertexGrid grid;
  VariationRule rule;
};

template <int Width>
__device__ __forceinline__ void add_slopes(const VariationRule& rule, float factor, const Vector<float, Width>& center,
                                           const float* neighbour, Vector<float, Width>& sum) {
  const Vector<float, Width> other = load_constant<Width>(neighbour);
#pragma unroll
  for (int i = 0; i < Width; ++i) sum.lane[i] += factor * rule.slope(center.lane[i] - other.lane[i]);
}

template <int Width>
__global__ void __launch_bounds__(kThreads)
    total_variation_kernel(const __grid_constant__ Smoothing task, const float* __restrict__ param,
                           float* __restrict__ grad) {
  const VertexGrid& grid = task.grid;
  const VariationRule& rule = task.rule;
  walk_vertices<Width>(
      1, [&](int) -> const VertexGrid& { return task.grid; },
      [&](int, int64_t visit, int32_t id, const VertexLanes& lanes) {
        int32_t vertex[3];
        if (visit < 0 || !grid.find(visit, id, vertex)) return;
        const int64_t start = grid.index_of(vertex) * grid.channels;
        for (int j = lanes.first; j < lanes.vectors; j += kWarp) {
          const float* value = param + start + j * Width;
          float* out = grad + start + j * Width;
          Vector<float, Width> sum = load<Width>(out);
          const Vector<float, Width> center = load_constant<Width>(value);
          int64_t stride = grid.channels;
#pragma unroll
          for (int axis = 2; axis >= 0; --axis) {
            const float factor = rule.factor(axis);
            if (vertex[axis] > 0) add_slopes<Width>(rule, factor, center, value - stride, sum);
            if (vertex[axis] < grid.size[axis] - 1) add_slopes<Width>(rule, factor, center, value + stride, sum);
            stride *= grid.size[axis];
          }
          store_global(out, sum);
        }
      });
}

struct Cuda : CudaBackend {
  static void total_variation(const VertexGrid& grid, const VariationRule& rule, const float* param, float* grad) {
    dispatch_vector_width<4, 2, 1>(vector_width(4, {grid.channels}, param, grad), [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      WalkSize size;
      size.add(grid, kWidth);
      if (size.tasks == 0) return;
      total_variation_kernel<kWidth><<<size.thread_blocks(false), kThreads, 0, stream()>>>({grid, rule}, param, grad);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("grid_total_variation_grad_", TORCH_BOX(&TotalVariationOps<Cuda>::grid_total_variation_grad_));
}

}  // namespace voxelfield
