// From points to vertices on CUDA: chooses how a gradient is summed into each level, sums with atomics into zeroed
// grids, and writes to cells, where every corner belongs to one point.
#include "stencil/splat_methods.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// docs/performance.md has the measurements on which these choices are based.
//
// Tiles cost more than atomics if there are few points, if there are many points per tile, or if one atomic can add to
// a whole row: a row of four float32 channels, or of one channel of a 16-bit grid, which atomics sum in float32 first.
constexpr int64_t kMinTiledPoints = 1 << 15;
constexpr int64_t kMaxPointsPerTile = 48;

template <typename scalar_t, typename T>
bool suits_tiles(const GridLocator<T>& locator, int64_t n, SplatMethod method) {
  if (method == SplatMethod::kAtomic) return false;
  if (method == SplatMethod::kTiled || method == SplatMethod::kDeterministic) return true;
  const int64_t narrow = sizeof(scalar_t) == 2 ? 1 : std::is_same_v<scalar_t, float> ? 4 : 0;
  return n >= kMinTiledPoints && n / kMaxPointsPerTile <= locator.vertices(n) / kSplatTileVertices &&
         locator.channels > narrow && 8 * n < kMaxEntries;
}

// If points are dense, the threads of a point process this many consecutive points, and add up those that share a cell
// before they access memory. Samples of a ray often share a cell. If points are sparse, this would only reduce the
// number of threads.
constexpr int kWalk = 8;
// Gradients of up to this many channels are added up in runs of points within a warp instead, unless points are dense
// and a row takes several vectors.
constexpr int kMaxRunChannels = 3;

template <typename scalar_t, int Width, int kSets, int Walk, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    splat_kernel(const __grid_constant__ Levels<Locator, T> levels, const scalar_t* __restrict__ values,
                 const T* __restrict__ points, int64_t n, LaneLayout layout) {
  const Lane lane(layout);
  if (!lane.active) return;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t begin = (warp * layout.points + lane.point) * Walk;
  const int64_t end = begin + Walk < n ? begin + Walk : n;
  for (int l = 0; l < levels.count; ++l) {
    const auto& level = levels.level[l];
    for (int vector = lane.vector; vector * Width < level.locator.channels; vector += layout.vectors) {
      Vector<T, Width> sum[kCorners / 2] = {};
      Stencil<T, typename Locator::offset_t> pending;
      pending.empty = true;
      const auto flush = [&] {
        if (pending.empty) return;
#pragma unroll
        for (int k = 0; k < kCorners / 2; ++k) {
          atomic_add<Width>(level.data + pending.offset(2 * k) + vector * Width, sum[k]);
          sum[k] = {};
        }
      };
      for (int64_t index = begin; index < end; ++index) {
        auto s = level.locator(points, index);
        if (s.empty) continue;
        s.take_side(2, lane.upper);
        // Equal origins and steps mean equal vertices.
        if (s.origin != pending.origin || s.step[0] != pending.step[0] || s.step[1] != pending.step[1]) flush();
        pending = s;
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
          const Vector<scalar_t, Width> value =
              load_constant<Width>(values + (set * n + index) * levels.columns + level.column + vector * Width);
#pragma unroll
          for (int k = 0; k < kCorners / 2; ++k) {
            const T weight = s.corner_weight(2 * k, set);
            add_weighted(sum[k], weight, value);
          }
        }
        if (Walk == 1) break;
      }
      flush();
    }
  }
}

