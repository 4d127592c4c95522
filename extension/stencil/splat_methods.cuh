// The methods of summing a gradient into grids on CUDA without an atomic operation for each vertex: splat_tiled.cu and
// splat_binned.cu. splat.cu chooses between these and atomics. This header also plans the binned method for four
// channels: how a grid larger than the L2 cache is cut into bins, the layout of a bin's vertices in shared memory, and
// which coarser grids at the same points are summed from the same bins.
#pragma once

#include "common/backend.cuh"
#include "common/whole_numbers.h"
#include "stencil/levels.cuh"

namespace voxelfield {

// Upper limit (exclusive) of the number of entries, one for each pair of a point and a tile or bin that it touches.
constexpr int64_t kMaxEntries = int64_t{1} << 30;

// Vertices of a tile along x, y, z, which are powers of two. The sums of 16 float32 channels take 8 KiB of shared
// memory.
VOXELFIELD_HOST_DEVICE constexpr int tile_size(int axis) { return axis < 2 ? 4 : 8; }
constexpr int kTileVertices = 4 * 4 * 8;

template <typename scalar_t>
using SplatLevels = Levels<GridLocator<opmath_t<scalar_t>>, scalar_t>;

template <typename scalar_t, typename Weights = ValueWeights<opmath_t<scalar_t>>>
struct SplatInput {
  const Tensor& tensor;    // the tensor of values; scratch memory is allocated with its device and options
  const scalar_t* values;  // (sets, points, columns)
  PointsView<Weights> at;
};

// Writes the levels' data by tiles, in a fixed order of summation if `deterministic`.
template <typename Weights, typename scalar_t>
void splat_tiled(const SplatLevels<scalar_t>& levels, const SplatInput<scalar_t, Weights>& input, bool deterministic);

// Largest number of vertices that a bin owns along x, y, z.
constexpr int kBinSize[3] = {8, 16, 16};
// Capacity of a block's shared memory: vertex sums, in all copies together, and points at once.
constexpr int kBinVertices = 2240;
constexpr int kLogBinThreads = 8;
constexpr int kBinThreads = 1 << kLogBinThreads;
constexpr int kBinGroups = kBinThreads / kCorners;
constexpr int kBinWidth = 4;
using Sums = Vector<float, kBinWidth>;
constexpr int kBinShared = (kBinVertices + 3 * kBinThreads) * 16 + kBinGroups * (4 + kBinThreads);
static_assert(kBinShared <= kSplatBinnedShared, "tests compare this bound with the limit of every GPU");
constexpr int kBinChunk = 16384;                // a bin with more entries is split among several blocks
constexpr int32_t kBinMaxResolution = 1 << 11;  // largest number of vertices along an axis

struct Bins {
  int32_t resolution[3];
  bool clamps;  // if true, points outside are clamped to the grid's faces; otherwise they contribute nothing
  int32_t count;
  Divisor along[3];  // number of bins
  Divisor spans[3];  // index of the last vertex, at least 1

  // The largest number of vertices that a bin owns along an axis.
  int32_t size(int axis) const { return (resolution[axis] - 1) / along[axis].value + 1; }
};

__device__ __forceinline__ int32_t bin_of_vertex(const Bins& bins, int axis, int32_t vertex) {
  int32_t rest;
  return min(bins.spans[axis].divide(vertex * bins.along[axis].value, rest), bins.along[axis].value - 1);
}

// The first vertex that a bin owns; for the bin beyond the last, the first vertex beyond the grid.
__device__ __forceinline__ int32_t first_vertex(const Bins& bins, int axis, int32_t bin) {
  const Divisor& along = bins.along[axis];
  int32_t rest;
  return bin == along.value ? bins.resolution[axis]
                            : along.divide(bin * bins.spans[axis].value + along.value - 1, rest);
}

// The vertices that a bin owns.
struct BinWindow {
  int32_t low[3], size[3];

  __device__ __forceinline__ BinWindow(const Bins& bins, int32_t index) {
    int32_t bin[3];
    bin[0] = bins.along[1].divide(bins.along[2].divide(index, bin[2]), bin[1]);
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) {
      low[axis] = first_vertex(bins, axis, bin[axis]);
      size[axis] = first_vertex(bins, axis, bin[axis] + 1) - low[axis];
    }
  }
};

// Strides in a box of vertices that keep the eight vertices of a cell in different banks of shared memory: steps along
// z, y, x of 1, 2, 4 (or 1, 4, 2) modulo 8.
struct BoxStrides {
  int32_t along_x, along_y;

