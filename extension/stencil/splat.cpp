// Summing into a grid on the CPU, without atomics and without a pass that zeroes the result.
//
// Points are sorted by the column (x, y) of cells that they lie in. The grid is divided into tiles of vertex rows. One
// thread sums a tile: it walks the columns of cells around the tile's rows in order, clears each row just before its
// first column, and drops terms that belong to other tiles. Every vertex therefore receives its terms in an order that
// depends on the points alone, and the result has the same bits for any number of threads.
#include <memory>
#include <vector>

#include "common/backend.h"
#include "common/narrow.h"
#include "stencil/batches.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// Two planes of a tile's rows should stay in the second-level cache.
constexpr int64_t kTileBytes = 3 << 19;
// Planes of a tile. Points between two tiles are visited once for each.
constexpr int64_t kTileWidth = 8;
// So many that threads which finish early find further tiles.
constexpr int64_t kTilesPerThread = 4;

// Points of a level, sorted by the column of cells that they lie in. Points without a cell are left out.
struct SortedPoints {
  std::unique_ptr<int64_t[]> order;
  std::vector<int64_t> start;  // of each column, and the end
};

template <typename T>
VOXELFIELD_HOST_DEVICE int64_t column_key(const GridLocator<T>& locator, const Stencil<T>& s, int64_t point) {
  const int64_t grid = locator.points_per_grid > 0 ? point / locator.points_per_grid : 0;
  return (grid * (locator.resolution[0] + 1) + s.lower[0] + 1) * (locator.resolution[1] + 1) + s.lower[1] + 1;
}

template <typename T>
VOXELFIELD_MULTIVERSION void find_columns(const GridLocator<T>& locator, const T* points, int64_t begin, int64_t end,
                                          int64_t columns, int64_t* column, int64_t* histogram) {
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t first = begin; first < end; first += kPointsPerBatch) {
    const int64_t count = std::min(kPointsPerBatch, end - first);
    locate(locator, points, Consecutive{first}, count, stencils);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t key = stencils[i].empty ? columns : column_key(locator, stencils[i], first + i);
      column[first + i] = key;
      ++histogram[key];
    }
  }
}

// A counting sort, stable, of ranges of points side by side: the order does not depend on how many ranges there are.
template <typename T>
SortedPoints sort_by_column(const GridLocator<T>& locator, const T* points, int64_t n, int64_t batch) {
  const int64_t columns = batch * (locator.resolution[0] + 1) * (locator.resolution[1] + 1);
  // Points without a cell go last.
  const int64_t keys = columns + 1;
  // Each range has a histogram of its own, which should take no longer to clear than its points to count.
  const int64_t ranges = threads_for(n / std::max(keys, kPointsPerTask));
  const auto range_start = [&](int64_t range) { return n * range / ranges; };
  const std::unique_ptr<int64_t[]> column(new int64_t[n]);
  std::vector<int64_t> place(ranges * keys, 0);
  for_each_task(ranges, [&](int64_t range, int64_t /*thread*/) {
    find_columns(locator, points, range_start(range), range_start(range + 1), columns, column.get(),
                 place.data() + range * keys);
  });
  SortedPoints sorted{std::unique_ptr<int64_t[]>(new int64_t[n]), std::vector<int64_t>(keys)};
  int64_t total = 0;
  for (int64_t key = 0; key < keys; ++key) {
    sorted.start[key] = total;
    for (int64_t range = 0; range < ranges; ++range) {
      const int64_t count = place[range * keys + key];
      place[range * keys + key] = total;
      total += count;
    }
  }
  for_each_task(ranges, [&](int64_t range, int64_t /*thread*/) {
    int64_t* next = place.data() + range * keys;
    for (int64_t i = range_start(range); i < range_start(range + 1); ++i) sorted.order[next[column[i]]++] = i;
  });
  return sorted;
}

// What one point adds to the eight corners of its cell.
template <typename Value, int kSets, typename T>
struct CornerAdd {
  const Value* value;
  int64_t set_stride;
  T weight[kSets][kCorners];
  T* target[kCorners];

