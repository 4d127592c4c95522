// The gradient of a grid's total variation, and the host side of grid_total_variation_grad_, written once: check the
// tensors and call Backend::total_variation(task).
#pragma once

#include "optim/vertex_grid.h"

namespace voxelfield {

// Each pair of neighbours costs weight / pairs * h(difference) along its axis. h is the square up to `delta` and goes
// on along its tangent (Huber 1964, doubled).
struct TotalVariation {
  VertexGrid grid;
  const float* weights;  // of x, y, z
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

template <typename Backend>
struct TotalVariationOps {
  static void grid_total_variation_grad_(Tensor grad, const Tensor& param, const Tensor& weights, double delta,
                                         const OptionalTensor& tiles, const OptionalTensor& tile_count) {
    const typename Backend::Guard guard(param);
    TotalVariation task{vertex_grid("param", param, tiles, tile_count)};
    task.param = data_of(param);
    task.grad = check_contiguous("grad", grad, shape_of(param), ScalarType::Float, param);
    task.weights = check_contiguous("weights", weights, {3}, ScalarType::Float, param);
    task.delta = static_cast<float>(delta);
    if (param.numel() == 0) return;
    for (int axis = 0; axis < 3; ++axis) {
      const double pairs = static_cast<double>(param.numel()) / task.grid.size[axis] * (task.grid.size[axis] - 1);
      task.per_pair[axis] = pairs > 0 ? static_cast<float>(2 / pairs) : 0.0f;
    }
    Backend::total_variation(task);
  }

  static void implement(Library& m) {
    m.impl("grid_total_variation_grad_", TORCH_BOX(&TotalVariationOps::grid_total_variation_grad_));
  }
};

}  // namespace voxelfield
