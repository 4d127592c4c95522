// Interpolation by separable kernels on the CPU. float32 grids with few channels, or with a plane for each channel, are
// sampled at several points at once, one to a lane of a vector register; other grids in several channels at once.
//
// Sums are divided into tiles of planes along the first axis, each summed by one thread: from the points in their
// order, or if the grid is large from those around its planes, in the order of their cells. Every vertex receives its
// terms in an order that depends only on the points.
#include <functional>
#include <memory>

#include "common/backend.h"
#include "stencil/batches.h"
#include "stencil/separable_ops.h"

namespace voxelfield {
namespace {

// Without AVX-512 versions, which would be a fifth of this file's code.
#if defined(VOXELFIELD_HAS_F16C) && __GNUC__ >= 12 && !defined(__clang__) && defined(__linux__)
#define VOXELFIELD_TWO_VERSIONS __attribute__((noinline, target_clones("arch=x86-64-v3", "default")))
#else
#define VOXELFIELD_TWO_VERSIONS
#endif

// Kernels of float32 grids without derivatives are compiled for several instruction sets, into which the work is
// inlined.
template <typename Work>
VOXELFIELD_TWO_VERSIONS void run_versioned(const Work& work, int64_t begin, int64_t end) {
  work(begin, end);
}

void for_each_part(int64_t n, int64_t length, const std::function<void(int64_t, int64_t)>& work) {
  for_each_range(n, length, work);
}

template <bool kVersioned, typename Work>
void for_each_part(int64_t n, int64_t length, const Work& work) {
  for_each_part(n, length, [&work](int64_t begin, int64_t end) {
    if constexpr (kVersioned) {
      run_versioned(work, begin, end);
    } else {
      work(begin, end);
    }
  });
}

template <typename T, int kSets>
constexpr bool kHot = std::is_same_v<T, float> && kSets == 1;

// The vertices of a batch of points in one grid whose offsets fit in 32 bits.
template <int D, int K, int kOrder>
struct TapArrays {
  int32_t offset[D][K][kPointsPerBatch];
  float weight[D][kOrder + 1][K][kPointsPerBatch];
  int32_t empty[kPointsPerBatch];

  struct Point {
    TapArrays* arrays;
    int64_t i;

    VOXELFIELD_HOST_DEVICE void set_axis(int axis, int k, int32_t vertex, int64_t stride, float value, float slope,
                                         float bend) const {
      arrays->offset[axis][k][i] = vertex * static_cast<int32_t>(stride);
      arrays->weight[axis][0][k][i] = value;
      if constexpr (kOrder > 0) arrays->weight[axis][1][k][i] = slope;
      static_cast<void>(bend);
    }
    VOXELFIELD_HOST_DEVICE int32_t offset_of(int axis, int k) const { return arrays->offset[axis][k][i]; }
    VOXELFIELD_HOST_DEVICE float weight_of(int axis, int order, int k) const {
      return arrays->weight[axis][order][k][i];
    }
  };

  template <typename Locator>
  VOXELFIELD_HOST_DEVICE void find(const Locator& locator, const float* points, int64_t count) {
    // The common paddings have their own loops, from which the compiler removes the branches of the others.
    if (locator.padding == Padding::kBorder) return find_each(locator, Padding::kBorder, points, count);
    if (locator.padding == Padding::kZeros) return find_each(locator, Padding::kZeros, points, count);
    find_each(locator, locator.padding, points, count);
  }