  template <int kWidth>
  VOXELFIELD_HOST_DEVICE void piece(int64_t first) const {
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

// Vertex rows [x0, x1) x [y0, y1) of one grid.
struct Tile {
  int64_t grid;
  int64_t x0, x1, y0, y1;
};

template <typename scalar_t, typename T>
struct Splat {
  GridLocator<T> locator;
  const scalar_t* values;  // of the level's first column
  int64_t stride;          // from one point's values to the next one's
  const T* points;
  const T* directions;
  int64_t n;
  const SortedPoints& sorted;
  scalar_t* out;
  bool accumulate = false;  // add to what is there

  // 16-bit grids are summed in float32 and rounded once.
  static constexpr bool kInPlace = std::is_same_v<scalar_t, T>;
};

// Memory of a thread, in this order.
template <typename T>
struct Spare {
  T* outside;  // a row for sums that belong to other tiles
  T* planes;   // unless sums are made in place: two planes of a tile's rows
  T* values;   // where rows are converted: the values of a batch, (point, set, channel)
};

template <typename scalar_t, typename Weights, typename T>
struct SpareSize {
  int64_t row, planes, values;

  SpareSize(const Splat<scalar_t, T>& job, int64_t height)
      : row(job.locator.resolution[2] * job.locator.channels),
        planes(Splat<scalar_t, T>::kInPlace ? 0 : 2 * height * row),
        values(kConvertsRows<scalar_t> ? kPointsPerBatch * Weights::kSets * job.locator.channels : 0) {}

  int64_t total() const { return row + planes + values; }
  Spare<T> divide(T* memory) const { return {memory, memory + row, memory + row + planes}; }
};

template <typename Weights, typename T>
VOXELFIELD_HOST_DEVICE void widen_batch(const Splat<Half, T>& job, const int64_t* points, int64_t count, T* values) {
  const Half* rows[kPointsPerBatch * Weights::kSets];
  for (int64_t i = 0; i < count; ++i) {
    for (int set = 0; set < Weights::kSets; ++set) {
      rows[i * Weights::kSets + set] = job.values + (set * job.n + points[i]) * job.stride;
    }
  }
  float16_rows.widen(rows, static_cast<int>(count * Weights::kSets), job.locator.channels, values);
}

template <typename scalar_t, typename Weights, typename T = opmath_t<scalar_t>>
VOXELFIELD_MULTIVERSION void splat_tile(const Splat<scalar_t, T>& job, const Tile& tile, const Spare<T>& spare) {
  const int64_t channels = job.locator.channels;
  const int64_t resolution[] = {job.locator.resolution[0], job.locator.resolution[1], job.locator.resolution[2]};
  const int64_t row_size = resolution[2] * channels;
  const int64_t height = tile.y1 - tile.y0;
  const auto vertex_row = [&](int64_t x, int64_t y) { return ((tile.grid * resolution[0] + x) * resolution[1] + y); };
  const auto sums_of = [&](int64_t x, int64_t y) -> T* {
    if (x < tile.x0 || x >= tile.x1 || y < tile.y0 || y >= tile.y1) return spare.outside;
    if constexpr (Splat<scalar_t, T>::kInPlace) {
      return job.out + vertex_row(x, y) * row_size;
    } else {
      return spare.planes + ((x & 1) * height + y - tile.y0) * row_size;
    }
  };
  Stencil<T> stencils[kPointsPerBatch];
  for (int64_t x = tile.x0 - 1; x < tile.x1; ++x) {
    const int64_t key = (tile.grid * (resolution[0] + 1) + x + 1) * (resolution[1] + 1) + 1;
    const int64_t* start = job.sorted.start.data() + key;
    int64_t at = start[tile.y0 - 1], batch_start = at, batch_end = at;
    const int64_t x_end = start[tile.y1];
    for (int64_t y = tile.y0 - 1; y < tile.y1; ++y) {
      if (!job.accumulate && x + 1 < tile.x1 && y + 1 < tile.y1) std::fill_n(sums_of(x + 1, y + 1), row_size, T(0));
      // Nearest has no upper vertex: an infinite value times a weight of zero would be NaN.
      const bool upper = !job.locator.nearest;
      T* const rows[4] = {sums_of(x, y), upper ? sums_of(x, y + 1) : spare.outside,
                          upper ? sums_of(x + 1, y) : spare.outside, upper ? sums_of(x + 1, y + 1) : spare.outside};
      const int64_t row_start = vertex_row(std::max<int64_t>(x, 0), std::max<int64_t>(y, 0)) * row_size;
      for (; at < start[y + 1]; ++at) {
        if (at == batch_end) {
          batch_start = at;
          batch_end = std::min(at + kPointsPerBatch, x_end);
          const int64_t* batch = job.sorted.order.get() + at;
          locate(job.locator, job.points, batch, batch_end - at, stencils);
          if constexpr (kConvertsRows<scalar_t>) widen_batch<Weights>(job, batch, batch_end - at, spare.values);
          // The next batch is fetched while this one is summed: sorted points lie anywhere in memory.
          for (int64_t i = batch_end; i < std::min(batch_end + kPointsPerBatch, x_end); ++i) {
            const int64_t point = job.sorted.order[i];
            prefetch(job.points + 3 * point, 3);
            for (int set = 0; set < Weights::kSets; ++set) {
              prefetch(job.values + (set * job.n + point) * job.stride, channels);
            }
          }
        }
        const Stencil<T>& s = stencils[at - batch_start];
        const int64_t point = job.sorted.order[at];
        const Weights weights(job.directions, point);
        CornerAdd<std::conditional_t<kConvertsRows<scalar_t>, T, scalar_t>, Weights::kSets, T> add;
        if constexpr (kConvertsRows<scalar_t>) {
          add.value = spare.values + (at - batch_start) * Weights::kSets * channels;
          add.set_stride = channels;
        } else {
          add.value = job.values + point * job.stride;
          add.set_stride = job.n * job.stride;
        }
        const int64_t z = s.origin - row_start;
        for (int k = 0; k < kCorners; ++k) {
          for (int set = 0; set < Weights::kSets; ++set) add.weight[set][k] = weights(s, k, set);
          add.target[k] = rows[k >> 1] + z + corner_side(k, 2) * s.step[2];
        }
        for_each_piece(channels, add);
      }
      if constexpr (!Splat<scalar_t, T>::kInPlace) {
        if (x >= tile.x0 && y >= tile.y0) {
          const T* sums = sums_of(x, y);
          scalar_t* row = job.out + vertex_row(x, y) * row_size;
          round_values(sums, row_size, row);
        }
      }
    }
  }
}

template <typename scalar_t, typename Weights, typename T>
void splat_grid(const Splat<scalar_t, T>& job, int64_t batch) {
  const int64_t resolution[] = {job.locator.resolution[0], job.locator.resolution[1], job.locator.resolution[2]};
  const int64_t row_size = resolution[2] * job.locator.channels;
  const int64_t height =
      std::clamp<int64_t>(kTileBytes / std::max<int64_t>(2 * row_size * sizeof(T), 1), 1, resolution[1]);
  const int64_t tiles_y = (resolution[1] + height - 1) / height;
  const int64_t wanted = kTilesPerThread * torch::stable::get_num_threads();
  const int64_t width = std::clamp<int64_t>(batch * resolution[0] * tiles_y / wanted, 1, kTileWidth);
  const int64_t tiles_x = (resolution[0] + width - 1) / width;
  const int64_t tiles = batch * tiles_x * tiles_y;
  const SpareSize<scalar_t, Weights, T> spare_size(job, height);
  const std::unique_ptr<T[]> spare(new T[threads_for(tiles) * spare_size.total()]());
  for_each_task(tiles, [&](int64_t i, int64_t thread) {
    const int64_t x = i / tiles_y % tiles_x * width, y = i % tiles_y * height;
    const Tile tile{i / tiles_y / tiles_x, x, std::min(x + width, resolution[0]), y,
                    std::min(y + height, resolution[1])};
    splat_tile<scalar_t, Weights>(job, tile, spare_size.divide(spare.get() + thread * spare_size.total()));
  });
}

struct Cpu : CpuBackend {
  template <typename scalar_t, typename Weights, typename T>
  static std::vector<Tensor> splat(const Levels<GridLocator<T>, scalar_t>& levels,
                                   const std::vector<std::vector<int64_t>>& shapes, const Tensor& values,
                                   const T* points, const T* directions, int64_t n, SplatMethod /*method*/) {
    std::vector<Tensor> sums;
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      Tensor sum = new_empty(values, shapes[l], values.scalar_type());
      scalar_t* out = sum.mutable_data_ptr<scalar_t>();
      ask_for_huge_pages(out, sum.numel() * sizeof(scalar_t));
      const SortedPoints sorted = sort_by_column(level.locator, points, n, shapes[l][0]);
      splat_grid<scalar_t, Weights>(Splat<scalar_t, T>{level.locator, values.const_data_ptr<scalar_t>() + level.column,
                                                       levels.columns, points, directions, n, sorted, out},
                                    shapes[l][0]);
      sums.push_back(sum);
    }
    return sums;
  }

  template <typename scalar_t, typename T>
  static void accumulate(const Levels<GridLocator<T>, T>& levels, const std::vector<std::vector<int64_t>>& shapes,
                         const Tensor& values, const T* points, int64_t n) {
    const Tensor wide = torch::stable::to(values, scalar_type_of<T>());
    for (int l = 0; l < levels.count; ++l) {
      const auto& level = levels.level[l];
      const SortedPoints sorted = sort_by_column(level.locator, points, n, shapes[l][0]);
      splat_grid<T, ValueWeights<T>>(Splat<T, T>{level.locator, wide.const_data_ptr<T>() + level.column, levels.columns,
                                                 points, nullptr, n, sorted, level.data, true},
                                     shapes[l][0]);
    }
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("splat_trilinear", TORCH_BOX(&StencilOps<Cpu>::splat_trilinear));
  m.impl("accumulate_trilinear", TORCH_BOX(&StencilOps<Cpu>::accumulate_trilinear));
}

}  // namespace voxelfield
