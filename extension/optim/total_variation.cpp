// The gradient of total variation on the CPU: row by row along z, one direction of neighbours at a time.
#include "common/backend.h"
#include "common/multiversion.h"
#include "optim/total_variation_ops.h"
#include "optim/walk_spans.h"

namespace voxelfield {
namespace {

// Adds the contributions of neighbours `stride` values away.
VOXELFIELD_MULTIVERSION void add_slopes(const VariationRule& rule, float factor, const float* value, int64_t stride,
                                        float* grad, int64_t count) {
  const VariationRule r = rule;
  VOXELFIELD_VECTORIZE
  for (int64_t i = 0; i < count; ++i) grad[i] += factor * r.slope(value[i] - value[i + stride]);
}

struct Cpu : CpuBackend {
  static void total_variation(const VertexGrid& grid, const VariationRule& rule, const float* param, float* grad) {
    for_each_span(grid, [&](int64_t first, int64_t count) {
      for (const int64_t last = first + count; first < last;) {
        const int64_t z = first % grid.size[2], length = std::min(last - first, grid.size[2] - z);
        add_row(grid, rule, param, grad, first, z, length);
        first += length;
      }
    });
  }

 private:
  // Part of a row, from vertex number `first`, which is vertex `z` of the row.
  static void add_row(const VertexGrid& grid, const VariationRule& rule, const float* param, float* grad, int64_t first,
                      int64_t z, int64_t length) {
    const int64_t channels = grid.channels, begin = first * channels, end = begin + length * channels;
    const int64_t row = first / grid.size[2], x = row / grid.size[1], y = row % grid.size[1];
    const auto add = [&](int axis, int64_t stride, int64_t from, int64_t to) {
      if (from < to) add_slopes(rule, rule.factor(axis), param + from, stride, grad + from, to - from);
    };
    const int64_t along_y = grid.size[2] * channels, along_x = grid.size[1] * along_y;
    add(2, -channels, z == 0 ? begin + channels : begin, end);
    add(2, channels, begin, z + length == grid.size[2] ? end - channels : end);
    if (y > 0) add(1, -along_y, begin, end);
    if (y < grid.size[1] - 1) add(1, along_y, begin, end);
    if (x > 0) add(0, -along_x, begin, end);
    if (x < grid.size[0] - 1) add(0, along_x, begin, end);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("grid_total_variation_grad_", TORCH_BOX(&TotalVariationOps<Cpu>::grid_total_variation_grad_));
}

}  // namespace voxelfield