  template <typename Locator>
  VOXELFIELD_HOST_DEVICE void find_each(const Locator& locator, Padding padding, const float* points, int64_t count) {
    std::fill_n(empty, kPointsPerBatch, 0);
    for (int axis = 0; axis < D; ++axis) {
      float along[kPointsPerBatch];
      for (int64_t i = 0; i < count; ++i) along[i] = points[D * i + locator.coordinate(axis)];
      VOXELFIELD_VECTORIZE
      for (int64_t i = 0; i < count; ++i) {
        Point point{this, i};
        empty[i] |= locator.find_axis(axis, along[i], padding, point) ? 1 : 0;
      }
    }
  }
};

// The number of points of the next batch, which lie in one grid.
VOXELFIELD_HOST_DEVICE int64_t batch_size(int64_t first, int64_t end, int64_t points_per_grid) {
  const int64_t left = (first / points_per_grid + 1) * points_per_grid - first;
  return std::min(std::min(kPointsPerBatch, end - first), left);
}

struct LoadVertex {
  const float* data;
  VOXELFIELD_HOST_DEVICE float operator()(int32_t at) const { return data[at]; }
};

template <typename Job>
bool takes_points_at_once(const Job& job) {
  return job.locator.stride[0] * job.locator.resolution[0] < 0x7fffffff &&
         (job.channel_stride > 1 || job.channels <= kMaxPointwiseChannels);
}

template <int D, int K>
struct GatherPoints {
  const SeparableJob<float, D, K>& job;
  const float *data, *points;
  float* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    const SeparableLocator<float, D, K> locator = job.locator;
    const ValueLayout layout = job.layout;
    TapArrays<D, K, 0> taps;
    for (int64_t first = begin, count = 0; first < end; first += count) {
      count = batch_size(first, end, layout.points_per_grid);
      taps.find(locator, points + D * first, count);
      const int64_t grid = job.grid_of(first);
      for (int64_t c = 0; c < job.channels; ++c) {
        const LoadVertex load{data + grid * locator.grid_stride + c * job.channel_stride};
        float* const row = out + layout(first, grid) + c * layout.channel_stride;
        VOXELFIELD_VECTORIZE
        for (int64_t i = 0; i < count; ++i) {
          const typename TapArrays<D, K, 0>::Point point{&taps, i};
          const auto jet = sum_axis<0, 0, float, D, K, K>(point, int32_t{0}, load);
          // Values read for a point without vertices may be NaN, and a weight of zero would not remove them.
          row[i * layout.row_stride] = taps.empty[i] ? 0.f : jet.value;
        }
      }
    }
  }
};

template <int D, int K>
struct PointGradientPoints {
  const SeparableJob<float, D, K>& job;
  const float *values, *data, *points;
  float* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    const SeparableLocator<float, D, K> locator = job.locator;
    const ValueLayout layout = job.layout;
    TapArrays<D, K, 1> taps;
    float sum[D][kPointsPerBatch];
    for (int64_t first = begin, count = 0; first < end; first += count) {
      count = batch_size(first, end, layout.points_per_grid);
      taps.find(locator, points + D * first, count);
      const int64_t grid = job.grid_of(first);
      for (int a = 0; a < D; ++a) std::fill_n(sum[a], kPointsPerBatch, 0.f);
      for (int64_t c = 0; c < job.channels; ++c) {
        const LoadVertex load{data + grid * locator.grid_stride + c * job.channel_stride};
        const float* const row = values + layout(first, grid) + c * layout.channel_stride;
        VOXELFIELD_VECTORIZE
        for (int64_t i = 0; i < count; ++i) {
          const typename TapArrays<D, K, 1>::Point point{&taps, i};
          const auto jet = sum_axis<1, 0, float, D, K, K>(point, int32_t{0}, load);
          for (int a = 0; a < D; ++a) sum[a][i] += row[i * layout.row_stride] * jet.slope[a];
        }
      }
      for (int a = 0; a < D; ++a) {
        float* const to = out + D * first + locator.coordinate(a);
        for (int64_t i = 0; i < count; ++i) to[D * i] = taps.empty[i] ? 0.f : sum[a][i];
      }
    }
  }
};

// Neighbouring channels of a vertex.
template <int kWidth, typename T>
struct LoadChannels {
  const T* data;

  VOXELFIELD_HOST_DEVICE Lanes<T, kWidth> operator()(int64_t at) const {
    Lanes<T, kWidth> value;
    VOXELFIELD_VECTORIZE
    for (int i = 0; i < kWidth; ++i) value.lane[i] = data[at + i];
    return value;
  }
};

// Calls f.template block<kWidth>(c) for all channels: several at a time if they are neighbours in memory.
template <typename F>
VOXELFIELD_HOST_DEVICE void for_each_channel(int64_t channels, bool neighbours, const F& f) {
  int64_t c = 0;
  if constexpr (F::kWide) {
    for (; neighbours && c + 8 <= channels; c += 8) f.template block<8>(c);
  }
  for (; c < channels; ++c) f.template block<1>(c);
}

