// The formulas of this folder and the host side of its ops, shared by both backends: checks tensors, collects pointers,
// and calls Backend::adam(levels, rule), Backend::total_variation(task), Backend::active_tiles(cells, ids, count,
// like), Backend::find_touched(find) or Backend::copy_touched(copy).
#pragma once

#include <cmath>

#include "common/checks.h"
#include "common/touched.h"

namespace voxelfield {

// A tile is 4 x 4 x 8 vertices. In a float32 grid of four channels, eight vertices along z are 128 contiguous bytes.
// The smaller size along x and y follows a surface more closely.
VOXELFIELD_HOST_DEVICE constexpr int optimizer_tile_shift(int axis) {
  return axis < 2 ? kOptimizerTileShiftXY : kOptimizerTileShiftZ;
}

VOXELFIELD_HOST_DEVICE constexpr int32_t tiles_along(int32_t vertices, int axis) {
  return ((vertices - 1) >> optimizer_tile_shift(axis)) + 1;
}

// A tile id contains the position of the tile along each axis in ten bits, with x highest, so that decoding it needs no
// division.
constexpr int32_t kMaxTilesAlong = 1 << kTileBits;

VOXELFIELD_HOST_DEVICE constexpr int32_t tile_id(int32_t x, int32_t y, int32_t z) {
  return (x << kTileBits | y) << kTileBits | z;
}

VOXELFIELD_HOST_DEVICE constexpr int32_t tile_along(int32_t id, int axis) {
  return id >> kTileBits * (2 - axis) & (kMaxTilesAlong - 1);
}

struct VertexGrid {
  int32_t size[3];
  int32_t channels;
  int64_t vertices;
  const int32_t* tiles;       // ids; null: every vertex is visited
  const int32_t* tile_count;  // the number of listed tiles to visit; unused by kernels that visit the whole list
  int32_t capacity;           // length of the list

  // The number of visits. Some visits of listed tiles lie outside the grid, where its upper faces cut a tile.
  VOXELFIELD_HOST_DEVICE int64_t visits() const {
    if (tiles == nullptr) return vertices;
    const int32_t count = *tile_count;
    return static_cast<int64_t>(count < 0 ? 0 : (count < capacity ? count : capacity)) * kOptimizerTileVertices;
  }

  int64_t max_visits() const {
    return tiles == nullptr ? vertices : static_cast<int64_t>(capacity) * kOptimizerTileVertices;
  }

  VOXELFIELD_HOST_DEVICE int32_t id_of(int64_t visit) const { return tiles[visit / kOptimizerTileVertices]; }

  // Finds the vertex of a visit, which lies in tile `id` if tiles are listed. Returns false if it lies outside the
  // grid.
  VOXELFIELD_HOST_DEVICE bool find(int64_t visit, int32_t id, int32_t (&vertex)[3]) const {
    if (tiles == nullptr) {
      const int64_t row = visit / size[2];
      vertex[2] = static_cast<int32_t>(visit - row * size[2]);
      vertex[0] = static_cast<int32_t>(row / size[1]);
      vertex[1] = static_cast<int32_t>(row - static_cast<int64_t>(vertex[0]) * size[1]);
      return true;
    }
    int32_t within = static_cast<int32_t>(visit % kOptimizerTileVertices);
    bool inside = id >= 0;
    VOXELFIELD_UNROLL
    for (int axis = 2; axis >= 0; --axis) {
      const int32_t tile = axis > 0 ? id & (kMaxTilesAlong - 1) : id;
      vertex[axis] = tile << optimizer_tile_shift(axis) | (within & ((1 << optimizer_tile_shift(axis)) - 1));
      inside = inside && vertex[axis] < size[axis];
      id >>= kTileBits;
      within >>= optimizer_tile_shift(axis);
    }
    return inside;
  }

  VOXELFIELD_HOST_DEVICE int64_t index_of(const int32_t (&vertex)[3]) const {
    return (static_cast<int64_t>(vertex[0]) * size[1] + vertex[1]) * size[2] + vertex[2];
  }

