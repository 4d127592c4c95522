// Interpolation by separable kernels on the CPU. float32 grids with few channels, or with a plane for each channel, are
// sampled at several points at once, one to a lane of a vector register; other grids in several channels at once.
//
// Sums are divided into tiles of planes along the first axis, or, if they are few, into those of parts of the points.
// One thread takes all points of a tile or part, in their order, so that every vertex receives its terms in an order
// that does not depend on the number of threads.
#include <functional>

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

template <bool kVersioned, typename Work>
void for_each_part(int64_t n, int64_t length, const Work& work) {
  // One type for all kernels, so that the distribution over threads is compiled once.
  const std::function<void(int64_t, int64_t)> part = [&work](int64_t begin, int64_t end) {
    if constexpr (kVersioned) {
      run_versioned(work, begin, end);
    } else {
      work(begin, end);
    }
  };
  for_each_range(n, length, part);
}

// Points of small grids are summed in this many parts, whatever the number of threads.
constexpr int64_t kParts = 8;

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

struct LoadVertex {
  const float* data;
  VOXELFIELD_HOST_DEVICE float operator()(int32_t at) const { return data[at]; }
};

template <typename T, int kDims, int K>
bool takes_points_at_once(const SeparableJob<T, kDims, K>& job) {
  return job.locator.stride[0] * job.locator.resolution[0] < 0x7fffffff &&
         (job.channel_stride > 1 || job.channels <= (kDims < 3 ? 4 : kMaxPointwiseChannels));
}

// Stores the values at points, or with kGradient the derivatives with respect to the points of their products with
// `values`.
template <bool kGradient, int D, int K>
struct ReadPoints {
  const SeparableJob<float, D, K>& job;
  const float *values, *data, *points;
  float* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    constexpr int kSums = kGradient ? D : 1;
    const SeparableLocator<float, D, K> locator = job.locator;
    const ValueLayout layout = job.layout;
    TapArrays<D, K, kGradient> taps;
    float sum[kSums][kPointsPerBatch] = {};
    for (int64_t first = begin, count = 0; first < end; first += count) {
      // The points of a batch lie in one grid.
      const int64_t grid = job.grid_of(first), next = (first / layout.points_per_grid + 1) * layout.points_per_grid;
      count = std::min(std::min(kPointsPerBatch, end - first), next - first);
      taps.find(locator, points + D * first, count);
      for (int a = 0; a < kSums; ++a) std::fill_n(sum[a], kPointsPerBatch, 0.f);
      for (int64_t c = 0; c < job.channels; ++c) {
        const LoadVertex load{data + grid * locator.grid_stride + c * job.channel_stride};
        const int64_t row = layout(first, grid) + c * layout.channel_stride;
        VOXELFIELD_VECTORIZE
        for (int64_t i = 0; i < count; ++i) {
          const typename TapArrays<D, K, kGradient>::Point point{&taps, i};
          const auto jet = sum_axis<kGradient, 0, float, D, K, K>(point, int32_t{0}, load);
          if constexpr (kGradient) {
            for (int a = 0; a < D; ++a) sum[a][i] += values[row + i * layout.row_stride] * jet.slope[a];
          } else {
            sum[0][i] = jet.value;
          }
        }
        if (!kGradient) store(taps, sum[0], count, out + row, layout.row_stride);
      }
      for (int a = 0; a < D && kGradient; ++a) {
        store(taps, sum[a < kSums ? a : 0], count, out + D * first + locator.coordinate(a), D);
      }
    }
  }

  // Values read for a point without vertices may be NaN, and a weight of zero would not remove them.
  VOXELFIELD_HOST_DEVICE static void store(const TapArrays<D, K, kGradient>& taps, const float* sum, int64_t count,
                                           float* to, int64_t stride) {
    for (int64_t i = 0; i < count; ++i) to[i * stride] = taps.empty[i] ? 0.f : sum[i];
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
template <bool kWide, typename F>
VOXELFIELD_HOST_DEVICE void for_each_channel(int64_t channels, bool neighbours, const F& f) {
  int64_t c = 0;
  if constexpr (kWide) {
    for (; neighbours && c + 8 <= channels; c += 8) f.template block<8>(c);
    for (; neighbours && c + 4 <= channels; c += 4) f.template block<4>(c);
  }
  for (; c < channels; ++c) f.template block<1>(c);
}

// What ReadRows stores for one point.
template <bool kGradient, int kSets, typename T, int D, int K>
struct ReadChannels {
  const SeparableJob<T, D, K>& job;
  const Taps<T, D, K>& taps;
  const T *values, *data;  // `values` and `out` of the point
  T* out;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t c) const {
    Jet<Lanes<T, kWidth>, D> jet{};
    const LoadChannels<kWidth, T> load{data + c * job.channel_stride};
    if (!taps.empty) jet = interpolate<(kSets > 1) + kGradient, Lanes<T, kWidth>>(taps, load);
    for (int set = 0; set < kSets; ++set) {
      const int64_t at = set_of(job.locator, set) * job.layout.set_stride + c * job.layout.channel_stride;
      if constexpr (kGradient) {
        for (int a = 0; a < D; ++a) {
          T sum = 0;
          for (int i = 0; i < kWidth; ++i) sum += values[at + i] * slope_of(jet, set, a).lane[i];
          out[job.locator.coordinate(a)] += sum;
        }
      } else {
        for (int i = 0; i < kWidth; ++i) out[at + i] = value_of(jet, set).lane[i];
      }
    }
  }
};