template <int kSets, typename T, int D, int K>
struct GatherChannels {
  static constexpr int kOrder = kSets > 1;
  static constexpr bool kWide = kHot<T, kSets>;

  const SeparableJob<T, D, K>& job;
  const Taps<T, D, K>& taps;
  const T* data;
  T* row;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t c) const {
    const LoadChannels<kWidth, T> load{data + c * job.channel_stride};
    Jet<Lanes<T, kWidth>, D> jet{};
    if (!taps.empty) jet = interpolate<kOrder, Lanes<T, kWidth>>(taps, load);
    put(c, 0, jet.value);
    for (int a = 0; a < D && kOrder > 0; ++a) put(c, 1 + job.locator.coordinate(a), jet.slope[a]);
  }

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void put(int64_t c, int64_t set, const Lanes<T, kWidth>& value) const {
    T* const to = row + set * job.layout.set_stride + c * job.layout.channel_stride;
    for (int i = 0; i < kWidth; ++i) to[i] = value.lane[i];
  }
};

template <int kSets, typename T, int D, int K>
struct PointGradientChannels {
  static constexpr bool kWide = kHot<T, kSets>;

  const SeparableJob<T, D, K>& job;
  const Taps<T, D, K>& taps;
  const T *data, *row;
  T* gradient;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t c) const {
    const LoadChannels<kWidth, T> load{data + c * job.channel_stride};
    const auto jet = interpolate<(kSets > 1 ? 2 : 1), Lanes<T, kWidth>>(taps, load);
    for (int a = 0; a < D; ++a) {
      const int axis = job.locator.coordinate(a);
      add(c, 0, axis, jet.slope[a]);
      for (int b = 0; b < D && kSets > 1; ++b) {
        add(c, 1 + job.locator.coordinate(b), axis, jet.bend[std::min(a, b)][std::max(a, b)]);
      }
    }
  }

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void add(int64_t c, int64_t set, int axis, const Lanes<T, kWidth>& slope) const {
    const T* const from = row + set * job.layout.set_stride + c * job.layout.channel_stride;
    T sum = 0;
    for (int i = 0; i < kWidth; ++i) sum += from[i] * slope.lane[i];
    gradient[axis] += sum;
  }
};

template <int kSets, typename T, int D, int K>
struct GatherRows {
  const SeparableJob<T, D, K>& job;
  const T* data;
  const T* points;
  T* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t grid = job.grid_of(i);
      const auto taps = job.locator(points, i, grid);
      const GatherChannels<kSets, T, D, K> row{job, taps, data, out + job.layout(i, grid)};
      for_each_channel(job.channels, job.channel_stride == 1, row);
    }
  }
};

template <int kSets, typename T, int D, int K>
struct PointGradientRows {
  const SeparableJob<T, D, K>& job;
  const T *values, *data;
  const T* points;
  T* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      std::fill_n(out + D * i, D, T(0));
      const int64_t grid = job.grid_of(i);
      const auto taps = job.locator(points, i, grid);
      if (taps.empty) continue;
      const PointGradientChannels<kSets, T, D, K> row{job, taps, data, values + job.layout(i, grid), out + D * i};
      for_each_channel(job.channels, job.channel_stride == 1, row);
    }
  }
};

// The grid of each point, and the lowest vertex that it uses along the first axis, which lies within kMargin of the
// grid; -1 for points without vertices. Only for a large grid, the points sorted by that.
struct PlanesOfPoints {
  static constexpr int64_t kMargin = 3;

  std::unique_ptr<int64_t[]> key, order;
  std::vector<int64_t> start;
};

template <typename T, int D, int K>
struct FindPlanes {
  const SeparableJob<T, D, K>& job;
  const T* points;
  int64_t keys;
  int64_t* key;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    const auto& locator = job.locator;
    for (int64_t i = begin; i < end; ++i) {
      const T* const point = points + D * i;
      bool empty = false;
      for (int a = 0; a < D; ++a) empty = empty || !(point[a] - point[a] == T(0));
      T u = multiply_add(point[locator.coordinate(0)] + locator.lead, locator.rise[0], locator.shift[0]), slope = 0;
      const int64_t lowest = locator.lowest(0, locator.padding, u, slope, empty);
      const int64_t grid = job.grids > 1 ? job.grid_of(i) : 0;
      key[i] = empty ? -1 : grid * keys + lowest + PlanesOfPoints::kMargin;
    }
  }
};

