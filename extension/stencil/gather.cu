// From vertices to points on CUDA: sampling, and the gradient with respect to the points.
#include <numeric>

#include "common/backend.cuh"
#include "stencil/levels.cuh"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

template <typename Locator>
constexpr bool kNarrow = std::is_same_v<typename Locator::offset_t, int32_t>;

template <typename Locator, typename T>
__device__ __forceinline__ auto find_stencil(const Locator& locator, const T* points, int64_t index) {
  if constexpr (kNarrow<Locator>) {
    // The padding is the same for all points, so a single branch replaces a select for each vertex that could be
    // missing.
    return locator.padding == Padding::kZeros ? locator.find(points, index, std::false_type{})
                                              : locator.find(points, index, std::true_type{});
  } else {
    return locator(points, index);
  }
}

// The two threads of a vector hold the sums of its two sides along z. They exchange halves, and each thread completes
// one half.
template <int Width, typename T>
__device__ __forceinline__ auto exchange_halves(const Vector<T, Width>& sum, const Lane& lane) {
  constexpr int kHalf = Width > 1 ? Width / 2 : 1, kOther = Width / 2;
  Vector<T, kHalf> half;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const T mine = lane.upper ? sum.lane[i + kOther] : sum.lane[i];
    const T give = lane.upper ? sum.lane[i] : sum.lane[i + kOther];
    half.lane[i] = mine + __shfl_sync(kFullWarp, give, lane.partner);
  }
  return half;
}

// How a warp shares points whose two vertices along z are read together, because they are adjacent in memory.
// Neighbouring threads read the aligned words of `Width` channels that contain them. The vertices may begin and end in
// the middle of a word.
struct WordLayout {
  int lanes;            // threads per point
  int points;           // points per warp; 0 if a point needs more threads than a warp has
  unsigned reciprocal;  // 2^16 / lanes, rounded up

  WordLayout(int64_t channels, int width)
      : lanes(static_cast<int>((2 * channels + width - std::gcd(channels, width) + width - 1) / width)),
        points(kWarp / lanes),
        reciprocal((65536 + lanes - 1) / lanes) {}
};

// The part of a stencil that the threads of a point read from shared memory.
template <typename T>
struct alignas(16) StagedStencil {
  int32_t origin;          // first element of the word in which the vertices begin
  int32_t step[2];         // along x and y
  int32_t last_word;       // index of the last word that contains the vertices
  T weight[kCorners / 2];  // weights of the four rows along z
  T along_z[2];            // weights of the two vertices of a row
  int32_t vertices;        // number of vertices along z; 0 if the stencil is empty
  int32_t skip;            // channels between the beginning of the word and that of the vertices
};

constexpr int kStagedThreads = 128;

