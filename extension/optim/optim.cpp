// The ops of this folder on the CPU. Threads process spans of vertices that are contiguous in memory, in loops that
// compilers can vectorise.
#include <cstring>

#include "common/backend.h"
#include "common/narrow.h"
#include "optim/optim_ops.h"

namespace voxelfield {
namespace {

// Calls f(first, count, visit) for spans that together cover all vertices to be visited; `visit` is the first visit.
template <typename F>
void for_each_span(const VertexGrid& grid, const F& f) {
  constexpr int64_t kValuesPerTask = 1 << 15;
  const int64_t visits_per_task =
      (kValuesPerTask / std::max(grid.channels, 1) / kOptimizerTileVertices + 1) * kOptimizerTileVertices;
  for_each_range(grid.visits(), visits_per_task, [&](int64_t begin, int64_t end) {
    if (grid.tiles == nullptr) return f(begin, end - begin, begin);
    // Visits follow the rows of a tile along z, so only the first vertex of each row needs a lookup.
    constexpr int64_t kRow = int64_t{1} << optimizer_tile_shift(2);
    for (int64_t visit = begin; visit < end; visit += kRow) {
      int32_t vertex[3];
      if (grid.find(visit, grid.id_of(visit), vertex)) {
        f(grid.index_of(vertex), std::min<int64_t>(kRow, grid.size[2] - vertex[2]), visit);
      }
    }
  });
}

// Updates `count` values, starting at value `first`. With kByChannel, they are rows of channels, and the rate of a
// value is the rate of its column.
template <typename moment_t, bool kByChannel>
VOXELFIELD_HOST_DEVICE void update_rows(const AdamLevel& level, const AdamRule& rule, const AdamStep& step,
                                        int64_t first, int64_t count) {
  const AdamRule r = rule;
  const AdamStep s = step;
  const int64_t length = kByChannel ? level.grid.channels : count;
  const float *grad = level.grad, *rates = level.channel_rates;
  float* param = level.param;
  auto *exp_avg = static_cast<moment_t*>(level.exp_avg), *exp_avg_sq = static_cast<moment_t*>(level.exp_avg_sq);
  for (int64_t row = first; row < first + count; row += length) {
    VOXELFIELD_VECTORIZE
    for (int64_t c = 0; c < length; ++c) {
      const int64_t i = row + c;
      float p = param[i], m = widen(exp_avg[i]), v = widen(exp_avg_sq[i]);
      adam_update(r, kByChannel ? s.times(rates[c]) : s, grad[i], p, m, v);
      param[i] = p;
      exp_avg[i] = narrow_to<moment_t>(m);
      exp_avg_sq[i] = narrow_to<moment_t>(v);
    }
  }
}

VOXELFIELD_MULTIVERSION void update_values(const AdamLevel& level, const AdamRule& rule, const AdamStep& step,
                                           int64_t first, int64_t count) {
  if (level.channel_rates == nullptr) {
    level.narrow_moments ? update_rows<BFloat16, false>(level, rule, step, first, count)
                         : update_rows<float, false>(level, rule, step, first, count);
  } else {
    level.narrow_moments ? update_rows<BFloat16, true>(level, rule, step, first, count)
                         : update_rows<float, true>(level, rule, step, first, count);
  }
}

VOXELFIELD_MULTIVERSION void round_values(const float* values, BFloat16* rounded, int64_t count) {
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) rounded[i] = narrow_to<BFloat16>(values[i]);
}

void update_span(const AdamLevel& level, const AdamRule& rule, const AdamStep& step, int64_t first, int64_t count) {
  const int64_t at = first * level.grid.channels, values = count * level.grid.channels;
  update_values(level, rule, step, at, values);
  if (rule.clear_grad) std::fill_n(level.grad + at, values, 0.0f);
  for (int copy = 0; copy < level.copies; ++copy) {
    if (level.working_type == WorkingType::kHalf) {
      float16_rows.narrow(level.param + at, values, static_cast<Half*>(level.working[copy]) + at);
    } else {
      round_values(level.param + at, static_cast<BFloat16*>(level.working[copy]) + at, values);
    }
  }
}

bool is_touched(const float* grad, int64_t vertex, int64_t channels) {
  const float* const values = grad + vertex * channels;
  return std::any_of(values, values + channels, [](float x) { return x != 0.0f; });
}

// Tells whether all values are zeros, of either sign. It is for blocks of vertices, most of which have no gradient.
VOXELFIELD_MULTIVERSION bool are_zeros(const float* values, int64_t count) {
  uint32_t others = 0;
  VOXELFIELD_VECTORIZE_SUM(others)
  for (int64_t i = 0; i < count; ++i) others += float_to_bits(values[i]) << 1 == 0 ? 0 : 1;
  return others == 0;
}

void update_touched(const AdamLevel& level, const AdamRule& rule, const AdamStep& step, int64_t first, int64_t count,
                    int64_t visit) {
  const auto touched = [&](int64_t vertex) {
    return level.touched.rows == nullptr ? is_touched(level.grad, vertex, level.grid.channels)
                                         : level.touched.has(visit + vertex - first);
  };
  const int64_t last = first + count;
  constexpr int64_t kBlock = 32;
  for (int64_t low = first, high; low < last; low = high) {
    high = std::min(low + kBlock, last);
    const float* const grad = level.grad + low * level.grid.channels;
    if (level.touched.rows == nullptr && are_zeros(grad, (high - low) * level.grid.channels)) continue;
    for (int64_t vertex = low; vertex < high; ++vertex) {
      if (!touched(vertex)) continue;
      const int64_t at = vertex * level.grid.channels, moments = at * (level.narrow_moments ? 2 : 4);
      VOXELFIELD_PREFETCH(level.param + at);
      VOXELFIELD_PREFETCH(static_cast<const char*>(level.exp_avg) + moments);
      VOXELFIELD_PREFETCH(static_cast<const char*>(level.exp_avg_sq) + moments);
    }
    for (int64_t begin = low; begin < high; ++begin) {
      if (!touched(begin)) continue;
      int64_t end = begin + 1;
      while (end < high && touched(end)) ++end;
      update_span(level, rule, step, begin, end - begin);
      begin = end;
    }
  }
}

// Adds the slopes between the values [begin, end) and their neighbours, which are `stride` values away along an axis.
// Total variation processes row after row along z, with one direction of neighbours at a time.
VOXELFIELD_MULTIVERSION void add_slopes(const TotalVariation& all, int axis, int64_t stride, int64_t begin,
                                        int64_t end) {
  const TotalVariation task = all;
  const float factor = task.factor(axis);
  VOXELFIELD_VECTORIZE
  for (int64_t i = begin; i < end; ++i) {
    task.grad[i] += factor * task.slope(task.param[i] - task.param[i + stride]);
  }
}

// Processes part of a row. `first` is the number of its first vertex, which is vertex `z` of the row.
void add_row(const TotalVariation& task, int64_t first, int64_t z, int64_t length) {
  const int32_t (&size)[3] = task.grid.size;
  const int64_t channels = task.grid.channels, begin = first * channels, end = begin + length * channels;
  const int64_t row = first / size[2], x = row / size[1], y = row % size[1];
  const int64_t along_y = size[2] * channels, along_x = size[1] * along_y;
  add_slopes(task, 2, -channels, z == 0 ? begin + channels : begin, end);
  add_slopes(task, 2, channels, begin, z + length == size[2] ? end - channels : end);
  if (y > 0) add_slopes(task, 1, -along_y, begin, end);
  if (y < size[1] - 1) add_slopes(task, 1, along_y, begin, end);
  if (x > 0) add_slopes(task, 0, -along_x, begin, end);
  if (x < size[0] - 1) add_slopes(task, 0, along_x, begin, end);
}

struct CpuOptim : CpuBackend {
  static void adam(const std::vector<AdamLevel>& levels, const AdamRule& rule) {
    for (const AdamLevel& level : levels) {
      if (rule.skips_step()) {
        const auto clear = [&](int64_t begin, int64_t end) { std::fill(level.grad + begin, level.grad + end, 0.0f); };
        if (rule.clear_grad) for_each_range(level.values(), 1 << 15, clear);
        continue;
      }
      const AdamStep step = level.step(rule);
      for_each_span(level.grid, [&](int64_t first, int64_t count, int64_t visit) {
        if (rule.skip_untouched) return update_touched(level, rule, step, first, count, visit);
        update_span(level, rule, step, first, count);
      });
    }
  }

