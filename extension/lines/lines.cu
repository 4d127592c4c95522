// Lines through grids on CUDA: a thread walks one ray. Backprojection is limited by the sectors that the L2 cache adds
// to. It sums the weights of a vertex over consecutive cells of a ray before it adds them, which halves the atomics.
#include "common/backend.cuh"
#include "lines/line_ops.h"

namespace voxelfield {
namespace {

template <int Width, typename T>
__global__ void __launch_bounds__(kThreads)
    backproject_kernel(const __grid_constant__ RayBundle<T> rays, const T* __restrict__ values, void* __restrict__ sums,
                       const double* __restrict__ scale) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t ray = slot < rays.slots() ? rays.ray_in(slot) : -1;
  if (ray < 0) return;
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

// The same for one channel. One atomic adds to the vertices z and z + 1 of a cell: to `pairs` (X, Y, Z, 2), in the
// place of the first of them.
__global__ void __launch_bounds__(kThreads)
    backproject_pairs_kernel(const __grid_constant__ RayBundle<float> rays, const float* __restrict__ values,
                             float* __restrict__ pairs) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t ray = slot < rays.slots() ? rays.ray_in(slot) : -1;
  if (ray < 0) return;
  Line<float> line(rays, ray);
  if (line.misses()) return;
  const float value = values[ray];
  // The first vertex of a pair in memory is that of side 1 if the ray descends.
  const bool descends = line.descends(2);
  const int64_t first = rays.grid_of(ray) * rays.vertices() + (descends ? line.cell.step[2] : 0);
  const auto add = [&](int64_t vertex, float weight, float next_weight) {
    if (weight == 0 && next_weight == 0) return;
    const float term = weight == 0 ? 0 : weight * value, next = next_weight == 0 ? 0 : next_weight * value;
    atomic_add<2>(pairs + 2 * (first + vertex), Vector<float, 2>{descends ? next : term, descends ? term : next});
  };
  const int64_t step_x = line.cell.step[0], step_y = line.cell.step[1], step_z = line.cell.step[2];
  float w[kCorners] = {};
  line.walk([] {},
            [&](float from, float to) {
              line.add_weights(from, to, w);
              return true;
            },
            [&](int axis) {
              const bool along_x = axis == 0, along_y = axis == 1;
              const int64_t before = line.cell.origin - (along_x ? step_x : along_y ? step_y : step_z);
              add(before, w[0], w[1]);
              add(before + (along_x ? step_y : step_x), along_x ? w[2] : w[4], along_x ? w[3] : w[5]);
              if (axis == 2) {  // the next cell has none of these pairs
                add(before + step_y, w[2], w[3]);
                add(before + step_x + step_y, w[6], w[7]);
              }
              w[0] = along_x ? w[4] : along_y ? w[2] : 0;
              w[1] = along_x ? w[5] : along_y ? w[3] : 0;
              w[2] = along_x ? w[6] : 0;
              w[3] = along_x ? w[7] : 0;
              w[4] = along_y ? w[6] : 0;
              w[5] = along_y ? w[7] : 0;
              w[6] = w[7] = 0;
            });
  const int64_t last = line.cell.origin;
  add(last, w[0], w[1]);
  add(last + step_y, w[2], w[3]);
  add(last + step_x, w[4], w[5]);
  add(last + step_x + step_y, w[6], w[7]);
}

struct SumPairs {
  const float* pairs;
  float* sums;

  // The last vertex of a row has no pair of its own, so that nothing is added to the first one of the next row.
  VOXELFIELD_HOST_DEVICE void operator()(int64_t vertex) const {
    sums[vertex] = pairs[2 * vertex] + (vertex > 0 ? pairs[2 * vertex - 1] : 0);
  }
};

// Whether the kernel was compiled for GPUs with atomics for two numbers. Code for older ones runs on newer ones too.
bool adds_vectors() {
#if defined(VOXELFIELD_SCALAR_ATOMICS)
  return false;
#else
  const auto kernel = reinterpret_cast<const void*>(backproject_pairs_kernel);
  return cached_query(kernel, 0, 0, [&] {
           cudaFuncAttributes attributes{};
           check_cuda(cudaFuncGetAttributes(&attributes, kernel));
           return attributes.ptxVersion;
         }) >= 90;
#endif
}

constexpr int64_t kMostPairs = int64_t{1} << 29;

struct Cuda : CudaBackend {
  static constexpr bool kAddsInAnyOrder = true;

  template <typename T>
  static void backproject(const RayBundle<T>& rays, const T* values, void* sums, const double* scale,
                          const Tensor& like) {
    const unsigned block_count = blocks(rays.slots(), kThreads);
    if constexpr (std::is_same_v<T, float>) {
      const int64_t vertices = rays.vertices() * (rays.rays_per_grid > 0 ? rays.count / rays.rays_per_grid : 1);
      const int32_t longest = std::max({rays.resolution[0], rays.resolution[1], rays.resolution[2]});
      // Memory for pairs is worth it where rays cross about as many cells as there are. At most 4 GiB are taken.
      const bool pays =
          rays.channels == 1 && rays.resolution[2] > 1 && rays.count >= vertices / longest && vertices <= kMostPairs;
      if (pays && rays.labels == nullptr && scale == nullptr && adds_vectors()) {
        const Tensor pairs = new_zeros(like, {vertices, 2}, ScalarType::Float);
        launch(backproject_pairs_kernel, block_count, kThreads, 0, rays, values, data_of(pairs));
        return for_each(vertices, SumPairs{data_of(pairs), static_cast<float*>(sums)});
      }
    }
    constexpr int kWidest = std::is_same_v<T, float> ? 4 : 1;
    const int widest = scale == nullptr ? kWidest : 1;
    dispatch_vector_width<kWidest, 1>(
        vector_width(widest, {rays.channels}, values, static_cast<const T*>(sums)), [&](auto width) {
          launch(backproject_kernel<width.value, T>, block_count, kThreads, 0, rays, values, sums, scale);
        });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { LineOps<Cuda>::implement(m); }

}  // namespace voxelfield