  BoxStrides(int32_t size_y, int32_t size_z) {
    along_y = size_z + size_z % 2;
    if (along_y % 8 == 0) along_y += 2;
    along_x = size_y * along_y;
    along_x += ((along_y % 8 == 4 ? 2 : 4) - along_x % 8 + 8) % 8;
  }
};

// The vertices that a bin owns form its window, which is cut into boxes. Each group of eight threads, one for each
// corner of a cell, adds points to its own box. If there are more groups than boxes, there are several copies of the
// sums. The sizes and numbers of boxes and copies are powers of two.
struct BinnedGrid {
  Bins bins;
  void* data;  // the grid's scalar_t
  int64_t column;
  int64_t columns;
  int32_t log_box[3];    // log2 of the vertices of a box
  int32_t log_boxes[3];  // log2 of the boxes of the window
  int32_t log_copies;
  Divisor along_x, along_y;  // strides in a box, in vectors of channels
  int32_t box;               // size of a box in vectors

  VOXELFIELD_HOST_DEVICE int32_t boxes() const { return 1 << (log_boxes[0] + log_boxes[1] + log_boxes[2]); }
  VOXELFIELD_HOST_DEVICE int32_t size() const { return boxes() * box; }  // size of a copy of the sums
};

constexpr int kCoarseThreads = 128;
constexpr int kCoarseWarps = kCoarseThreads / kWarp;
constexpr int kCoarseGroups = kWarp / kCorners;
constexpr int kCoarseChunk = 224;  // entries of a bin for one block: with five levels, six blocks fit a multiprocessor
constexpr int kCoarseStride = kCoarseChunk + 2;  // between levels: a row's first four are in different banks
constexpr int kMaxCoarse = 8;                    // levels that fit the shared memory of a block on sm_75
constexpr int kCoarseVertices = 640;             // sums of a level's window, all copies together
constexpr int kCoarseAllVertices = 1280;         // sums of all levels
constexpr float kWindowMargin = 1.f / 256;       // in cells, allows for the rounding of coordinates
// A coarser level is summed from the bins if the binned grid has at least this many times its vertices: for a larger
// level, adding the sums would take more time than it saves.
constexpr int kMinCoarsening = 4;
constexpr int kDirect = -1;

// A level that is summed from the bins of a finer one.
struct CoarseLevel {
  int32_t resolution[3];
  float* data;  // the grid to which the sums are added
  int64_t column;
  float ratio[3];   // size of a cell of the binned grid, in cells of this level
  int32_t size[3];  // size of a window: the vertices that points of a bin may touch, including those beyond the grid
  Divisor along_x, along_y;  // strides in a window, in vectors of channels
  int32_t window;            // size of a window in vectors; each group of threads has a copy
  int32_t first;  // offset of its copies in a block's shared memory; kDirect if sums are added to the grid directly
};

struct CoarseLevels {
  CoarseLevel level[kMaxLevels];
  int count;
  int64_t columns;
  int32_t windows;  // size of the windows of all levels, in vectors

  // Windows, the packed positions of the points that warps process, and positions and values of all points of the
  // block.
  static constexpr int shared_bytes(int windows, int count, int element_size) {
    return (windows + kCoarseThreads) * static_cast<int>(sizeof(Sums)) +
           kCoarseChunk * 3 * static_cast<int>(sizeof(float)) + count * kCoarseStride * kBinWidth * element_size;
  }
};

static_assert(CoarseLevels::shared_bytes(kCoarseAllVertices, kMaxCoarse, sizeof(float)) <= kSplatCoarseShared,
              "tests compare this bound with the limit of every GPU");

// The levels that are summed by bins: the finest one, if any, and the coarser ones that are summed from its bins.
struct SortedBins {
  int finest = -1;
  BinnedGrid grid{};
  CoarseLevels coarse{};
  int coarse_index[kMaxLevels];  // index of each level among the coarse ones, or -1

  SortedBins() { std::fill_n(coarse_index, kMaxLevels, -1); }
};

__device__ __forceinline__ Sums sum_copies(const Sums* sums, int at, int size, int copies) {
  Sums sum = sums[at];
  for (int copy = 1; copy < copies; ++copy) sum += sums[copy * size + at];
  return sum;
}

