// Host side of the ops on sparse grids for both backends: checks, allocates, and visits each point or vertex, or calls
// Backend::sum_touched(sum).
#pragma once

#include "common/checks.h"
#include "common/touched.h"
#include "stencil/sparse_grid.h"

namespace voxelfield {

// `atlas`: the number of vertices along x, y and z.
inline BlockTable block_table(const char* name, const Tensor& blocks, const std::vector<int64_t>& atlas,
                              const Tensor& like) {
  contiguous_data(name, blocks, {kAny, kAny, kAny}, ScalarType::Int, like);
  STD_TORCH_CHECK(blocks.numel() > 0 && blocks.numel() < 0x7fffffff, name, " must have 1 to 2^31 - 2 entries, got ",
                  blocks.numel());
  STD_TORCH_CHECK(atlas.size() == 3, "atlas must be three sizes, got ", atlas.size());
  BlockTable table{data_of(blocks), {}, {}};
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(blocks.size(axis) <= kMaxBlocks, name, " must have at most ", kMaxBlocks,
                    " blocks along each axis, got ", blocks.size(axis));
    STD_TORCH_CHECK(atlas[axis] > 0 && atlas[axis] % kBlockVertices == 0 && atlas[axis] <= kMaxAtlasVertices,
                    "atlas must have a multiple of ", kBlockVertices, " vertices along each axis, at most ",
                    kMaxAtlasVertices, ", got ", atlas[axis]);
    table.count[axis] = static_cast<int32_t>(blocks.size(axis));
    table.atlas_scale[axis] = static_cast<float>(1.0 / static_cast<double>(atlas[axis] - 1));
  }
  return table;
}

struct PlaceInAtlas {
  BlockTable table;
  const float* points;
  float* placed;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const {
    float place[3];
    const bool found = table.place(points + 3 * row, place);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) placed[3 * row + axis] = found ? place[axis] : NAN;
  }
};

// For vertices that are stored in several blocks: replaces all copies of a vertex by their sum.
struct SumDuplicates {
  const int32_t* copies;  // rows of `sums`; the copies of a vertex are adjacent
  const int32_t* begins;  // start of each vertex in `copies`, followed by the total number of copies
  float* sums;            // (rows, channels)
  int64_t rows, count;
  int32_t channels;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t number) const {
    const int64_t vertex = number / channels, channel = number - vertex * channels;
    const int64_t begin = begins[vertex], end = begins[vertex + 1];
    // Invalid lists must not cause accesses out of bounds.
    if (begin < 0 || end > count) return;
    const auto at = [&](int64_t i) { return copies[i] * static_cast<int64_t>(channels) + channel; };
    float sum = 0;
    bool touched = false;
    for (int64_t i = begin; i < end; ++i) {
      if (copies[i] < 0 || copies[i] >= rows) return;
      const float value = sums[at(i)];
      touched = touched || value != 0;
      sum += value;
    }
    // A step touches few vertices, so most vertices need no write.
    if (!touched) return;
    for (int64_t i = begin; i < end; ++i) sums[at(i)] = sum;
  }
};

// The same where a table has all vertices that are not zero. One thread takes a vertex with all its channels.
struct SumTouchedDuplicates : SumDuplicates {
  TouchedTable touched;  // of the rows of `sums`; receives the copies that are written
  int64_t vertices;

  VOXELFIELD_HOST_DEVICE bool any(int64_t vertex) const {
    const int64_t begin = begins[vertex], end = begins[vertex + 1];
    if (begin < 0 || end > count) return false;
    bool found = false;
    for (int64_t i = begin; i < end; ++i) {
      if (copies[i] < 0 || copies[i] >= rows) return false;
      found = found || touched.has(copies[i]);
    }
    return found;
  }

  VOXELFIELD_HOST_DEVICE void add_copies(int64_t vertex) const {
    for (int64_t i = begins[vertex]; i < begins[vertex + 1]; ++i) {
      if (!touched.has(copies[i])) touched.add(copies[i]);
    }
  }
};

template <typename Backend>
struct SparseGridOps {
  static Tensor atlas_coordinates(const Tensor& points, const Tensor& blocks, std::vector<int64_t> atlas) {
    const Tensor rows = checked("points", points, {kAny, 3}, ScalarType::Float, points);
    const typename Backend::Guard guard(points);
    const BlockTable table = block_table("blocks", blocks, atlas, points);
    Tensor placed = new_like(rows, shape_of(rows));
    Backend::for_each(rows.size(0), PlaceInAtlas{table, data_of(rows), data_of(placed)});
    return placed;
  }

  static void sum_duplicates_(Tensor sums, const Tensor& copies, const Tensor& begins, const OptionalTensor& touched) {
    const typename Backend::Guard guard(sums);
    float* data = contiguous_data("sums", sums, {kAny, kAny, kAny, kAny}, ScalarType::Float, sums);
    const int32_t* rows = contiguous_data("copies", copies, {kAny}, ScalarType::Int, sums);
    const int32_t* first = contiguous_data("begins", begins, {kAny}, ScalarType::Int, sums);
    const int64_t vertices = begins.size(0) - 1, channels = sums.size(3);
    TouchedTable table{};
    if (touched.has_value()) {
      const int64_t tiles = TouchedTable::rows_for(sums.size(0) * sums.size(1) * sums.size(2));
      table.rows = contiguous_data("touched", *touched, {tiles, TouchedTable::kColumns}, ScalarType::Int, sums);
    }
    if (vertices < 1 || sums.numel() == 0) return;
    const SumDuplicates sum{rows, first, data, sums.numel() / channels, copies.size(0), static_cast<int32_t>(channels)};
    if (touched.has_value()) return Backend::sum_touched({sum, table, vertices});
    Backend::for_each(vertices * channels, sum);
  }

  static void implement(Library& m) {
    m.impl("atlas_coordinates", TORCH_BOX(&SparseGridOps::atlas_coordinates));
    m.impl("sum_duplicates_", TORCH_BOX(&SparseGridOps::sum_duplicates_));
  }
};

}  // namespace voxelfield
