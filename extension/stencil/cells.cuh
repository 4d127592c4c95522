// Splatting onto the corners of cells that belong to one point each.
#pragma once

#include "common/backend.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

template <typename scalar_t, int Width, typename Weights, typename T>
__global__ void __launch_bounds__(kThreads)
    write_cells_kernel(const __grid_constant__ Levels<CellLocator<T>, scalar_t> levels,
                       const scalar_t* __restrict__ values, const T* __restrict__ points,
                       const T* __restrict__ directions, int64_t n) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= n) return;
  const auto s = levels.level[0].locator(points, index);
  const Weights weights(directions, index);
  const int64_t channels = levels.columns;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * Width; c < channels;
       c += static_cast<int64_t>(blockDim.x) * Width) {
    const Vector<scalar_t, Width> value = load_constant<Width>(values + index * channels + c);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const T weight = weights(s, k, 0);
      Vector<T, Width> term;
#pragma unroll
      for (int i = 0; i < Width; ++i) term.lane[i] = s.empty ? T(0) : weight * static_cast<T>(value.lane[i]);
      store_global(levels.level[0].data + s.offset(k) + c, narrow<scalar_t>(term));
    }
  }
}

}  // namespace voxelfield