  // The index of the vertex of a visit, or -1 if it lies outside the grid.
  VOXELFIELD_HOST_DEVICE int64_t index_of_visit(int64_t visit, int32_t id) const {
    if (tiles == nullptr) return visit;
    int32_t vertex[3];
    return find(visit, id, vertex) ? index_of(vertex) : -1;
  }
};

// Host side: creates a VertexGrid of all vertices of a checked tensor (X, Y, Z, C).
inline VertexGrid vertex_grid(const char* name, const Tensor& like, ScalarType dtype) {
  contiguous_data(name, like, {kAny, kAny, kAny, kAny}, dtype, like);
  VertexGrid grid{};
  for (int axis = 0; axis < 4; ++axis) {
    STD_TORCH_CHECK(like.size(axis) <= 0x7fffffff, name, " must have sizes below 2^31, got ", like.size(axis));
    (axis < 3 ? grid.size[axis] : grid.channels) = static_cast<int32_t>(like.size(axis));
  }
  grid.vertices = int64_t{grid.size[0]} * grid.size[1] * grid.size[2];
  return grid;
}

inline void list_tiles(const char* name, VertexGrid& grid, const char* tiles_name, const Tensor& tiles,
                       const Tensor& like) {
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(tiles_along(grid.size[axis], axis) <= kMaxTilesAlong, name, " must have at most ",
                    kMaxTilesAlong << optimizer_tile_shift(axis), " vertices along axis ", axis,
                    " if tiles are listed, got ", grid.size[axis]);
  }
  grid.tiles = contiguous_data(tiles_name, tiles, {kAny}, ScalarType::Int, like);
  STD_TORCH_CHECK(tiles.size(0) <= 0x7fffffff, tiles_name, " must be fewer than 2^31, got ", tiles.size(0));
  grid.capacity = static_cast<int32_t>(tiles.size(0));
}

// Creates a VertexGrid of all vertices of a float32 grid, or of those of the first `tile_count` tiles in `tiles`.
inline VertexGrid vertex_grid(const char* name, const Tensor& like, const OptionalTensor& tiles,
                              const OptionalTensor& tile_count) {
  VertexGrid grid = vertex_grid(name, like, ScalarType::Float);
  STD_TORCH_CHECK(tiles.has_value() == tile_count.has_value(),
                  "tiles and tile_count must be given together, got only one of them");
  if (!tiles.has_value()) return grid;
  list_tiles(name, grid, "tiles", *tiles, like);
  grid.tile_count = contiguous_data("tile_count", *tile_count, {1}, ScalarType::Int, like);
  return grid;
}

// Options of the optimizer, which are the same for every value and step.
struct AdamRule {
  double log_beta1, log_beta2;
  float rise1, rise2;  // 1 - beta
  float beta2;
  float eps;
  float weight_decay;  // decoupled weight decay, as a fraction of the learning rate
  float l2_penalty;    // weight decay that is added to the gradient
  bool skip_untouched;
  bool clear_grad;
  const float* grad_scale;  // factor in all gradients, to be divided out; null for 1
  const float* found_inf;   // if not 0, gradients are only cleared, in all vertices; null for 0

  VOXELFIELD_HOST_DEVICE bool skips_step() const { return found_inf != nullptr && *found_inf != 0.0f; }
};

// Factors of one step, which are the same for every value of a grid.
struct AdamStep {
  float size;     // learning rate divided by the bias correction of the first moment
  float root;     // bias correction factor for the square root of the second moment
  float retain;   // factor on the parameter, from decoupled weight decay
  float unscale;  // factor on the gradient

  VOXELFIELD_HOST_DEVICE static AdamStep make(const AdamRule& rule, float lr, double step) {
    // 1 - beta^step is computed with expm1. In early steps with beta close to 1, the subtraction would lose half of the
    // digits.
    const float bias1 = -expm1f(static_cast<float>(step * rule.log_beta1));
    const float bias2 = -expm1f(static_cast<float>(step * rule.log_beta2));
    const float unscale = rule.grad_scale == nullptr ? 1.0f : 1.0f / *rule.grad_scale;
    return {lr / bias1, 1.0f / sqrtf(bias2), 1.0f - lr * rule.weight_decay, unscale};
  }

  // Returns this step at a multiple of the learning rate, which also scales decay. A rate of one gives the same bits,
  // unless decay removes more than half of the parameter.
  VOXELFIELD_HOST_DEVICE AdamStep times(float rate) const {
    return {size * rate, root, 1.0f - rate * (1.0f - retain), unscale};
  }
};

