// From points to vertices on the CPU: sums into a grid, without atomics and without a pass that zeroes the result, and
// writes to cells, where every corner belongs to one point.
//
// For a grid, points are sorted by the column (x, y) of cells that contains them. The grid is divided into tiles of
// vertex rows, and one thread sums each tile. It walks the columns of cells around the rows of the tile in order,
// clears each row just before its first column, and drops terms that belong to other tiles. Every vertex therefore
// receives its terms in an order that depends only on the points, and the result has the same bits for any number of
// threads.
#include <memory>
#include <utility>

#include "common/backend.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// Two planes of the rows of a tile should fit in the L2 cache.
constexpr int64_t kTileBytes = 3 << 19;
// Number of planes per tile. Points between two tiles are visited once per tile.
constexpr int64_t kTileWidth = 8;
// Enough tiles that threads that finish early can process further ones.
constexpr int64_t kTilesPerThread = 4;

// The points of a level, sorted by the column of cells that contains them. Points that touch no plane are omitted.
struct SortedPoints {
  std::unique_ptr<int64_t[]> order;
  std::unique_ptr<float[]> points, values;  // in this order; only for few channels, which have no list of indices
  std::vector<int64_t> start;               // start of each column, and the end of the last one
};

struct CellColumns {
  int32_t x[kPointsPerBatch], y[kPointsPerBatch];
  int32_t empty[kPointsPerBatch];

  template <typename T>
  VOXELFIELD_HOST_DEVICE void set(int64_t i, const Stencil<T>& s) {
    x[i] = s.lower[0];
    y[i] = s.lower[1];
    empty[i] = s.empty;
  }
};

template <typename T>
VOXELFIELD_MULTIVERSION void find_columns(const GridLocator<T>& locator, const Planes& planes, const T* points,
                                          int64_t begin, int64_t end, int64_t columns, int64_t* column,
                                          int64_t* histogram) {
  CellColumns cells;
  GridLocator<T> one = locator;
  one.points_per_grid = 0;
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    locate(one, points, Consecutive{first}, count, &cells);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t grid = locator.points_per_grid > 0 ? (first + i) / locator.points_per_grid : 0;
      const int64_t x = cells.x[i] - planes.first + 1, row = grid * (planes.count + 1) + x;
      const bool omitted = cells.empty[i] || x < 0 || x > planes.count;
      const int64_t key = omitted ? columns : row * (locator.resolution[1] + 1) + cells.y[i] + 1;
      column[first + i] = key;
      ++histogram[key];
    }
  }
}

// A stable counting sort that processes ranges of points in parallel. The order does not depend on the number of
// ranges. With few channels, `values` are those of the points, and `stride` is the distance between two of them.
template <int kSets, typename scalar_t, typename T>
SortedPoints sort_by_column(const GridLocator<T>& locator, const Planes& planes, const PointsView<T, kSets>& at,
                            bool few, const scalar_t* values, int64_t stride) {
  const int64_t n = at.count;
  const int64_t columns = locator.grids(n) * (planes.count + 1) * (locator.resolution[1] + 1);
  // Omitted points have the last key.
  const int64_t keys = columns + 1;
  // Each range has its own histogram. Clearing it should not take longer than counting the points of the range.
  const int64_t ranges = threads_for(n / std::max(keys, kPointsPerTask));
  const auto range_start = [&](int64_t range) { return n * range / ranges; };
  const std::unique_ptr<int64_t[]> column(new int64_t[n]);
  std::vector<int64_t> place(ranges * keys, 0);
  for_each_task(ranges, [&](int64_t range, int64_t /*thread*/) {
    find_columns(locator, planes, at.points, range_start(range), range_start(range + 1), columns, column.get(),
                 place.data() + range * keys);
  });
  SortedPoints sorted;
  sorted.start.resize(keys);
  int64_t total = 0;
  for (int64_t key = 0; key < keys; ++key) {
    sorted.start[key] = total;
    for (int64_t range = 0; range < ranges; ++range) total += std::exchange(place[range * keys + key], total);
  }
  const auto for_each_point = [&](const auto& put) {
    for_each_task(ranges, [&](int64_t range, int64_t /*thread*/) {
      int64_t* next = place.data() + range * keys;
      for (int64_t i = range_start(range); i < range_start(range + 1); ++i) {
        if (column[i] < columns) put(i, next[column[i]]++);
      }
    });
  };
  if constexpr (kVectorisesPoints<kSets, scalar_t>) {
    if (few) {
      sorted.points.reset(new float[3 * n]);
      sorted.values.reset(new float[locator.channels * n]);
      dispatch_value<1, 2, kMaxPointwiseChannels>(locator.channels, [&](auto channels) {
        for_each_point([&, points = sorted.points.get(), copies = sorted.values.get()](int64_t from, int64_t to) {
          std::copy_n(at.points + 3 * from, 3, points + 3 * to);
          std::copy_n(values + stride * from, channels.value, copies + channels.value * to);
        });
      });
      return sorted;
    }
  }
  sorted.order.reset(new int64_t[n]);
  for_each_point([&](int64_t from, int64_t to) { sorted.order[to] = from; });
  return sorted;
}

