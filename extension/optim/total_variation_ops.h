// Host side of grid_total_variation_grad_, written once: check the tensors and call
// Backend::total_variation(grid, rule, param, grad).
#pragma once

#include "common/check_tensor.h"
#include "optim/total_variation.h"
#include "optim/vertex_grid.h"

namespace voxelfield {

template <typename Backend>
struct TotalVariationOps {
  static void grid_total_variation_grad_(Tensor grad, const Tensor& param, const Tensor& weights, double delta,
                                         const std::optional<Tensor>& blocks,
                                         const std::optional<Tensor>& block_count) {
    const typename Backend::Guard guard(param);
    const VertexGrid grid = vertex_grid("param", param, blocks, block_count);
    check_contiguous("grad", grad, shape_of(param), ScalarType::Float, param);
    check_contiguous("weights", weights, {3}, ScalarType::Float, param);
    if (param.numel() == 0) return;
    VariationRule rule{weights.const_data_ptr<float>(), {}, static_cast<float>(delta)};
    for (int axis = 0; axis < 3; ++axis) {
      const double pairs = static_cast<double>(param.numel()) / grid.size[axis] * (grid.size[axis] - 1);
      rule.per_pair[axis] = pairs > 0 ? static_cast<float>(2 / pairs) : 0.0f;
    }
    Backend::total_variation(grid, rule, param.const_data_ptr<float>(), grad.mutable_data_ptr<float>());
  }
};

}  // namespace voxelfield
