// Host side of grid_total_variation_grad_, written once: check and hand over to Backend::total_variation(grid, rule,
// param, grad).
#pragma once

#include "optim/total_variation.h"
#include "optim/vertex_grid.h"

namespace voxelfield {

template <typename Backend>
struct TotalVariationOps {
  static void grid_total_variation_grad_(Tensor grad, const Tensor& param, const Tensor& weights, double delta,
                                         const std::optional<Tensor>& blocks,
                                         const std::optional<Tensor>& block_count) {
    const typename Backend::Guard guard(param);
    const VertexGrid grid = vertex_grid(param, blocks, block_count);
    for (const Tensor& x : {param, grad}) {
      STD_TORCH_CHECK(
          x.dim() == 4 && x.is_contiguous() && x.scalar_type() == ScalarType::Float && same_device(x, param),
          "grad and param must be contiguous float32 (X, Y, Z, C) on one device");
    }
    for (int axis = 0; axis < 4; ++axis) {
      STD_TORCH_CHECK(grad.size(axis) == param.size(axis), "grad must have the shape of param");
    }
    STD_TORCH_CHECK(weights.dim() == 1 && weights.size(0) == 3 && weights.is_contiguous() &&
                        weights.scalar_type() == ScalarType::Float && same_device(weights, param),
                    "weights must be contiguous float32 (3,) on the device of param");
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