  static void total_variation(const TotalVariation& task) {
    for_each_span(task.grid, [&](int64_t first, int64_t count, int64_t /*visit*/) {
      for (const int64_t last = first + count; first < last;) {
        const int64_t z = first % task.grid.size[2], length = std::min(last - first, task.grid.size[2] - z);
        add_row(task, first, z, length);
        first += length;
      }
    });
  }

  // Tiles are tested in parallel and listed in order.
  static void active_tiles(const OccupiedCells& cells, int32_t* ids, int32_t* count, const Tensor& /*like*/) {
    const int64_t total = cells.tile_total();
    std::vector<char> active(total);
    for_each(total, [&](int64_t number) { active[number] = cells.any(cells[number], 0, 1); }, 256);
    *count = 0;
    for (int64_t number = 0; number < total; ++number) {
      if (active[number]) ids[(*count)++] = cells.id(number);
    }
  }

  static void find_touched(const FindTouched& find) {
    for_each(
        find.touched.tiles,
        [&](int64_t tile) {
          std::fill_n(find.touched.table.row(tile), TouchedTable::kColumns, 0);
          for (int within = 0; within < kOptimizerTileVertices; ++within) {
            const int64_t vertex = find.touched.vertex(tile, within);
            if (vertex < 0 || !(find.all || is_touched(find.grad, vertex, find.touched.grid.channels))) continue;
            find.touched.table.add(tile * kOptimizerTileVertices + within);
          }
        },
        64);
  }

  static void copy_touched(const CopyTouched& copy) {
    for_each(
        copy.touched.tiles,
        [&](int64_t tile) {
          int64_t to = copy.touched.table.row(tile)[TouchedTable::kWords];
          for (int within = 0; within < kOptimizerTileVertices; ++within) {
            if (!copy.touched.table.has(tile * kOptimizerTileVertices + within)) continue;
            const int64_t vertex = copy.touched.vertex(tile, within), at = to++;
            if (vertex < 0 || at < 0 || at >= copy.rows) continue;
            char* const values = copy.values + vertex * copy.vertex_bytes;
            char* const packed = copy.packed + at * copy.vertex_bytes;
            std::memcpy(copy.unpacks ? values : packed, copy.unpacks ? packed : values, copy.vertex_bytes);
          }
        },
        64);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) { OptimOps<CpuOptim>::implement(m); }

}  // namespace voxelfield