// The contribution of one point to the eight corners of its cell.
template <typename Value, int kSets, typename T>
struct CornerAdd {
  const Value* value;
  int64_t set_stride;
  T weight[kSets][kCorners];
  T* target[kCorners];

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void block(int64_t first) const {
    T term[kSets][kWidth];
    for (int set = 0; set < kSets; ++set) {
      VOXELFIELD_VECTORIZE
      for (int c = 0; c < kWidth; ++c) term[set][c] = widen(value[set * set_stride + first + c]);
    }
    for (int k = 0; k < kCorners; ++k) {
      T* out = target[k] + first;
      VOXELFIELD_VECTORIZE
      for (int c = 0; c < kWidth; ++c) {
        T sum = out[c];
        for (int set = 0; set < kSets; ++set) sum += weight[set][k] * term[set][c];
        out[c] = sum;
      }
    }
  }
};

// What a batch of points with few channels adds to the vertices around them.
template <int kChannels>
struct TermArrays {
  const float* value;                           // (point, channel)
  int32_t last;                                 // index of the last vertex along z, at least 1
  int32_t lower[kPointsPerBatch];               // index along z of the first of two neighbouring vertices
  float across[4][kPointsPerBatch];             // weights of the four rows along z
  float along[2 * kChannels][kPointsPerBatch];  // values times weights of the two vertices of a row

  VOXELFIELD_HOST_DEVICE void set(int64_t i, const Stencil<float>& s) {
    for (int row = 0; row < 4; ++row) across[row][i] = s.weight[0][row >> 1] * s.weight[1][row & 1];
    const int32_t z = s.lower[2];
    // A missing vertex is replaced by one on the other side, to which nothing is added.
    lower[i] = z < 0 ? 0 : z < last ? z : last - 1;
    const float first = z < 0 ? s.weight[2][1] : s.weight[2][0], second = z < last ? s.weight[2][1] : s.weight[2][0];
    for (int c = 0; c < kChannels; ++c) {
      const float v = value[i * kChannels + c];
      along[c][i] = z < last ? first * v : 0.f;
      along[kChannels + c][i] = z < 0 ? 0.f : second * v;
    }
  }

  VOXELFIELD_HOST_DEVICE void add(int64_t i, float* const* rows) const {
    for (int row = 0; row < 4; ++row) {
      float* const out = rows[row] + lower[i] * kChannels;
      for (int j = 0; j < 2 * kChannels; ++j) out[j] += across[row][i] * along[j][i];
    }
  }
};

// Vertex rows [x0, x1) x [y0, y1) of one grid of a batch. Here and in splat_tile, x counts the planes in memory.
struct Tile {
  int64_t grid;
  int64_t x0, x1, y0, y1;
};

// 16-bit grids are summed in float32 and rounded once.
template <typename scalar_t>
constexpr bool kInPlace = std::is_same_v<scalar_t, opmath_t<scalar_t>>;

