// Walking one ray through an occupancy grid on a fixed lattice of steps: t_k = near + (k + offset) * step.
#pragma once

#include "trilinear.h"

namespace voxelfield {

struct OccupancyView {
  const bool* occupied;  // (X, Y, Z) cells, contiguous
  int64_t resolution[3];
  const float* aabb;  // lower corner, upper corner
};

struct RayView {
  const float* origin;
  const float* direction;
  float near;
  float far;
  float offset;  // in steps, in [0, 1)
};

// A product that no compiler fuses with the sum it enters.
VOXELFIELD_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Calls visit(t) for every lattice position inside an occupied cell, in order, until it returns false. Steps over empty
// cells in one go. Which products and sums are fused is spelled out, so that counting
// and placing agree to the bit.
template <typename Visit>
VOXELFIELD_HOST_DEVICE void march_ray(const OccupancyView& grid, const RayView& ray, float step, const Visit& visit) {
  float start[3], slope[3];  // the ray in cell coordinates
  VOXELFIELD_UNROLL
  for (int axis = 0; axis < 3; ++axis) {
    const float cells = static_cast<float>(grid.resolution[axis]) / (grid.aabb[3 + axis] - grid.aabb[axis]);
    start[axis] = rounded_product(ray.origin[axis] - grid.aabb[axis], cells);
    slope[axis] = rounded_product(ray.direction[axis], cells);
  }
  int64_t k = 0;
  while (true) {
    const float t = fmaf(static_cast<float>(k) + ray.offset, step, ray.near);
    if (!(t < ray.far)) return;
    int64_t cell = 0;
    float exit = ray.far;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const int64_t last = grid.resolution[axis] - 1;
      const float position = fmaf(t, slope[axis], start[axis]);
      const int64_t i =
          position > 0.0f ? (position < static_cast<float>(last) ? static_cast<int64_t>(position) : last) : 0;
      cell = cell * grid.resolution[axis] + i;
      if (slope[axis] != 0.0f) {
        const float face = static_cast<float>(slope[axis] > 0.0f ? i + 1 : i);
        const float leave = (face - start[axis]) / slope[axis];
        exit = leave < exit ? leave : exit;
      }
    }
    if (grid.occupied[cell]) {
      if (!visit(t)) return;
      ++k;
    } else {
      const float next = ceilf((exit - ray.near) / step - ray.offset);
      k = next > static_cast<float>(k) + 1.0f ? static_cast<int64_t>(next) : k + 1;
    }
  }
}

}  // namespace voxelfield