// As ReadPoints, one point after another.
template <bool kGradient, int kSets, typename T, int D, int K>
struct ReadRows {
  const SeparableJob<T, D, K>& job;
  const T *values, *data, *points;
  T* out;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t grid = job.grid_of(i), row = job.layout(i, grid);
      const auto taps = job.locator(points, i, grid);
      T* const to = kGradient ? out + D * i : out + row;
      if (kGradient) std::fill_n(to, D, T(0));
      if (kGradient && taps.empty) continue;
      const ReadChannels<kGradient, kSets, T, D, K> read{job, taps, kGradient ? values + row : nullptr, data, to};
      for_each_channel<kHot<T, kSets>>(job.channels, job.channel_stride == 1, read);
    }
  }
};

// The vertices along the first axis that one thread adds to: their offsets, from the first one up to the end.
struct PlaneRange {
  int64_t begin, end;
  VOXELFIELD_HOST_DEVICE bool contain(int64_t offset) const { return offset >= begin && offset < end; }
};

template <int kWidth, typename T>
struct AddToVertex {
  T* sums;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t at, const Lanes<T, kWidth>& value) const {
    VOXELFIELD_VECTORIZE
    for (int i = 0; i < kWidth; ++i) sums[at + i] += value.lane[i];
  }
};

// What one point adds to planes.
template <int kSets, typename T, int D, int K>
struct SplatChannels {
  const SeparableJob<T, D, K>& job;
  const Taps<T, D, K>& taps;
  const T* row;
  T* sums;
  const PlaneRange& planes;

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t c) const {
    Lanes<T, kWidth> values[kSets];
    for (int set = 0; set < kSets; ++set) {
      const int64_t from = set_of(job.locator, set) * job.layout.set_stride + c * job.layout.channel_stride;
      for (int i = 0; i < kWidth; ++i) values[set].lane[i] = row[from + i];
    }
    const AddToVertex<kWidth, T> add{sums + c * job.channel_stride};
    for (int k = 0; k < K; ++k) {
      if (planes.contain(taps.offset[0][k])) distribute_tap<kSets, 0, D, K, K>(taps, k, taps.origin, values, add);
    }
  }
};

// A tile is several planes of one grid, and takes all points of the grid, or a part of them into sums of its own.
template <int kSets, typename T, int D, int K>
struct SplatTiles {
  const SeparableJob<T, D, K>& job;
  const T *values, *points;
  T* sums;
  int64_t size, tiles;   // planes of a tile, and tiles of a grid
  int64_t parts, total;  // of the points, and elements of all grids