template <int kSets, typename scalar_t>
struct Splat {
  using T = opmath_t<scalar_t>;

  GridLocator<T> locator;
  Planes planes;
  const scalar_t* values;  // starting at the first column of the level
  int64_t stride;          // from the values of one point to those of the next
  PointsView<T, kSets> at;
  scalar_t* out;
  bool accumulate;  // whether to add to the values in `out`

  VOXELFIELD_HOST_DEVICE const scalar_t* values_of(int64_t point, int set) const {
    return values + (set * at.count + point) * stride;
  }
};

// `spare` holds, in this order: a row for sums that belong to other tiles; two planes of the rows of a tile, unless
// sums are computed in place; and the values of a batch, (point, set, channel), if rows are converted.
// `kFew` is the number of channels if there are few, and 0 otherwise.
template <int kFew, int kSets, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void splat_tile(const Splat<kSets, scalar_t>& job, const SortedPoints& sorted, const Tile& tile,
                                        T* spare) {
  const int64_t channels = job.locator.channels;
  const int64_t resolution[] = {job.planes.count, job.locator.resolution[1], job.locator.resolution[2]};
  const int64_t row_size = resolution[2] * channels;
  const int64_t height = tile.y1 - tile.y0;
  T *const outside = spare, *const planes = outside + row_size;
  [[maybe_unused]] T* const wide_values = planes + (kInPlace<scalar_t> ? 0 : 2 * height * row_size);
  const auto vertex_row = [&](int64_t x, int64_t y) { return ((tile.grid * resolution[0] + x) * resolution[1] + y); };
  const auto sums_of = [&](int64_t x, int64_t y) -> T* {
    if (x < tile.x0 || x >= tile.x1 || y < tile.y0 || y >= tile.y1) return outside;
    if constexpr (kInPlace<scalar_t>) {
      return job.out + vertex_row(x, y) * row_size;
    } else {
      return planes + ((x & 1) * height + y - tile.y0) * row_size;
    }
  };
  GridLocator<T> locator = job.locator;
  std::conditional_t<(kFew > 0), TermArrays<std::max(kFew, 1)>, Stencil<T>[kPointsPerBatch]> stencils;
  if constexpr (kFew > 0) {
    locator.points_per_grid = 0;
    stencils.last = locator.resolution[2] - 1;
  }
  for (int64_t x = tile.x0 - 1; x < tile.x1; ++x) {
    const int64_t key = (tile.grid * (resolution[0] + 1) + x + 1) * (resolution[1] + 1) + 1;
    const int64_t* start = sorted.start.data() + key;
    int64_t next = start[tile.y0 - 1], batch_start = next, batch_end = next;
    const int64_t x_end = start[tile.y1];
    for (int64_t y = tile.y0 - 1; y < tile.y1; ++y) {
      if (!job.accumulate && x + 1 < tile.x1 && y + 1 < tile.y1) std::fill_n(sums_of(x + 1, y + 1), row_size, T(0));
      // Nearest lookup has no upper vertex. A weight of zero is not enough, because zero times an infinite value is
      // NaN.
      const bool upper = !job.locator.nearest;
      T* const rows[4] = {sums_of(x, y), upper ? sums_of(x, y + 1) : outside, upper ? sums_of(x + 1, y) : outside,
                          upper ? sums_of(x + 1, y + 1) : outside};
      for (; next < start[y + 1]; ++next) {
        if constexpr (kFew > 0) {
          if (next == batch_end) {
            batch_start = next;
            batch_end = std::min(next + kPointsPerBatch, x_end);
            stencils.value = sorted.values.get() + kFew * next;
            locate(locator, sorted.points.get(), Consecutive{next}, batch_end - next, &stencils);
          }
          stencils.add(next - batch_start, rows);
        } else {
          if (next == batch_end) {
            batch_start = next;
            batch_end = std::min(next + kPointsPerBatch, x_end);
            const int64_t* batch = sorted.order.get() + next;
            locate(job.locator, job.at.points, batch, batch_end - next, stencils);
            if constexpr (kConvertsRows<scalar_t>) {
              const Half* from[kPointsPerBatch * kSets];
              const int count = static_cast<int>((batch_end - next) * kSets);
              for (int i = 0; i < count; ++i) from[i] = job.values_of(batch[i / kSets], i % kSets);
              float16_rows.widen(from, count, channels, wide_values);
            }
            // Prefetches the next batch while this batch is summed, because sorted points are scattered in memory.
            for (int64_t i = batch_end; i < std::min(batch_end + kPointsPerBatch, x_end); ++i) {
              const int64_t point = sorted.order[i];
              prefetch(job.at.points + 3 * point, 3);
              for (int set = 0; set < kSets; ++set) prefetch(job.values_of(point, set), channels);
            }
          }
          const Stencil<T>& s = stencils[next - batch_start];
          const int64_t point = sorted.order[next];
          CornerAdd<row_t<scalar_t>, kSets, T> add;
          if constexpr (kConvertsRows<scalar_t>) {
            add.value = wide_values + (next - batch_start) * kSets * channels;
            add.set_stride = channels;
          } else {
            add.value = job.values_of(point, 0);
            add.set_stride = job.at.count * job.stride;
          }
          const int64_t z = std::max(s.lower[2], 0) * channels;
          for (int k = 0; k < kCorners; ++k) {
            for (int set = 0; set < kSets; ++set) add.weight[set][k] = s.corner_weight(k, set);
            add.target[k] = rows[k >> 1] + z + corner_side(k, 2) * s.step[2];
          }
          for_each_block(channels, add);
        }
      }
      if (!kInPlace<scalar_t> && x >= tile.x0 && y >= tile.y0) {
        round_values(sums_of(x, y), row_size, job.out + vertex_row(x, y) * row_size);
      }
    }
  }
}

