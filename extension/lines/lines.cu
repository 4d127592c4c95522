// Lines through grids on CUDA: a thread walks one ray. Backprojection sums the weights of a vertex over consecutive
// cells of a ray before it adds them, which halves the number of atomics.
#include "common/backend.cuh"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

template <int Width, typename T>
__global__ void __launch_bounds__(kThreads)
    backproject_kernel(const __grid_constant__ Backprojection<T> job, void* __restrict__ sums,
                       const double* __restrict__ scale) {
  const int64_t ray = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (ray >= job.rays.count) return;
  Line<T> line(job.rays, ray);
  if (line.misses()) return;
  const int64_t first = job.rays.grid_of(ray) * job.rays.vertices();
  const T* const values = job.values + ray * job.labels.count * job.channels;
  const double per_one = scale == nullptr ? 0 : *scale;
  const auto add = [&](int64_t vertex, T weight) {
    int64_t label;
    if (weight == T(0) || !job.labels.find(vertex, label)) return;
    const int64_t at = (first + vertex) * job.channels;
    for (int64_t c = 0; c < job.channels; c += Width) {
      Vector<T, Width> term = load_constant<Width>(values + label * job.channels + c);
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
  CornerValues<T> weights{};
  line.walk(
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
#pragma unroll
  for (int corner = 0; corner < kCorners; ++corner) add(line.cell.offset(corner), weights.at[corner]);
}

struct Cuda : CudaBackend {
  static constexpr bool kAddsInAnyOrder = true;

  template <typename T>
  static void backproject(const Backprojection<T>& job, void* sums, const double* scale) {
    const int widest = scale == nullptr && std::is_same_v<T, float> ? 4 : 1;
    dispatch_vector_width<4, 1>(
        vector_width(widest, {job.channels}, job.values, static_cast<const T*>(sums)), [&](auto width) {
          constexpr int kWidth = std::is_same_v<T, float> ? width.value : 1;
          launch(backproject_kernel<kWidth, T>, blocks(job.rays.count, kThreads), kThreads, 0, job, sums, scale);
        });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { LineOps<Cuda>::implement(m); }

}  // namespace voxelfield