  VOXELFIELD_HOST_DEVICE void operator()(int64_t begin, int64_t end) const {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t part = index / (job.grids * tiles), tile = index % (job.grids * tiles);
      const int64_t grid = tile / tiles, low = (tile - grid * tiles) * size * job.locator.stride[0];
      const PlaneRange planes{low, low + size * job.locator.stride[0]};
      const int64_t count = job.layout.points_per_grid;
      const int64_t first = grid * count + count * part / parts, last = grid * count + count * (part + 1) / parts;
      T* const out = sums + part * total;
      if constexpr (kHot<T, kSets>) {
        if (takes_points_at_once(job)) {
          add_points(grid, first, last, planes, out);
          continue;
        }
      }
      for (int64_t i = first; i < last; ++i) {
        const auto taps = job.locator(points, i, grid);
        if (taps.empty) continue;
        const SplatChannels<kSets, T, D, K> add{job, taps, values + job.layout(i, grid), out, planes};
        for_each_channel<kHot<T, kSets>>(job.channels, job.channel_stride == 1, add);
      }
    }
  }

  VOXELFIELD_HOST_DEVICE void add_points(int64_t grid, int64_t begin, int64_t end, const PlaneRange& planes,
                                         T* out) const {
    TapArrays<D, K, 0> taps;
    for (int64_t first = begin, count = 0; first < end; first += count) {
      count = std::min(kPointsPerBatch, end - first);
      taps.find(job.locator, points + D * first, count);
      for (int64_t c = 0; c < job.channels; ++c) {
        const AddToVertex<1, float> add{out + grid * job.locator.grid_stride + c * job.channel_stride};
        const float* const row = values + job.layout(first, grid) + c * job.layout.channel_stride;
        for (int64_t i = 0; i < count; ++i) {
          if (taps.empty[i]) continue;
          const typename TapArrays<D, K, 0>::Point point{&taps, i};
          const Lanes<float, 1> value[1] = {{{row[i * job.layout.row_stride]}}};
          for (int k = 0; k < K; ++k) {
            if (planes.contain(taps.offset[0][k][i])) distribute_tap<1, 0, D, K, K>(point, k, int32_t{0}, value, add);
          }
        }
      }
    }
  }
};

struct Cpu : CpuBackend {
  static constexpr bool kAddsInAnyOrder = false;

  template <bool kGradient, int kSets, typename T, int D, int K>
  static void read(const SeparableJob<T, D, K>& job, const T* values, const T* data, const T* points, T* out) {
    if (!kGradient) ask_for_huge_pages(out, kSets * job.count * job.channels * sizeof(T));
    if constexpr (kHot<T, kSets>) {
      if (takes_points_at_once(job)) {
        const ReadPoints<kGradient, D, K> work{job, values, data, points, out};
        return for_each_part<true>(job.count, kPointsPerTask, work);
      }
    }
    const ReadRows<kGradient, kSets, T, D, K> work{job, values, data, points, out};
    for_each_part<kHot<T, kSets>>(job.count, kPointsPerTask, work);
  }

  template <int kSets, typename T, int D, int K>
  static void splat(const SeparableJob<T, D, K>& job, const T* values, const T* points, void* sums,
                    const double* /*scale*/) {
    int64_t total = job.grids * job.channels;
    for (const int64_t resolution : job.locator.resolution) total *= resolution;
    const bool small = kParts * total <= job.count;
    // Every tile finds the vertices of all points of its grid: there should be no more than threads.
    const int64_t wanted = small ? 1 : std::max<int64_t>(torch::stable::get_num_threads() / job.grids, 1);
    const int64_t size = (job.locator.resolution[0] + wanted - 1) / wanted;
    const int64_t tiles = (job.locator.resolution[0] + size - 1) / size, parts = small ? kParts : 1;
    std::vector<T> of_parts(small ? parts * total : 0);
    T* const out = static_cast<T*>(sums);
    const SplatTiles<kSets, T, D, K> work{job,  values, points, small ? of_parts.data() : out,
                                          size, tiles,  parts,  total};
    for_each_part<kHot<T, kSets>>(parts * job.grids * tiles, 1, work);
    for (size_t i = 0; i < of_parts.size(); ++i) out[i % total] += of_parts[i];
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { SeparableOps<Cpu>::implement(m); }

}  // namespace voxelfield
