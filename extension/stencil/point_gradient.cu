// The gradient in the points on CUDA.
#include "common/backend.cuh"
#include "stencil/levels.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// A point is shared by `lanes` neighbouring threads, a power of two. Each sums over some of the channel vectors, of one
// side along z.
template <typename scalar_t, int Width, typename Weights, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    point_gradient_kernel(const __grid_constant__ Levels<Locator, const scalar_t> levels,
                          const scalar_t* __restrict__ values, const T* __restrict__ points,
                          const T* __restrict__ directions, T* __restrict__ out, int64_t n, int lanes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t index = thread / lanes;
  const int lane = static_cast<int>(thread) & (lanes - 1);
  const bool upper = lane >= lanes / 2;
  const int own = lane & (lanes / 2 - 1);
  T gradient[3] = {};
  if (index < n) {
    const Weights weights(directions, index);
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      auto s = level.locator(points, index);
      if (s.empty) continue;
      s.take_side(2, upper);
      for (int64_t c = own * Width; c < level.locator.channels; c += lanes / 2 * Width) {
        Vector<scalar_t, Width> corner[kCorners / 2];
#pragma unroll
        for (int k = 0; k < kCorners / 2; ++k) corner[k] = load_constant<Width>(level.data + s.offset(2 * k) + c);
#pragma unroll
        for (int set = 0; set < Weights::kSets; ++set) {
          const Vector<scalar_t, Width> value =
              load_constant<Width>(values + (set * n + index) * levels.columns + level.column + c);
#pragma unroll
          for (int k = 0; k < kCorners / 2; ++k) {
            T product = 0;
#pragma unroll
            for (int i = 0; i < Width; ++i) {
              product += static_cast<T>(value.lane[i]) * static_cast<T>(corner[k].lane[i]);
            }
#pragma unroll
            for (int axis = 0; axis < 3; ++axis) gradient[axis] += weights.gradient(s, 2 * k, axis, set) * product;
          }
        }
      }
    }
  }
  for (int step = lanes / 2; step > 0; step /= 2) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) gradient[axis] += __shfl_xor_sync(kFullWarp, gradient[axis], step);
  }
  if (index < n && lane == 0) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) out[3 * index + axis] = gradient[axis];
  }
}

struct Cuda : CudaBackend {
  template <typename Weights, typename Locator, typename scalar_t, typename T>
  static void point_gradient(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                             const PointsView<T>& at, T* out) {
    dispatch_level_width<Weights>(levels, values, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      int lanes = 2;
      while (lanes < kWarp && lanes < 2 * most_vectors(levels, kWidth)) lanes *= 2;
      dispatch_plain<Weights>(levels, [&](const auto& located) {
        using Located = std::decay_t<decltype(located.level[0].locator)>;
        launch(point_gradient_kernel<scalar_t, kWidth, Weights, Located, T>, blocks(at.count, kThreads / lanes),
               kThreads, 0, located, values, at.points, at.directions, out, at.count, lanes);
      });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("point_gradient_trilinear", TORCH_BOX(&StencilOps<Cuda>::point_gradient_trilinear));
  m.impl("point_gradient_cells", TORCH_BOX(&StencilOps<Cuda>::point_gradient_cells));
}

}  // namespace voxelfield