VOXELFIELD_HOST_DEVICE void adam_update(const AdamRule& rule, const AdamStep& step, float grad, float& param,
                                        float& exp_avg, float& exp_avg_sq) {
  grad = grad * step.unscale + rule.l2_penalty * param;
  exp_avg += rule.rise1 * (grad - exp_avg);
  exp_avg_sq = rule.beta2 * exp_avg_sq + rule.rise2 * grad * grad;
  param = step.retain * param - step.size * exp_avg / (sqrtf(exp_avg_sq) * step.root + rule.eps);
}

enum class WorkingType : int32_t { kNone, kHalf, kBFloat16 };

// A grid and the state of Adam for it. The pointers refer to arrays (X, Y, Z, C).
struct AdamLevel {
  static constexpr int kMaxCopies = 8;

  VertexGrid grid;
  float *param, *grad;
  void *exp_avg, *exp_avg_sq;  // BFloat16 with narrow_moments, else float
  bool narrow_moments;
  void* working[kMaxCopies];
  int32_t copies;
  WorkingType working_type;
  bool counts_in_float;
  const float* lr;
  const void* steps;
  const float* channel_rates;  // factor on the learning rate for each channel; null if all channels have the same rate
  TouchedTable touched;  // the vertices that AdamRule::skip_untouched does not skip; null rows: those with a gradient

  VOXELFIELD_HOST_DEVICE int64_t values() const { return grid.vertices * grid.channels; }

  VOXELFIELD_HOST_DEVICE AdamStep step(const AdamRule& rule) const {
    const double count = counts_in_float ? static_cast<double>(*static_cast<const float*>(steps))
                                         : static_cast<double>(*static_cast<const int64_t*>(steps));
    return AdamStep::make(rule, *lr, count);
  }
};

// Each pair of neighbours costs weight / pairs * h(difference) along its axis. h is quadratic up to `delta` and
// continues along its tangent (the Huber loss, 1964, doubled).
struct TotalVariation {
  VertexGrid grid;
  const float* weights;  // for x, y and z
  float per_pair[3];     // 2 / pairs along the axis
  float delta;
  const float* param;
  float* grad;

  VOXELFIELD_HOST_DEVICE float factor(int axis) const { return weights[axis] * per_pair[axis]; }

  // h' / 2
  VOXELFIELD_HOST_DEVICE float slope(float difference) const {
    return difference < -delta ? -delta : (difference > delta ? delta : difference);
  }
};

// The range of cells in which samples touch a vertex of a tile.
struct TileCells {
  int32_t first[3], count[3];

  VOXELFIELD_HOST_DEVICE int32_t rows() const { return count[0] * count[1]; }
};

struct OccupiedCells {
  const bool* occupied;  // (X, Y, Z)
  int32_t cells[3];
  int32_t vertices[3];  // size of the grid
  int32_t tiles[3];     // number of tiles that cover the grid

  VOXELFIELD_HOST_DEVICE int64_t tile_total() const { return static_cast<int64_t>(tiles[0]) * tiles[1] * tiles[2]; }

  // Tiles are numbered row by row along z, so that their ids ascend with their numbers.
  VOXELFIELD_HOST_DEVICE int32_t id(int64_t number) const {
    const int32_t column = static_cast<int32_t>(number / tiles[2]), x = column / tiles[1];
    return tile_id(x, column - x * tiles[1], static_cast<int32_t>(number - static_cast<int64_t>(column) * tiles[2]));
  }