template <int kSets, typename Locator, typename scalar_t>
void splat_grid(const Level<Locator, scalar_t>& level, const Tensor& values, int64_t columns,
                const PointsView<opmath_t<scalar_t>, kSets>& at, bool accumulate) {
  using T = opmath_t<scalar_t>;
  const scalar_t* first = values.const_data_ptr<scalar_t>() + level.column;
  const Planes planes = level.locator.planes();
  const Splat<kSets, scalar_t> job{level.locator, planes, first, columns, at, level.data, accumulate};
  const int64_t channels = job.locator.channels;
  const bool few = kVectorisesPoints<kSets, scalar_t> && channels > 0 && channels <= kMaxPointwiseChannels &&
                   !job.locator.nearest && job.locator.resolution[2] > 1;
  const SortedPoints sorted = sort_by_column(job.locator, planes, job.at, few, first, columns);
  const int64_t grids = job.locator.grids(job.at.count);
  const int64_t size_x = planes.count, size_y = job.locator.resolution[1];
  const int64_t row_bytes = job.locator.resolution[2] * job.locator.channels * sizeof(T);
  const int64_t height = std::clamp<int64_t>(kTileBytes / std::max<int64_t>(2 * row_bytes, 1), 1, size_y);
  const int64_t tiles_y = (size_y + height - 1) / height;
  const int64_t wanted = kTilesPerThread * torch::stable::get_num_threads();
  const int64_t width = std::clamp<int64_t>(grids * size_x * tiles_y / wanted, 1, kTileWidth);
  const int64_t tiles_x = (size_x + width - 1) / width;
  const int64_t tiles = grids * tiles_x * tiles_y;
  const int64_t spare_rows = kInPlace<scalar_t> ? 1 : 1 + 2 * height;
  const int64_t spare_values = kConvertsRows<scalar_t> ? kPointsPerBatch * kSets : 0;
  const int64_t size = (spare_rows * job.locator.resolution[2] + spare_values) * job.locator.channels;
  const std::unique_ptr<T[]> spare(new T[threads_for(tiles) * size]());
  for_each_task(tiles, [&](int64_t i, int64_t thread) {
    const int64_t x = i / tiles_y % tiles_x * width, y = i % tiles_y * height;
    const Tile tile{i / tiles_y / tiles_x, x, std::min(x + width, size_x), y, std::min(y + height, size_y)};
    if constexpr (kVectorisesPoints<kSets, scalar_t>) {
      if (few) {
        return dispatch_value<1, 2, kMaxPointwiseChannels>(channels, [&](auto value) {
          splat_tile<decltype(value)::value>(job, sorted, tile, spare.get() + thread * size);
        });
      }
    }
    splat_tile<0>(job, sorted, tile, spare.get() + thread * size);
  });
}

