// Lines through grids on CUDA: a thread walks one ray. Backprojection sums the weights of a vertex over consecutive
// cells of a ray before it adds them, which halves the number of atomics.
#include "common/backend.cuh"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

template <int Width, typename T>
__global__ void __launch_bounds__(kThreads)
    backproject_kernel(const __grid_constant__ RayBundle<T> rays, const T* __restrict__ values, void* __restrict__ sums,
                       const double* __restrict__ scale) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (ray >= rays.count) return;
  const int64_t first = rays.grid_of(ray) * rays.vertices();
  const double per_one = scale == nullptr ? 0 : *scale;
  const auto add = [&](int64_t vertex, T weight) {
    const int64_t label = rays.label_of(vertex), at = (first + vertex) * rays.channels;
    if (weight == T(0) || label < 0) return;
    for (int64_t c = 0; c < rays.channels; c += Width) {
      Vector<T, Width> term = load_constant<Width>(values + rays.row(ray, label) + c);
      if (Width == 1 && per_one != 0) {
        const long long whole = __double2ll_rn(static_cast<double>(weight * term.lane[0]) * per_one);
        atomicAdd(static_cast<unsigned long long*>(sums) + at + c, static_cast<unsigned long long>(whole));
        continue;
      }
#pragma unroll
      for (int i = 0; i < Width; ++i) term.lane[i] *= weight;
      atomic_add<Width>(static_cast<T*>(sums) + at + c, term);
    }
  };
  Line<T> line(rays, ray);
  CornerValues<T> weights{};
  line.walk([] {},
            [&](T from, T to) {
              line.add_weights(from, to, weights.at);
              return true;
            },
            [&](int axis) {
              const T none[4] = {};
              T left[4];
              weights.lower_face(axis, left);
              weights.shift(axis, none);
              const CellFace<T> face(line, axis);
#pragma unroll
              for (int i = 0; i < 4; ++i) add(face.vertex(i) - face.along, left[i]);
            });
  if (line.misses()) return;
#pragma unroll
  for (int corner = 0; corner < kCorners; ++corner) add(line.cell.offset(corner), weights.at[corner]);
}

struct Cuda : CudaBackend {
  static constexpr bool kAddsInAnyOrder = true;

  template <typename T>
  static void backproject(const RayBundle<T>& rays, const T* values, void* sums, const double* scale) {
    constexpr int kWidest = std::is_same_v<T, float> ? 4 : 1;
    const int widest = scale == nullptr ? kWidest : 1;
    dispatch_vector_width<kWidest, 1>(vector_width(widest, {rays.channels}, values, static_cast<const T*>(sums)),
                                      [&](auto width) {
                                        launch(backproject_kernel<width.value, T>, blocks(rays.count, kThreads),
                                               kThreads, 0, rays, values, sums, scale);
                                      });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { LineOps<Cuda>::implement(m); }

}  // namespace voxelfield