  VOXELFIELD_HOST_DEVICE TileCells operator[](int64_t number) const {
    const int32_t place = id(number);
    TileCells range{};
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t intervals = vertices[axis] > 1 ? vertices[axis] - 1 : 1;
      const int64_t first = static_cast<int64_t>(tile_along(place, axis)) << optimizer_tile_shift(axis);
      const int64_t next = first + (int64_t{1} << optimizer_tile_shift(axis));
      // Cell i spans the grid coordinates i * intervals / cells to (i + 1) * intervals / cells, and samples touch a
      // vertex from up to one interval away. The bounds are computed in integers and include cells that only share a
      // face, because rounding may move a sample into the neighbouring cell.
      const int64_t low = first > 1 ? ((first - 1) * cells[axis] + intervals - 1) / intervals - 1 : 0;
      const int64_t high = (next < vertices[axis] ? next : vertices[axis]) * cells[axis] / intervals;
      range.first[axis] = static_cast<int32_t>(low < 0 ? 0 : low);
      range.count[axis] = static_cast<int32_t>(high < cells[axis] ? high : cells[axis] - 1) - range.first[axis] + 1;
    }
    return range;
  }

  // Whether any cell is occupied in rows `row`, `row + step`, `row + 2 * step`, ... of the cells of a tile.
  VOXELFIELD_HOST_DEVICE bool any(const TileCells& range, int32_t row, int32_t step) const {
    bool found = false;
    for (; row < range.rows() && !found; row += step) {
      const int32_t x = row / range.count[1], y = row - x * range.count[1];
      const bool* cell = occupied +
                         (static_cast<int64_t>(range.first[0] + x) * cells[1] + range.first[1] + y) * cells[2] +
                         range.first[2];
      for (int32_t z = 0; z < range.count[2]; ++z) found |= cell[z];
    }
    return found;
  }
};

// Some vertices of the tiles of a grid. Without a list, a tile is 128 vertices that follow each other in memory.
struct VertexTiles {
  VertexGrid grid;
  int64_t first;       // without a list, the first vertex of the first tile
  TouchedTable table;  // to copy vertices, the last number of a row is that of the vertices in all rows before it
  int64_t tiles;

  // The index of a vertex of a tile, or -1 if it lies outside the grid.
  VOXELFIELD_HOST_DEVICE int64_t vertex(int64_t tile, int within) const {
    if (grid.tiles != nullptr) return grid.index_of_visit(tile * kOptimizerTileVertices + within, grid.tiles[tile]);
    const int64_t index = first + tile * kOptimizerTileVertices + within;
    return index < grid.vertices ? index : -1;
  }
};

// Marks the vertices of a gradient that are not zero, or all of them.
struct FindTouched {
  VertexTiles touched;
  const float* grad;
  bool all;
};

// Copies marked vertices of a grid to or from rows that follow each other. Those without a row are left out.
struct CopyTouched {
  VertexTiles touched;
  char* values;
  char* packed;
  int64_t rows;
  int64_t vertex_bytes;
  bool unpacks;
};

template <typename Backend>
struct OptimOps {
  using Tensors = std::vector<Tensor>;
  using OptionalTensors = std::vector<OptionalTensor>;