// Adds up points that follow each other in a cell, as samples of a ray often do, within a warp: each atomic then adds
// the sum of a run of points. Used for few channels, where a warp processes many points and the number of atomics
// limits the speed.
template <typename scalar_t, int Width, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    splat_runs_kernel(const __grid_constant__ Levels<Locator, T> levels, const scalar_t* __restrict__ values,
                      const T* __restrict__ points, int64_t n, LaneLayout layout) {
  const Lane lane(layout);
  const int per_point = 2 * layout.vectors;
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
  const int64_t lane_index = warp * layout.points + lane.point, index = lane_index < n ? lane_index : n - 1;
  for (int l = 0; l < levels.count; ++l) {
    const auto& level = levels.level[l];
    auto s = level.locator(points, index);
    const bool adds = lane.active && lane_index < n && lane.vector * Width < level.locator.channels && !s.empty;
    s.take_side(2, lane.upper);
    Vector<T, Width> sum[kCorners / 2] = {};
    if (adds) {
      const Vector<scalar_t, Width> value =
          load_constant<Width>(values + index * levels.columns + level.column + lane.vector * Width);
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) add_weighted(sum[k], s.value(2 * k), value);
    }
    // Equal origins and steps mean equal vertices. Steps are equal unless one of them is 0.
    const int cell = adds ? s.origin : -1, sides = (s.step[0] != 0 ? 2 : 0) + (s.step[1] != 0 ? 1 : 0);
    const int next_cell = __shfl_down_sync(kFullWarp, cell, per_point);
    const int next_sides = __shfl_down_sync(kFullWarp, sides, per_point);
    const bool joined = adds && lane.point + 1 < layout.points && next_cell == cell && next_sides == sides;
    if (__any_sync(kFullWarp, joined)) {
      // `reaches`: the point `distance` places on belongs to the same run.
      bool reaches = joined;
      for (int distance = 1; distance < layout.points; distance *= 2) {
#pragma unroll
        for (int k = 0; k < kCorners / 2; ++k) {
#pragma unroll
          for (int i = 0; i < Width; ++i) {
            const T further = __shfl_down_sync(kFullWarp, sum[k].lane[i], distance * per_point);
            if (reaches) sum[k].lane[i] += further;
          }
        }
        const bool goes_on = __shfl_down_sync(kFullWarp, reaches, distance * per_point);
        reaches = reaches && goes_on;
      }
    }
    const bool follows = __shfl_up_sync(kFullWarp, joined, per_point) && lane.point > 0;
    if (!adds || follows) continue;
#pragma unroll
    for (int k = 0; k < kCorners / 2; ++k) {
      atomic_add<Width>(level.data + s.offset(2 * k) + lane.vector * Width, sum[k]);
    }
  }
}

// `dense`: there are more points than vertices.
template <int kSets, typename scalar_t, typename Locator, typename T>
void launch_atomic(const Levels<Locator, T>& levels, const SplatInput<scalar_t, kSets>& input, bool dense) {
  const PointsView<T, kSets>& at = input.at;
  dispatch_levels<kSets>(levels, input.values, [&](auto width, const auto& located) {
    constexpr int kWidth = decltype(width)::value;
    const LaneLayout layout(max_vectors(levels, kWidth));
    using Located = std::decay_t<decltype(located.level[0].locator)>;
    if constexpr (std::is_same_v<typename Located::offset_t, int32_t> && kWidth <= 2) {
      if (layout.max_vectors * kWidth <= kMaxRunChannels && (!dense || layout.max_vectors == 1)) {
        const int64_t per_block = layout.points * (kThreads / kWarp);
        return CudaBackend::launch(splat_runs_kernel<scalar_t, kWidth, Located, T>,
                                   CudaBackend::blocks(at.count, per_block), kThreads, 0, located, input.values,
                                   at.points, at.count, layout);
      }
    }
    // Derivatives and float64 always walk, which avoids compiling another variant.
    constexpr int kShortest = kSpecialised<T, kSets> ? 1 : kWalk;
    const int walk = dense ? kWalk : kShortest;
    const auto kernel = dense ? splat_kernel<scalar_t, kWidth, kSets, kWalk, Located, T>
                              : splat_kernel<scalar_t, kWidth, kSets, kShortest, Located, T>;
    const int64_t per_block = layout.points * (kThreads / kWarp) * walk;
    CudaBackend::launch(kernel, CudaBackend::blocks(at.count, per_block), kThreads, 0, located, input.values, at.points,
                        at.count, layout);
  });
}

template <int kSets, typename scalar_t, typename Locator, typename T>
void splat_atomic(const Levels<Locator, T>& levels, const SplatInput<scalar_t, kSets>& input) {
  Levels<Locator, T> dense(levels.columns);
  for (const auto& level : levels) {
    if (input.at.count > level.locator.vertices(input.at.count)) {
      dense.add(level);
    } else {
      // This level gets its own launch, because two large grids would evict each other from the L2 cache.
      Levels<Locator, T> alone(levels.columns);
      alone.add(level);
      launch_atomic(alone, input, false);
    }
  }
  if (dense.count > 0) launch_atomic(dense, input, true);
}