// Samples one level of a 16-bit grid. Each thread of a warp computes the stencil of one point. The whole warp then
// processes these points, a few at a time. The number of channels must be a multiple of `Store`, the number of channels
// that a thread stores at once. Rows of vertices along z must begin and end at word boundaries, and n * channels must
// fit in 32 bits.
template <typename scalar_t, int Width, int Store, typename T>
__global__ void __launch_bounds__(kStagedThreads)
    gather_staged_kernel(const Level<GridLocator<T, true>, const scalar_t> level, const T* __restrict__ points,
                         scalar_t* __restrict__ out, int64_t n, WordLayout layout) {
  static_assert(sizeof(scalar_t) == 2 && Width % Store == 0 && (Width & (Width - 1)) == 0);
  constexpr int kUnroll = 2, kWarps = kStagedThreads / kWarp;
  __shared__ StagedStencil<T> all_staged[kWarps][kWarp];
  __shared__ __align__(sizeof(Vector<T, Width>)) T all_sums[kWarps][kWarp * Width];
  auto* const staged = all_staged[threadIdx.x / kWarp];
  const int count = static_cast<int>(n), channels = static_cast<int>(level.locator.channels);
  const int begin = (blockIdx.x * kWarps + threadIdx.x / kWarp) * kWarp, thread = threadIdx.x % kWarp;
  if (begin >= count) return;
  const int last = min(kWarp, count - begin) - 1;
  {
    const auto s = find_stencil(level.locator, points, begin + min(thread, last));
    StagedStencil<T> own;
#pragma unroll
    for (int k = 0; k < kCorners / 2; ++k) own.weight[k] = s.weight[0][k >> 1] * s.weight[1][k & 1];
    // If the upper vertex is missing, its weight is added to that of the lower vertex.
    own.along_z[0] = s.step[2] > 0 ? s.weight[2][0] : s.weight[2][0] + s.weight[2][1];
    own.along_z[1] = s.weight[2][1];
    own.vertices = s.empty ? 0 : s.step[2] > 0 ? 2 : 1;
    own.skip = s.origin & (Width - 1);
    own.origin = s.origin - own.skip;
    own.step[0] = s.step[0];
    own.step[1] = s.step[1];
    own.last_word = (own.skip + channels + s.step[2] - 1) / Width;
    staged[thread] = own;
  }
  __syncwarp();

  const int point = static_cast<int>(thread * layout.reciprocal >> 16), lane = thread - point * layout.lanes;
  T* const sums = all_sums[threadIdx.x / kWarp];
  const T* const own_sums = sums + point * layout.lanes * Width;
  const int stored = point < layout.points ? channels : 0;
  for (int first = point; first - point <= last; first += kUnroll * layout.points) {
    Vector<scalar_t, Width> word[kUnroll][kCorners / 2];
    const StagedStencil<T>* stencil[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      // Threads without a point or a word read the same data as another thread, because a branch would keep the loads
      // from overlapping.
      const auto& s = *(stencil[u] = staged + min(first + u * layout.points, last));
      const int origin = s.origin + min(lane, s.last_word) * Width;
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) {
        word[u][k] = load_constant<Width>(level.data + (origin + (k & 2 ? s.step[0] : 0) + (k & 1 ? s.step[1] : 0)));
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const auto& s = *stencil[u];
      // At this point, all threads have read the previous sums, and all loads have been issued.
      __syncwarp();
      Vector<T, Width> sum{};
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) {
        add_weighted(sum, s.weight[k], word[u][k]);
      }
      store(sums + thread * Width, sum);
      __syncwarp();
      const int at = first + u * layout.points;
      if (at > last) continue;
      for (int channel = lane * Store; channel < stored; channel += layout.lanes * Store) {
        const T* const from = own_sums + s.skip + channel;
        Vector<T, Store> value{};
        // Values beyond the vertices, or read for an empty stencil, may be NaN, and a weight of zero would not remove
        // them.
        if (s.vertices > 0) {
          const auto lower = load<Store>(from);
#pragma unroll
          for (int i = 0; i < Store; ++i) value.lane[i] = s.along_z[0] * lower.lane[i];
        }
        if (s.vertices > 1) {
          const auto upper = load<Store>(from + channels);
#pragma unroll
          for (int i = 0; i < Store; ++i) value.lane[i] += s.along_z[1] * upper.lane[i];
        }
        store_global(out + ((begin + at) * channels + channel), narrow<scalar_t>(value));
      }
    }
  }
}

constexpr int kGatherThreads = 256;

// Samples a float32 grid of one or three channels, which vectors do not fit. Two neighbouring threads process a point,
// one on each side along z, with all channels. One thread for each channel would compute as many stencils as values.
template <int Channels, typename T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_few_kernel(const Level<GridLocator<T, true>, const float> level, const T* __restrict__ points,
                      float* __restrict__ out, int64_t n) {
  const int count = static_cast<int>(n), thread = static_cast<int>(blockIdx.x * kGatherThreads + threadIdx.x);
  const int index = thread / 2;
  const bool upper = thread & 1;
  auto s = find_stencil(level.locator, points, min(index, count - 1));
  s.take_side(2, upper);
  float corner[kCorners / 2][Channels];
#pragma unroll
  for (int k = 0; k < kCorners / 2; ++k) {
#pragma unroll
    for (int c = 0; c < Channels; ++c) corner[k][c] = __ldg(level.data + (s.offset(2 * k) + c));
  }
#pragma unroll
  for (int c = 0; c < Channels; ++c) {
    T sum = 0;
#pragma unroll
    for (int k = 0; k < kCorners / 2; ++k) sum += s.value(2 * k) * corner[k][c];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    // Values read for an empty stencil may be NaN. The two threads take turns, so that they store neighbouring
    // elements.
    if (index < count && upper == (c & 1)) out[index * Channels + c] = s.empty ? T(0) : sum;
  }
}

