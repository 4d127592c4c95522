// From vertices to points: sampling.
#pragma once

#include "lanes.cuh"

namespace voxelfield {

template <typename Locator, typename T>
__device__ __forceinline__ auto find_stencil(const Locator& locator, const T* points, int64_t index) {
  return locator(points, index);
}

// The padding is the same for all points: one branch on it spares a selection wherever a vertex could be missing.
template <typename T>
__device__ __forceinline__ auto find_stencil(const GridLocator<T, true>& locator, const T* points, int64_t index) {
  return locator.padding == Padding::kZeros ? locator.find(points, index, std::false_type{})
                                            : locator.find(points, index, std::true_type{});
}

// The two threads of a vector each hold the sum of one side: they exchange halves, and each completes one.
template <int Width, typename T>
__device__ __forceinline__ auto exchange_halves(const Vector<T, Width>& sum, const Lane& lane) {
  constexpr int kHalf = Width > 1 ? Width / 2 : 1, kOther = Width / 2;
  Vector<T, kHalf> half;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T keep = lane.upper ? sum.lane[i + kOther] : sum.lane[i];
    const T give = lane.upper ? sum.lane[i] : sum.lane[i + kOther];
    half.lane[i] = keep + __shfl_sync(kFullWarp, give, lane.partner);
  }
  return half;
}

// What the threads of a point need to know of its stencil.
template <typename T, typename offset_t>
struct StagedStencil {
  T weight[2][kCorners / 2];  // of the corners of either side along z
  offset_t origin;            // negative: the stencil is empty
  offset_t step[3];
};

// One level whose channels are served at once. Each thread of a warp works out the stencil of one point; then all of
// them go through those points, a few at a time.
template <typename scalar_t, int Width, typename Weights, typename Locator, typename T>
__global__ void __launch_bounds__(128)
    gather_staged_kernel(const Level<Locator, const scalar_t> level, const T* __restrict__ points,
                         const T* __restrict__ directions, scalar_t* __restrict__ out, int64_t n, LaneLayout layout) {
  using offset_t = typename Locator::offset_t;
  constexpr int kUnroll = 2;
  __shared__ StagedStencil<T, offset_t> staged[128 / kWarp][kWarp];
  auto* const own_staged = staged[threadIdx.x / kWarp];
  const int64_t begin = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp * kWarp;
  const int own = threadIdx.x % kWarp;
  if (begin >= n) return;
  const int count = n - begin < kWarp ? static_cast<int>(n - begin) : kWarp;
  {
    const int64_t index = begin + min(own, count - 1);
    const auto s = find_stencil(level.locator, points, index);
    const Weights weights(directions, index);
    StagedStencil<T, offset_t> stencil;
#pragma unroll
    for (int k = 0; k < kCorners; ++k) stencil.weight[k & 1][k >> 1] = weights(s, k, 0);
    stencil.origin = s.empty ? -1 : s.origin;
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) stencil.step[axis] = s.step[axis];
    own_staged[own] = stencil;
  }
  __syncwarp();

  const Lane lane(layout);
  const int64_t columns = level.locator.channels;
  const scalar_t* source = level.data + lane.vector * Width;
  scalar_t* row = out + begin * columns + lane.vector * Width + (lane.upper ? Width / 2 : 0);
  for (int first = 0; first < count; first += kUnroll * layout.points) {
    Vector<scalar_t, Width> corner[kUnroll][kCorners / 2];
    const StagedStencil<T, offset_t>* stencil[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Threads without a point read along with the last one: a branch would keep the loads from overlapping.
      stencil[u] = own_staged + min(first + u * layout.points + lane.point, count - 1);
      const offset_t origin = stencil[u]->origin;
      const scalar_t* base = source + (origin < 0 ? 0 : origin + (lane.upper ? stencil[u]->step[2] : 0));
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) {
        corner[u][k] =
            load_constant<Width>(base + ((k & 2 ? stencil[u]->step[0] : 0) + (k & 1 ? stencil[u]->step[1] : 0)));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Vector<T, Width> sum{};
      // What an empty stencil would read is not to be trusted: NaN times zero is NaN.
      if (stencil[u]->origin >= 0) {
#pragma unroll
        for (int k = 0; k < kCorners / 2; ++k) {
          const T weight = stencil[u]->weight[lane.upper ? 1 : 0][k];
#pragma unroll
          for (int i = 0; i < Width; ++i) sum.lane[i] += weight * static_cast<T>(corner[u][k].lane[i]);
        }
      }
      const auto half = exchange_halves(sum, lane);
      const int at = first + u * layout.points + lane.point;
      if (lane.active && at < count && (Width > 1 || !lane.upper)) {
        store_global(row + at * columns, narrow<scalar_t>(half));
      }
    }
  }
}