template <typename T, int D, int K>
PlanesOfPoints planes_of_points(const SeparableJob<T, D, K>& job, const T* points, int64_t keys, bool sort) {
  PlanesOfPoints planes;
  planes.key.reset(new int64_t[job.count]);
  const int64_t* const key = planes.key.get();
  for_each_part<false>(job.count, kPointsPerTask, FindPlanes<T, D, K>{job, points, keys, planes.key.get()});
  if (!sort) return planes;
  planes.start.assign(job.grids * keys + 1, 0);
  for (int64_t i = 0; i < job.count; ++i) {
    if (key[i] >= 0) ++planes.start[key[i] + 1];
  }
  for (int64_t k = 0; k < job.grids * keys; ++k) planes.start[k + 1] += planes.start[k];
  planes.order.reset(new int64_t[job.count]);
  std::vector<int64_t> next(planes.start);
  for (int64_t i = 0; i < job.count; ++i) {
    if (key[i] >= 0) planes.order[next[key[i]]++] = i;
  }
  return planes;
}

template <int kWidth, typename T>
struct AddToVertex {
  T* sums;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t at, const Lanes<T, kWidth>& value) const {
    VOXELFIELD_VECTORIZE
    for (int i = 0; i < kWidth; ++i) sums[at + i] += value.lane[i];
  }
};

// What one point adds to the vertices of one plane.
template <int kSets, typename T, int D, int K>
struct SplatChannels {
  static constexpr bool kWide = kHot<T, kSets>;

  const SeparableJob<T, D, K>& job;
  const Taps<T, D, K>& taps;
  const T* row;
  T* sums;
  int tap;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t c) const {
    Lanes<T, kWidth> values[kSets];
    for (int set = 0; set < kSets; ++set) {
      const int64_t from = set * job.layout.set_stride + c * job.layout.channel_stride;
      auto& to = values[set == 0 ? 0 : 1 + job.locator.coordinate(set - 1)];
      for (int i = 0; i < kWidth; ++i) to.lane[i] = row[from + i];
    }
    const AddToVertex<kWidth, T> add{sums + c * job.channel_stride};
    distribute_tap<kSets, 0>(taps, tap, taps.origin, values, add);
  }
};

template <int kSets, typename T, int D, int K>
struct SplatPlanes {
  static constexpr int64_t kMargin = PlanesOfPoints::kMargin;

  const SeparableJob<T, D, K>& job;
  const PlanesOfPoints& of_points;
  const T *values, *points;
  T* sums;
  int64_t keys, planes, tiles;  // per grid, per tile, and tiles per grid

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    for (int64_t tile = begin; tile < end; ++tile) of_points.order == nullptr ? add_all(tile) : add_sorted(tile);
  }

  // Adds all points to planes of every grid.
  VOXELFIELD_HOST_DEVICE void add_all(int64_t tile) const {
    for (int64_t i = 0; i < job.count; ++i) {
      const int64_t key = of_points.key[i], grid = job.grids > 1 && key >= 0 ? key / keys : 0;
      bool wanted[K];
      if (key >= 0 && find_wanted(key - grid * keys, tile, wanted)) add_point(i, grid, wanted);
    }
  }

  // Adds the points around planes of one grid. Only points next to a face use vertices in place of others, which may
  // lie anywhere.
  VOXELFIELD_HOST_DEVICE void add_sorted(int64_t tile) const {
    const int64_t size = job.locator.resolution[0], grid = tile / tiles, first = (tile - grid * tiles) * planes;
    const int64_t last = std::min(first + planes, size), far = std::max(kMargin, size + kMargin - K + 1);
    for (int64_t key = 0; key < keys; ++key) {
      if (key == kMargin) key = std::min(std::max(key, first + kMargin - K + 1), far);
      if (key == last + kMargin && key < far) key = far;
      bool wanted[K];
      if (!find_wanted(key, tile - grid * tiles, wanted)) continue;
      const int64_t* const start = of_points.start.data() + grid * keys + key;
      for (int64_t i = start[0]; i < start[1]; ++i) add_point(of_points.order[i], grid, wanted);
    }
  }

  // Which vertices along the first axis lie in a tile of their grid.
  VOXELFIELD_HOST_DEVICE bool find_wanted(int64_t key, int64_t tile, bool (&wanted)[K]) const {
    const auto& locator = job.locator;
    bool any = false;
    for (int k = 0; k < K; ++k) {
      const int32_t vertex = static_cast<int32_t>(key - kMargin + k);
      const bool exists = locator.padding != Padding::kZeros || (vertex >= 0 && vertex < locator.resolution[0]);
      const int32_t plane = locator.replaced(0, vertex, locator.padding);
      wanted[k] = exists && plane >= tile * planes && plane < (tile + 1) * planes;
      any = any || wanted[k];
    }
    return any;
  }

  VOXELFIELD_HOST_DEVICE void add_point(int64_t i, int64_t grid, const bool (&wanted)[K]) const {
    const auto taps = job.locator(points, i, grid);
    if (taps.empty) return;
    const T* const row = values + job.layout(i, grid);
    for (int k = 0; k < K; ++k) {
      if (!wanted[k]) continue;
      const SplatChannels<kSets, T, D, K> add{job, taps, row, sums, k};
      for_each_channel(job.channels, job.channel_stride == 1, add);
    }
  }
};