// `Single`: there is one level, and a warp processes all of its channels at once. `row_buffer`: a warp processes all
// channels of every level at once, and its rows fit in shared memory. The rows are assembled there, because one level
// writes only a short part of a row.
template <typename scalar_t, int Width, int kSets, bool Single, typename Locator, typename T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_kernel(const __grid_constant__ Levels<Locator, const scalar_t> levels, const T* __restrict__ points,
                  scalar_t* __restrict__ out, int64_t n, LaneLayout layout, bool row_buffer) {
  // The launch ensures that this type can also count all elements of points and rows.
  using offset_t = typename Locator::offset_t;
  extern __shared__ __align__(16) unsigned char shared[];
  const offset_t count = static_cast<offset_t>(n), columns = static_cast<offset_t>(levels.columns);
  const int row_elements = static_cast<int>(levels.columns);
  scalar_t* const rows = reinterpret_cast<scalar_t*>(shared) + threadIdx.x / kWarp * layout.points * row_elements;
  const Lane lane(layout);
  const offset_t warp = (static_cast<int64_t>(blockIdx.x) * kGatherThreads + threadIdx.x) / kWarp;
  const offset_t lane_index = warp * layout.points + lane.point;
  const bool active = lane.active && lane_index < count;
  // Threads without a point read the last point, because a branch around the loads would keep them from overlapping.
  const offset_t index = lane_index < count ? lane_index : count - 1;
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
      // Without a channel, the first one: beside vertex 0 instead, steps that wrap would lead out of the grid.
      const auto origin = s.origin + (exists ? vector * Width : 0);
      Vector<scalar_t, Width> corner[kCorners / 2];
#pragma unroll
      for (int k = 0; k < kCorners / 2; ++k) {
        corner[k] = load_constant<Width>(level.data + (origin + (k & 2 ? s.step[0] : 0) + (k & 1 ? s.step[1] : 0)));
      }
      // Values read for an empty stencil may be NaN, and a weight of zero would not remove them.
      if (Single || (exists && !s.empty)) {
#pragma unroll
        for (int set = 0; set < kSets; ++set) {
#pragma unroll
          for (int k = 0; k < kCorners / 2; ++k) {
            const T weight = s.corner_weight(2 * k, set);
            add_weighted(sum[set], weight, corner[k]);
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
  } while (!Single && first < layout.max_vectors);
  if (Single || !row_buffer) return;
  __syncwarp();
  const offset_t begin = warp * layout.points, left = count - begin;
  const int elements = row_elements * static_cast<int>(left < layout.points ? (left > 0 ? left : 0) : layout.points);
  for (int i = threadIdx.x % kWarp * Width; i < elements; i += kWarp * Width) {
    store_global(out + (begin * columns + i), load<Width>(rows + i));
  }
}

// `lanes` neighbouring threads, a power of two, share a point. Each sums over some of the channel vectors on one side
// along z.
template <typename scalar_t, int Width, int kSets, typename Locator, typename T>
__global__ void __launch_bounds__(kThreads)
    point_gradient_kernel(const __grid_constant__ Levels<Locator, const scalar_t> levels,
                          const scalar_t* __restrict__ values, const T* __restrict__ points, T* __restrict__ out,
                          int64_t n, int lanes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t index = thread / lanes;
  const int lane = static_cast<int>(thread) & (lanes - 1);
  const bool upper = lane >= lanes / 2;
  const int own = lane & (lanes / 2 - 1);
  T gradient[3] = {};
  if (index < n) {
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
        for (int set = 0; set < kSets; ++set) {
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
            for (int axis = 0; axis < 3; ++axis) gradient[axis] += s.corner_slope(2 * k, axis, set) * product;
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

// 16-bit rows of at least this many channels, or this many vectors, are read in words by a separate kernel.
constexpr int kWideRow = 12;
constexpr int kWideVectors = 4;
constexpr int kWord = 8;  // 16-bit channels per access

struct Cuda : CudaBackend {
  template <int kSets, typename Locator, typename scalar_t, typename T>
  static void gather(const Levels<Locator, const scalar_t>& levels, const PointsView<T, kSets>& at, scalar_t* out) {
    dispatch_levels<kSets>(levels, out, [&](auto width, const auto& located) {
      constexpr bool kNarrowOffsets = kNarrow<std::decay_t<decltype(located.level[0].locator)>>;
      // Each launch processes as many points as 32-bit offsets can address, and further points need further launches.
      // Only one set of rows advances from launch to launch.
      static_assert(!kNarrowOffsets || kSets == 1);
      const int64_t share = kNarrowOffsets ? 0x7fffffff / std::max<int64_t>(3, levels.columns) : at.count;
      for (int64_t begin = 0; begin < at.count; begin += share) {
        const PointsView<T, kSets> part{at.points + 3 * begin, std::min(share, at.count - begin)};
        gather_part<decltype(width)::value>(located, part, out + begin * levels.columns);
      }
    });
  }

  template <int kSets, typename Locator, typename scalar_t, typename T>
  static void point_gradient(const Levels<Locator, const scalar_t>& levels, const scalar_t* values,
                             const PointsView<T, kSets>& at, T* out) {
    dispatch_levels<kSets>(levels, values, [&](auto width, const auto& located) {
      using Located = std::decay_t<decltype(located.level[0].locator)>;
      constexpr int kWidth = decltype(width)::value;
      int lanes = 2;
      while (lanes < kWarp && lanes < 2 * max_vectors(levels, kWidth)) lanes *= 2;
      launch(point_gradient_kernel<scalar_t, kWidth, kSets, Located, T>, blocks(at.count, kThreads / lanes), kThreads,
             0, located, values, at.points, out, at.count, lanes);
    });
  }

 private:
  template <int Width, int kSets, typename Locator, typename scalar_t, typename T>
  static void gather_part(const Levels<Locator, const scalar_t>& levels, const PointsView<T, kSets>& at,
                          scalar_t* out) {
    if constexpr (kSpecialised<T, kSets> && std::is_same_v<Locator, GridLocator<float>>) {
      Levels<GridLocator<float, false, false>, const scalar_t> bounded(levels.columns, levels.sum);
      bool wraps = false;
      for (const auto& level : levels) {
        wraps = wraps || level.locator.is_periodic();
        bounded.add({level.locator.without_wrapping(), level.data, level.column});
      }
      if (!wraps) return gather_part<Width>(bounded, at, out);
    }
    if constexpr (kNarrow<Locator> && std::is_same_v<scalar_t, float> && Width == 1) {
      if (levels.count == 1 && (levels.columns == 1 || levels.columns == 3)) {
        const auto kernel = levels.columns == 1 ? gather_few_kernel<1, T> : gather_few_kernel<3, T>;
        return launch(kernel, blocks(at.count, kGatherThreads / 2), kGatherThreads, 0, levels.level[0], at.points, out,
                      at.count);
      }
    }
    const LaneLayout layout(max_vectors(levels, Width));
    const bool at_once = layout.max_vectors == layout.vectors;
    if constexpr (kNarrow<Locator> && sizeof(scalar_t) == 2) {
      // For a wide row of 16-bit channels, computing the stencil in every thread would take longer than moving the
      // data.
      if (levels.count == 1 && (levels.columns >= kWideRow || layout.max_vectors >= kWideVectors)) {
        constexpr int kStore = std::min(Width, 4);
        const auto& level = levels.level[0];
        const bool in_words = level.locator.resolution[2] * levels.columns % kWord == 0 &&
                              reinterpret_cast<uintptr_t>(level.data) % (kWord * sizeof(scalar_t)) == 0;
        const WordLayout words(levels.columns, in_words ? kWord : kStore);
        if (words.points > 0) {
          const auto kernel = in_words ? gather_staged_kernel<scalar_t, kWord, kStore, T>
                                       : gather_staged_kernel<scalar_t, kStore, kStore, T>;
          return launch(kernel, blocks(at.count, kStagedThreads), kStagedThreads, 0, level, at.points, out, at.count,
                        words);
        }
      }
    }
    const bool single = kNarrow<Locator> && levels.count == 1 && at_once;
    const int64_t rows = layout.points * (kGatherThreads / kWarp) * levels.columns * sizeof(scalar_t);
    const bool row_buffer = levels.count > 1 && !levels.sum && kSets == 1 && at_once && rows <= kGatherShared;
    const int shared = row_buffer ? static_cast<int>(rows) : 0;
    check_shared_memory(shared);
    const auto kernel = single ? gather_kernel<scalar_t, Width, kSets, kNarrow<Locator>, Locator, T>
                               : gather_kernel<scalar_t, Width, kSets, false, Locator, T>;
    launch(kernel, blocks(at.count, layout.points * (kGatherThreads / kWarp)), kGatherThreads, shared, levels,
           at.points, out, at.count, layout, row_buffer);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { StencilOps<Cuda>::implement_gather(m); }

}  // namespace voxelfield