// `spare` has room for the values of a point and the eight rows of its cell if rows are converted.
template <int kSets, typename scalar_t, typename T>
VOXELFIELD_MULTIVERSION void write_cells_range(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values,
                                               const PointsView<T, kSets>& at, int64_t begin, int64_t end, T* spare) {
  const int64_t channels = levels.columns;
  for (int64_t n = begin; n < end; ++n) {
    const Stencil<T> s = levels.level[0].locator(at.points, n);
    scalar_t* const cell = levels.level[0].data + s.origin;
    const scalar_t* rows[kSets];
    for (int set = 0; set < kSets; ++set) rows[set] = values + (set * at.count + n) * channels;
    const row_t<scalar_t>* value[kSets];
    row_t<scalar_t>* targets;
    if constexpr (kConvertsRows<scalar_t>) {
      float16_rows.widen(rows, kSets, channels, spare);
      for (int set = 0; set < kSets; ++set) value[set] = spare + set * channels;
      targets = spare + kSets * channels;
    } else {
      std::copy_n(rows, kSets, value);
      targets = cell;
    }
    for (int k = 0; k < kCorners; ++k) {
      T weight[kSets];
      for (int set = 0; set < kSets; ++set) weight[set] = s.corner_weight(k, set);
      row_t<scalar_t>* target = targets + k * channels;
      VOXELFIELD_VECTORIZE
      for (int64_t c = 0; c < channels; ++c) {
        T sum = weight[0] * widen(value[0][c]);
        for (int set = 1; set < kSets; ++set) sum += weight[set] * widen(value[set][c]);
        target[c] = narrow_to<row_t<scalar_t>>(s.empty ? T(0) : sum);
      }
    }
    if constexpr (kConvertsRows<scalar_t>) round_values(targets, kCorners * channels, cell);
  }
}

struct Cpu : CpuBackend {
  template <int kSets, typename T, typename scalar_t>
  static std::vector<Tensor> splat(const Levels<GridLocator<T>, scalar_t>& levels,
                                   const std::vector<std::vector<int64_t>>& shapes, const Tensor& values,
                                   const PointsView<T, kSets>& at, SplatMethod /*method*/) {
    std::vector<Tensor> sums;
    for (auto level : levels) {
      sums.push_back(new_like(values, shapes[sums.size()]));
      level.data = data_of(sums.back());
      ask_for_huge_pages(level.data, sums.back().numel() * sizeof(scalar_t));
      splat_grid(level, values, levels.columns, at, false);
    }
    return sums;
  }

  template <typename scalar_t, typename Locator, typename T>
  static void accumulate(const Levels<Locator, T>& levels, const Tensor& values, const PointsView<T, 1>& at) {
    const Tensor wide = torch::stable::to(values, scalar_type_of<T>());
    for (const auto& level : levels) splat_grid(level, wide, levels.columns, at, true);
  }

  template <int kSets, typename T, typename scalar_t>
  static void write_cells(const Levels<CellLocator<T>, scalar_t>& levels, const scalar_t* values,
                          const PointsView<T, kSets>& at) {
    ask_for_huge_pages(levels.level[0].data, at.count * kCorners * levels.columns * sizeof(scalar_t));
    for_each_range(at.count, kPointsPerTask, [&](int64_t begin, int64_t end) {
      std::vector<T> spare(kConvertsRows<scalar_t> ? (kSets + kCorners) * levels.columns : 0);
      write_cells_range(levels, values, at, begin, end, spare.data());
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { StencilOps<Cpu>::implement_splat(m); }

}  // namespace voxelfield