struct Cpu : CpuBackend {
  static constexpr bool kAddsInAnyOrder = false;
  static constexpr int kLinesAtOnce = 16;

  template <int kSets, typename T, int D, int K>
  static void gather(const SeparableJob<T, D, K>& job, const T* data, const T* points, T* out) {
    ask_for_huge_pages(out, kSets * job.count * job.channels * sizeof(T));
    if constexpr (std::is_same_v<T, float> && kSets == 1) {
      if (takes_points_at_once(job)) {
        return for_each_part<true>(job.count, kPointsPerTask, GatherPoints<D, K>{job, data, points, out});
      }
    }
    for_each_part<kHot<T, kSets>>(job.count, kPointsPerTask, GatherRows<kSets, T, D, K>{job, data, points, out});
  }

  template <int kSets, typename T, int D, int K>
  static void point_gradient(const SeparableJob<T, D, K>& job, const T* values, const T* data, const T* points,
                             T* out) {
    if constexpr (std::is_same_v<T, float> && kSets == 1) {
      if (takes_points_at_once(job)) {
        return for_each_part<true>(job.count, kPointsPerTask,
                                   PointGradientPoints<D, K>{job, values, data, points, out});
      }
    }
    const PointGradientRows<kSets, T, D, K> work{job, values, data, points, out};
    for_each_part<kHot<T, kSets>>(job.count, kPointsPerTask, work);
  }

  template <int kSets, typename T, int D, int K>
  static void splat(const SeparableJob<T, D, K>& job, const T* values, const T* points, void* sums,
                    const double* /*scale*/) {
    const int64_t size = job.locator.resolution[0], keys = size + 2 * PlanesOfPoints::kMargin;
    // Sums that stay in the cache take points in any order.
    constexpr int64_t kCacheBytes = 4 << 20, kTilesPerThread = 4;
    const int64_t bytes = job.locator.stride[0] * size * job.channels * static_cast<int64_t>(sizeof(T));
    const bool sort = bytes > kCacheBytes;
    const PlanesOfPoints of_points = planes_of_points(job, points, keys, sort);
    const int64_t threads = torch::stable::get_num_threads(), wanted = threads > 1 ? kTilesPerThread * threads : 1;
    const int64_t planes = std::max<int64_t>((sort ? job.grids : 1) * size / wanted, 1);
    const int64_t tiles = (size + planes - 1) / planes;
    const SplatPlanes<kSets, T, D, K> work{job, of_points, values, points, static_cast<T*>(sums), keys, planes, tiles};
    for_each_part<kHot<T, kSets>>(sort ? job.grids * tiles : tiles, 1, work);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { SeparableOps<Cpu>::implement(m); }

}  // namespace voxelfield