template <typename scalar_t, int Width, int kSets, typename T>
__global__ void __launch_bounds__(kThreads)
    write_cells_kernel(const __grid_constant__ Levels<CellLocator<T>, scalar_t> levels,
                       const scalar_t* __restrict__ values, const T* __restrict__ points, int64_t n) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= n) return;
  const auto s = levels.level[0].locator(points, index);
  const int64_t channels = levels.columns;
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * Width; c < channels;
       c += static_cast<int64_t>(blockDim.x) * Width) {
    Vector<scalar_t, Width> value[kSets];
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      value[set] = load_constant<Width>(values + (set * n + index) * channels + c);
    }
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      Vector<T, Width> sum{};
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const T weight = s.corner_weight(k, set);
        add_weighted(sum, weight, value[set]);
      }
      if (s.empty) sum = {};
      store_global(levels.level[0].data + s.offset(k) + c, narrow<scalar_t>(sum));
    }
  }
}

struct Cuda : CudaBackend {
  template <int kSets, typename T, typename scalar_t>
  static std::vector<Tensor> splat(const Levels<GridLocator<T>, scalar_t>& levels,
                                   const std::vector<std::vector<int64_t>>& shapes, const Tensor& values,
                                   const PointsView<T, kSets>& at, SplatMethod method) {
    const SplatInput<scalar_t, kSets> input{values, data_of(values), at};
    const int64_t n = at.count;
    // Levels that are summed the same way share their launches.
    SplatLevels<scalar_t> tiled(levels.columns);
    SplatLevels<T> atomic(levels.columns);
    const bool deterministic = method == SplatMethod::kDeterministic;
    const int64_t levels_at_once = std::max<int64_t>((kMaxEntries - 1) / (8 * n), 1);
    std::vector<Tensor> sums;
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const GridLocator<T>& locator = level.locator;
      const bool uses_tiles = suits_tiles<scalar_t>(locator, n, method);
      // If several threads add to a vertex in memory, 16-bit grids are summed in float32.
      sums.push_back(new_empty(values, shapes[l], uses_tiles ? values.scalar_type() : scalar_type_of<T>()));
      if (locator.channels == 0) continue;
      void* data = sums[l].mutable_data_ptr();
      if (uses_tiles) {
        if (tiled.count == levels_at_once) {
          splat_tiled(tiled, input, deterministic);
          tiled.count = 0;
        }
        tiled.add({locator, static_cast<scalar_t*>(data), level.column});
      } else {
        check_cuda(cudaMemsetAsync(data, 0, sums[l].numel() * sizeof(T), stream()));
        atomic.add({locator, static_cast<T*>(data), level.column});
      }
    }
    splat_atomic(atomic, input);
    if (tiled.count > 0) splat_tiled(tiled, input, deterministic);
    for (Tensor& sum : sums) {
      if (sum.scalar_type() != values.scalar_type()) sum = torch::stable::to(sum, values.scalar_type());
    }
    return sums;
  }

  template <typename scalar_t, typename Locator, typename T>
  static void accumulate(const Levels<Locator, T>& levels, const Tensor& values, const PointsView<T, 1>& at) {
    splat_atomic(levels, SplatInput<scalar_t, 1>{values, data_of(values), at});
  }

  template <int kSets, typename T, typename scalar_t>
  static void write_cells(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values,
                          const PointsView<T, kSets>& at) {
    dispatch_levels<kSets>(levels, values, [&](auto width, const auto& /*levels*/) {
      constexpr int kWidth = decltype(width)::value;
      const int64_t vectors = levels.columns / kWidth;
      const unsigned x = static_cast<unsigned>(std::min<int64_t>(vectors, kThreads));
      const dim3 threads(x, kThreads / x);
      launch(write_cells_kernel<scalar_t, kWidth, kSets, T>, blocks(at.count, threads.y), threads, 0, levels, values,
             at.points, at.count);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { StencilOps<Cuda>::implement_splat(m); }

}  // namespace voxelfield
