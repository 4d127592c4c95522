// Every operator of voxelfield, in one page. Kernels register themselves for CPU (cpu/) and CUDA (cuda/); shapes under
// torch.compile and derivatives are registered in Python (voxelfield/ops/).
#include <torch/csrc/stable/library.h>

#include "digest.h"

STABLE_TORCH_LIBRARY(voxelfield, m) {
  // Trilinear sampling of grids (B, X, Y, Z, C), one or several resolutions, at points (B, N, 3) of the unit cube:
  // their channels side by side, or added up with `sum`. `direction` (B, N, 3) turns each op into its derivative along
  // that direction of the point; `with_gradient` stacks the value and its three derivatives in a leading dimension
  // of 4. padding: 0 border, 1 zeros, 2 reflection. `sizes` are X, Y, Z, C of each level. method: 0 automatic, 1
  // atomic, 2 tiled, 3 tiled with a fixed order of summation.
  m.def(
      "sample_trilinear(Tensor[] grids, Tensor points, Tensor? direction, int padding, bool align_corners, "
      "bool nearest, bool sum, bool with_gradient) -> Tensor");
  m.def(
      "splat_trilinear(Tensor values, Tensor points, Tensor? direction, int[] sizes, int padding, bool align_corners, "
      "bool nearest, bool sum, bool with_gradient, int method) -> Tensor[]");
  m.def(
      "point_gradient_trilinear(Tensor values, Tensor[] grids, Tensor points, Tensor? direction, int padding, "
      "bool align_corners, bool nearest, bool sum, bool with_gradient) -> Tensor");

  // The same for points that bring their own cell: feats (N, 8, C), points (N, 3) in [-1, 1].
  m.def("interpolate_cells(Tensor feats, Tensor points, Tensor? direction) -> Tensor");
  m.def("splat_cells(Tensor values, Tensor points, Tensor? direction) -> Tensor");
  m.def("point_gradient_cells(Tensor values, Tensor feats, Tensor points, Tensor? direction) -> Tensor");

  // Samples along rays through occupied space: first how many each ray has, then where they are.
  m.def(
      "count_ray_samples(Tensor origins, Tensor directions, Tensor near, Tensor far, Tensor offset, Tensor occupied, "
      "Tensor aabb, float step) -> Tensor");
  m.def(
      "place_ray_samples(Tensor origins, Tensor directions, Tensor near, Tensor far, Tensor offset, Tensor occupied, "
      "Tensor aabb, float step, Tensor ray_offsets, int count) -> (Tensor, Tensor, Tensor)");

  // Emission-absorption along packed rays (ray_offsets is CSR).
  m.def("ray_weights(Tensor density, Tensor dt, Tensor ray_offsets, float min_transmittance) -> Tensor");
  m.def(
      "composite(Tensor density, Tensor rgb, Tensor t, Tensor dt, Tensor ray_offsets, float min_transmittance) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "composite_backward(Tensor grad_rgb, Tensor grad_opacity, Tensor grad_depth, Tensor grad_weights, Tensor "
      "density, "
      "Tensor rgb, Tensor t, Tensor dt, Tensor ray_offsets, float min_transmittance) -> (Tensor, Tensor)");
}