constexpr int kGatherThreads = 256;

// `Single`: one level, whose channels are served at once. `row_buffer`: the channels of every level are served at once
// and a warp's rows fit shared memory; each level's part of a row is a short piece, so rows are put together there
// first.
template <typename scalar_t, int Width, typename Weights, bool Single, typename Locator, typename T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ Levels<Locator, const scalar_t> levels, const T* __restrict__ points,
                  const T* __restrict__ directions, scalar_t* __restrict__ out, int64_t n, LaneLayout layout,
                  bool row_buffer) {
  constexpr int kSets = Weights::kSets;
  using offset_t = typename Locator::offset_t;  // the launch sees to it that points and rows are in its range, too
  extern __shared__ __align__(16) unsigned char shared[];
  const offset_t count = static_cast<offset_t>(n), columns = static_cast<offset_t>(levels.columns);
  const int row_elements = static_cast<int>(levels.columns);
  scalar_t* const rows = reinterpret_cast<scalar_t*>(shared) + threadIdx.x / kWarp * layout.points * row_elements;
  const Lane lane(layout);
  const offset_t warp = (static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x) / kWarp;
  const offset_t own_index = warp * layout.points + lane.point;
  const bool active = lane.active && own_index < count;
  // Threads without a point read along with the last one: a branch around the loads would keep them from overlapping.
  const offset_t index = own_index < count ? own_index : count - 1;
  int first = 0;
  do {
    const int vector = first + lane.vector;
    Vector<T, Width> sum[kSets] = {};
    int l = 0;
    do {
      const auto& level = levels.level[Single ? 0 : l];
      const bool exists = Single || vector * Width < level.locator.channels;
      auto s = find_stencil(level.locator, points, index);
      s.take_side(2, lane.upper);
      const Weights weights(directions, index);
      const auto origin = exists ? s.origin + vector * Width : 0;
      Vector<scalar_t, Width> corner[kCorners / 2];
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) {
        corner[k] = load_constant<Width>(level.data + (origin + (k & 2 ? s.step[0] : 0) + (k & 1 ? s.step[1] : 0)));
      }
      // What an empty stencil would read is not to be trusted: NaN times zero is NaN.
      if (Single || (exists && !s.empty)) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
          for (int k = 0; k < kCorners / 2; ++k) {
            const T weight = weights(s, 2 * k, set);
#pragma unroll
            for (int i = 0; i < Width; ++i) sum[set].lane[i] += weight * static_cast<T>(corner[k].lane[i]);
          }
        }
      }
      if (!Single && levels.sum && l + 1 < levels.count) continue;
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        auto half = exchange_halves(sum[set], lane);
        if (Single && s.empty) half = {};
        if (active && exists && (Width > 1 || !lane.upper)) {
          const int channel = vector * Width + (lane.upper ? Width / 2 : 0);
          if (!Single && row_buffer) {
            store(rows + lane.point * row_elements + static_cast<int>(level.column) + channel, narrow<scalar_t>(half));
          } else {
            const offset_t column = Single ? channel : static_cast<offset_t>(level.column) + channel;
            store_global(out + ((set * count + index) * columns + column), narrow<scalar_t>(half));
          }
        }
        sum[set] = {};
      }
    } while (!Single && ++l < levels.count);
    first += layout.vectors;
  } while (!Single && first < layout.most_vectors);
  if (Single || !row_buffer) return;
  __syncwarp();
  const offset_t begin = warp * layout.points, left = count - begin;
  const int elements = row_elements * static_cast<int>(left < layout.points ? (left > 0 ? left : 0) : layout.points);
  for (int i = threadIdx.x % kWarp * Width; i < elements; i += kWarp * Width) {
    store_global(out + (begin * columns + i), load<Width>(rows + i));
  }
}

}  // namespace voxelfield