  static void grid_adam_(Tensors params, Tensors exp_avgs, Tensors exp_avg_sqs, Tensors grads, OptionalTensors working,
                         Tensors lrs, Tensors steps, OptionalTensors tiles, OptionalTensors tile_counts,
                         OptionalTensors touched, OptionalTensors channel_rates, const OptionalTensor& grad_scale,
                         const OptionalTensor& found_inf, double beta1, double beta2, double eps, double weight_decay,
                         double l2_penalty, bool skip_untouched, bool clear_grad) {
    const size_t count = params.size();
    for (const size_t length : {exp_avgs.size(), exp_avg_sqs.size(), grads.size(), lrs.size(), steps.size(),
                                tiles.size(), tile_counts.size(), touched.size(), channel_rates.size()}) {
      STD_TORCH_CHECK(length == count, "every list must be as long as params, ", count, ", got ", length);
    }
    if (count == 0) return;
    const size_t copies = working.size() / count;
    STD_TORCH_CHECK(working.size() == copies * count && copies <= AdamLevel::kMaxCopies,
                    "working must have as many tensors for each of ", count, " params, at most ", AdamLevel::kMaxCopies,
                    ", got ", working.size());
    const typename Backend::Guard guard(params[0]);
    std::vector<AdamLevel> levels;
    for (size_t i = 0; i < count; ++i) {
      const Tensor& param = params[i];
      STD_TORCH_CHECK(same_device(param, params[0]), "params must be on one device, got ", device_name(params[0]),
                      " and ", device_name(param));
      AdamLevel level{};
      level.grid = vertex_grid("params", param, tiles[i], tile_counts[i]);
      level.param = data_of(param);
      level.narrow_moments = exp_avgs[i].scalar_type() == ScalarType::BFloat16;
      const auto moments = [&](const char* name, const Tensor& x) {
        contiguous_data(name, x, shape_of(param), level.narrow_moments ? ScalarType::BFloat16 : ScalarType::Float,
                        param);
        return x.mutable_data_ptr();
      };
      level.exp_avg = moments("exp_avgs", exp_avgs[i]);
      level.exp_avg_sq = moments("exp_avg_sqs", exp_avg_sqs[i]);
      level.grad = contiguous_data("grads", grads[i], shape_of(param), ScalarType::Float, param);
      for (size_t j = i * copies; j < (i + 1) * copies; ++j) {
        if (!working[j].has_value()) continue;
        const Tensor& copy = *working[j];
        const bool half = copy.scalar_type() == ScalarType::Half;
        const WorkingType type = half ? WorkingType::kHalf : WorkingType::kBFloat16;
        contiguous_data("working", copy, shape_of(param), half ? ScalarType::Half : ScalarType::BFloat16, param);
        STD_TORCH_CHECK(level.copies == 0 || level.working_type == type, "working must have one dtype for a grid");
        level.working_type = type;
        level.working[level.copies++] = copy.mutable_data_ptr();
      }
      level.lr = number_data("lrs", lrs[i], ScalarType::Float, param);
      level.counts_in_float = steps[i].scalar_type() == ScalarType::Float;
      number_data("steps", steps[i], level.counts_in_float ? ScalarType::Float : ScalarType::Long, param);
      level.steps = steps[i].const_data_ptr();
      if (touched[i].has_value()) {
        STD_TORCH_CHECK(skip_untouched, "touched must be given with skip_untouched, got it without");
        const int64_t rows = tiles[i].has_value() ? level.grid.capacity : TouchedTable::rows_for(level.grid.vertices);
        level.touched.rows =
            contiguous_data("touched", *touched[i], {rows, TouchedTable::kColumns}, ScalarType::Int, param);
      }
      if (channel_rates[i].has_value()) {
        level.channel_rates =
            contiguous_data("channel_rates", *channel_rates[i], {param.size(3)}, ScalarType::Float, param);
      }
      if (param.numel() > 0) levels.push_back(level);
    }
    const auto number = [&](const char* name, const OptionalTensor& x) -> const float* {
      if (!x.has_value()) return nullptr;
      return number_data(name, *x, ScalarType::Float, params[0]);
    };
    const float *divisor = number("grad_scale", grad_scale), *skips = number("found_inf", found_inf);
    const auto narrow = [](double x) { return static_cast<float>(x); };
    const AdamRule rule{
        std::log(beta1),      std::log(beta2),    narrow(1 - beta1), narrow(1 - beta2), narrow(beta2), narrow(eps),
        narrow(weight_decay), narrow(l2_penalty), skip_untouched,    clear_grad,        divisor,       skips};
    if (!levels.empty()) Backend::adam(levels, rule);
  }

  static void grid_total_variation_grad_(Tensor grad, const Tensor& param, const Tensor& weights, double delta,
                                         const OptionalTensor& tiles, const OptionalTensor& tile_count) {
    const typename Backend::Guard guard(param);
    TotalVariation task{vertex_grid("param", param, tiles, tile_count)};
    task.param = data_of(param);
    task.grad = contiguous_data("grad", grad, shape_of(param), ScalarType::Float, param);
    task.weights = contiguous_data("weights", weights, {3}, ScalarType::Float, param);
    // Each vertex reads its neighbours in `param` while others are written.
    STD_TORCH_CHECK(task.grad + param.numel() <= task.param || task.param + param.numel() <= task.grad,
                    "grad must not share memory with param");
    task.delta = static_cast<float>(delta);
    if (param.numel() == 0) return;
    for (int axis = 0; axis < 3; ++axis) {
      const double pairs = static_cast<double>(param.numel()) / task.grid.size[axis] * (task.grid.size[axis] - 1);
      task.per_pair[axis] = pairs > 0 ? static_cast<float>(2 / pairs) : 0.0f;
    }
    Backend::total_variation(task);
  }