// Cuts a grid into bins that are no larger than allowed, and enough of them for the number of points per block.
template <typename Locator>
Bins cut_into_bins(const Locator& locator, int64_t n) {
  Bins bins{};
  bins.clamps = locator.padding == Padding::kBorder;
  for (int shift = 0; shift <= 2; ++shift) {
    int64_t count = 1;
    for (int axis = 0; axis < 3; ++axis) {
      const int32_t resolution = locator.resolution[axis], most = kBinSize[axis] >> shift;
      const int32_t along = (resolution + most - 1) / most;
      bins.resolution[axis] = resolution;
      bins.along[axis] = Divisor(along);
      bins.spans[axis] = Divisor(std::max(resolution - 1, 1));
      count *= along;
    }
    bins.count = static_cast<int32_t>(count);
    if (count * kBinThreads >= n) break;
  }
  return bins;
}

// Chooses the boxes and copies. Returns false if a window would not fit in shared memory.
inline bool cut_into_boxes(BinnedGrid& grid) {
  double least = 0;
  for (int code = 0; code < 64; ++code) {
    const int log_boxes[3] = {code & 3, code >> 2 & 3, code >> 4};
    const int boxes = 1 << (log_boxes[0] + log_boxes[1] + log_boxes[2]);
    if (boxes > kBinGroups) continue;
    int log_box[3];
    double touched = 1;
    for (int axis = 0; axis < 3; ++axis) {
      log_box[axis] = 0;
      while (1 << (log_box[axis] + log_boxes[axis]) < grid.bins.size(axis)) ++log_box[axis];
      touched *= 1 + 1.0 / (1 << log_box[axis]);
    }
    const BoxStrides strides(1 << log_box[1], 1 << log_box[2]);
    const int box = strides.along_x << log_box[0];
    if (box * boxes > kBinVertices) continue;
    int log_copies = 0;
    while (boxes << (log_copies + 1) <= kBinGroups && box * boxes << (log_copies + 1) <= kBinVertices) ++log_copies;
    // The cost counts the boxes that a point touches, and threads that wait because groups have unequal numbers of
    // points.
    const double cost = touched * (1 + 4.0 / (boxes << log_copies));
    if (least > 0 && cost >= least) continue;
    least = cost;
    std::copy_n(log_box, 3, grid.log_box);
    std::copy_n(log_boxes, 3, grid.log_boxes);
    grid.log_copies = log_copies;
    grid.along_y = Divisor(strides.along_y);
    grid.along_x = Divisor(strides.along_x);
    grid.box = box;
  }
  return least > 0;
}

// Prepares a level to be summed from a grid's bins, in a window if there is room for one. Returns false if the level is
// not coarse enough, or if there are too many levels.
inline bool cut_window(const Bins& bins, CoarseLevels& levels, CoarseLevel& level) {
  double vertices = 1, binned_vertices = 1;
  for (int axis = 0; axis < 3; ++axis) {
    const double last = level.resolution[axis] - 1;
    // A bin of a single layer of vertices contains all points along that axis.
    const bool single = bins.resolution[axis] == 1;
    const double ratio = single ? 0 : last / (bins.resolution[axis] - 1);
    const double cells = single ? last : ratio * bins.size(axis);
    level.ratio[axis] = static_cast<float>(ratio);
    // Twice the margin at both ends, half of it for rounding on the device, and the upper vertices of the last cell.
    level.size[axis] = static_cast<int32_t>(std::min(cells + 4 * kWindowMargin, double{kCoarseVertices})) + 3;
    vertices *= level.resolution[axis];
    binned_vertices *= bins.resolution[axis];
  }
  if (vertices * kMinCoarsening > binned_vertices || levels.count == kMaxCoarse) return false;
  const BoxStrides strides(level.size[1], level.size[2]);
  const int64_t copies = int64_t{level.size[0]} * strides.along_x * kCoarseGroups;
  level.first = kDirect;
  if (copies > kCoarseVertices || levels.windows + copies > kCoarseAllVertices) return true;
  level.along_x = Divisor(strides.along_x);
  level.along_y = Divisor(strides.along_y);
  level.window = static_cast<int32_t>(copies / kCoarseGroups);
  level.first = levels.windows;
  levels.windows += static_cast<int32_t>(copies);
  return true;
}

// Writes the data of the finest of the binned levels, and of the coarser levels that are summed from its bins.
template <typename scalar_t>
void splat_binned(const SortedBins& bins, const SplatInput<scalar_t>& input);

}  // namespace voxelfield
