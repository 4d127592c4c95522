// voxelfield for C++ programs: trilinear sampling of voxel grids, differentiable by torch's autograd.
//
// All other operators can be called through torch's dispatcher in the same way; extension/module/library.cpp lists
// them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/custom_function.h>

#include <vector>

namespace voxelfield {

// The value at a point outside the unit cube, as in F.grid_sample: the nearest point of the border, zeros in place of
// missing vertices, or the grid mirrored at its border. The values are those of the operators' schemas.
enum class Padding : int64_t { kBorder = 0, kZeros = 1, kReflection = 2 };

namespace detail {

template <typename Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
}

inline at::Tensor sample(at::TensorList grids, const at::Tensor& points, Padding padding, bool align_corners) {
  using Signature = at::Tensor(at::TensorList, const at::Tensor&, int64_t, bool, bool, bool, bool);
  static const auto op = find_operator<Signature>("voxelfield::sample_trilinear");
  return op.call(grids, points, static_cast<int64_t>(padding), align_corners, /*nearest=*/false,
                 /*sum=*/false, /*with_gradient=*/false);
}

inline at::Tensor splat(const at::Tensor& values, const at::Tensor& points, at::IntArrayRef size, Padding padding,
                        bool align_corners) {
  using Signature = std::vector<at::Tensor>(const at::Tensor&, const at::Tensor&, at::IntArrayRef, int64_t, bool, bool,
                                            bool, bool, int64_t);
  static const auto op = find_operator<Signature>("voxelfield::splat_trilinear");
  return op.call(values, points, size, static_cast<int64_t>(padding), align_corners, /*nearest=*/false,
                 /*sum=*/false, /*with_gradient=*/false, /*method=*/0)[0];
}

inline at::Tensor point_gradient(const at::Tensor& values, at::TensorList grids, const at::Tensor& points,
                                 Padding padding, bool align_corners) {
  using Signature = at::Tensor(const at::Tensor&, at::TensorList, const at::Tensor&, int64_t, bool, bool, bool, bool);
  static const auto op = find_operator<Signature>("voxelfield::point_gradient_trilinear");
  return op.call(values, grids, points, static_cast<int64_t>(padding), align_corners, /*nearest=*/false,
                 /*sum=*/false, /*with_gradient=*/false);
}

// grid (B, X, Y, Z, C), points (B, N, 3).
class SampleTrilinear : public torch::autograd::Function<SampleTrilinear> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& grid, const at::Tensor& points,
                            int64_t padding, bool align_corners) {
    context->save_for_backward({grid, points});
    context->saved_data["padding"] = padding;
    context->saved_data["align_corners"] = align_corners;
    return sample({grid}, points, static_cast<Padding>(padding), align_corners);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "voxelfield::sample_trilinear is differentiable once in C++, got create_graph=true; "
                                "second derivatives are offered in Python");
    const auto saved = context->get_saved_variables();
    const at::Tensor &grid = saved[0], points = saved[1];
    const auto padding = static_cast<Padding>(context->saved_data["padding"].toInt());
    const bool align_corners = context->saved_data["align_corners"].toBool();
    at::Tensor grad_grid, grad_points;
    if (context->needs_input_grad(0)) {
      grad_grid = splat(gradients[0], points, grid.sizes().slice(1), padding, align_corners);
    }
    if (context->needs_input_grad(1)) {
      grad_points = point_gradient(gradients[0], {grid}, points, padding, align_corners);
    }
    return {grad_grid, grad_points, at::Tensor(), at::Tensor()};
  }
};

}  // namespace detail

// Samples a grid at points by trilinear interpolation.
//
// grid: (X, Y, Z, C), or (B, X, Y, Z, C) for a batch; float32, float64, float16 or bfloat16, on the CPU or on CUDA.
// points: (N, 3) or (B, N, 3) in the unit cube, indexed x, y, z as the grid is; on the grid's device, float64 for
//     float64 grids and float32 for all others.
// align_corners: the cube's corners are the outermost vertices; otherwise the outer corners of the outermost cells.
//
// Returns (N, C) or (B, N, C) in the grid's dtype, differentiable once with respect to grid and points. Raises
// c10::Error if shapes, dtypes or devices do not match, or if a second derivative is requested.
inline at::Tensor sample_trilinear(const at::Tensor& grid, const at::Tensor& points, Padding padding = Padding::kBorder,
                                   bool align_corners = true) {
  TORCH_CHECK_VALUE(grid.dim() == 4 || grid.dim() == 5, "grid must be (X, Y, Z, C) or (B, X, Y, Z, C), got shape ",
                    grid.sizes());
  TORCH_CHECK_VALUE(points.dim() == grid.dim() - 2, "points must be ", grid.dim() == 4 ? "(N, 3)" : "(B, N, 3)",
                    " beside a grid of shape ", grid.sizes(), ", got shape ", points.sizes());
  const bool batched = grid.dim() == 5;
  const at::Tensor sampled =
      detail::SampleTrilinear::apply(batched ? grid : grid.unsqueeze(0), batched ? points : points.unsqueeze(0),
                                     static_cast<int64_t>(padding), align_corners);
  return batched ? sampled : sampled.squeeze(0);
}

}  // namespace voxelfield