  static void active_tiles_(const Tensor& occupied, std::vector<int64_t> resolution, Tensor ids, Tensor count) {
    const Tensor cells = checked("occupied", occupied, {kAny, kAny, kAny}, ScalarType::Bool, occupied);
    STD_TORCH_CHECK(occupied.numel() > 0 && occupied.numel() <= 0x7fffffff,
                    "occupied must have 1 to 2^31 - 1 cells, got ", occupied.numel());
    STD_TORCH_CHECK(resolution.size() == 3, "resolution must be three sizes, got ", resolution.size());
    const typename Backend::Guard guard(occupied);
    OccupiedCells grid{data_of(cells), {}, {}, {}};
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t max_size = int64_t{kMaxTilesAlong} << optimizer_tile_shift(axis);
      STD_TORCH_CHECK(resolution[axis] >= 1 && resolution[axis] <= max_size, "resolution[", axis, "] must be 1 to ",
                      max_size, ", got ", resolution[axis]);
      grid.cells[axis] = static_cast<int32_t>(cells.size(axis));
      grid.vertices[axis] = static_cast<int32_t>(resolution[axis]);
      grid.tiles[axis] = tiles_along(grid.vertices[axis], axis);
    }
    Backend::active_tiles(grid, contiguous_data("ids", ids, {grid.tile_total()}, ScalarType::Int, cells),
                          contiguous_data("count", count, {1}, ScalarType::Int, cells), cells);
  }

  static void touched_vertices_(const Tensor& grad, const OptionalTensor& ids, bool all, Tensor table) {
    const typename Backend::Guard guard(grad);
    const FindTouched find{touched_tiles("grad", grad, ScalarType::Float, ids, 0, table), data_of(grad), all};
    if (find.touched.tiles > 0) Backend::find_touched(find);
  }

  static void pack_vertices_(const Tensor& grid, const OptionalTensor& ids, int64_t first, const Tensor& table,
                             Tensor packed) {
    copy_touched(grid, ids, first, table, packed, false);
  }

  static void unpack_vertices_(const Tensor& packed, const OptionalTensor& ids, int64_t first, const Tensor& table,
                               Tensor grid) {
    copy_touched(grid, ids, first, table, packed, true);
  }

  static void implement(Library& m) {
    m.impl("grid_adam_", TORCH_BOX(&OptimOps::grid_adam_));
    m.impl("grid_total_variation_grad_", TORCH_BOX(&OptimOps::grid_total_variation_grad_));
    m.impl("active_tiles_", TORCH_BOX(&OptimOps::active_tiles_));
    m.impl("touched_vertices_", TORCH_BOX(&OptimOps::touched_vertices_));
    m.impl("pack_vertices_", TORCH_BOX(&OptimOps::pack_vertices_));
    m.impl("unpack_vertices_", TORCH_BOX(&OptimOps::unpack_vertices_));
  }

 private:
  static VertexTiles touched_tiles(const char* name, const Tensor& grid, ScalarType dtype, const OptionalTensor& ids,
                                   int64_t first, const Tensor& table) {
    VertexTiles touched{vertex_grid(name, grid, dtype), first, {}, 0};
    if (ids.has_value()) list_tiles(name, touched.grid, "ids", *ids, grid);
    STD_TORCH_CHECK(first >= 0, "first must not be negative, got ", first);
    touched.table.rows = contiguous_data(
        "table", table, {ids.has_value() ? ids->size(0) : kAny, TouchedTable::kColumns}, ScalarType::Int, grid);
    touched.tiles = table.size(0);
    return touched;
  }

  static void copy_touched(const Tensor& grid, const OptionalTensor& ids, int64_t first, const Tensor& table,
                           const Tensor& packed, bool unpacks) {
    const ScalarType dtype = grid.scalar_type();
    VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                          "grid must be float32, float16 or bfloat16, got ", dtype_name(dtype));
    const typename Backend::Guard guard(grid);
    contiguous_data("packed", packed, {kAny, grid.size(3)}, dtype, grid);
    const CopyTouched copy{
        touched_tiles("grid", grid, dtype, ids, first, table), static_cast<char*>(grid.mutable_data_ptr()),
        static_cast<char*>(packed.mutable_data_ptr()),         packed.size(0),
        grid.size(3) * (dtype == ScalarType::Float ? 4 : 2),   unpacks};
    if (copy.touched.tiles > 0 && packed.numel() > 0) Backend::copy_touched(copy);
  }
};

}  // namespace voxelfield
