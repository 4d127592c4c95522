// Walking a ray through an occupancy grid on a fixed lattice of steps: t_k = near + (k + offset) * step.
//
// Whether lattice position k is taken depends on k alone: on the cell that its rounded position falls into. Strides
// over cells of one kind end early by a bound on all rounding, so where a walk starts, or what it strides over, changes
// nothing; parts of a ray can be walked in parallel, and again. Which products and sums are fused is spelled out for
// the same reason.
#pragma once

#include "occupancy_bits.h"

namespace voxelfield {

// Lattice positions of a ray that are looked at. Up to here floats count exactly, and round as below.
constexpr int32_t kMostSteps = 1 << 22;
constexpr int64_t kMostCells = 1 << 22;  // along an axis

// Conversions between float and int are several times as slow as sums on CUDA, but for whole numbers below 2^23 the
// bits of n + 2^23 are those of 2^23, and n.
VOXELFIELD_HOST_DEVICE int32_t floor_of(float value) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(__fadd_rd(value, 8388608.0f)) & 0x7fffff;
#else
  return static_cast<int32_t>(value);
#endif
}

VOXELFIELD_HOST_DEVICE float float_of(int32_t n) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(n | 0x4b000000) - 8388608.0f;
#else
  return static_cast<float>(n);
#endif
}

// A lattice number below 2^22 rounded up; what is below 0 only stays so.
VOXELFIELD_HOST_DEVICE float ceil_lattice(float value) {
#if defined(__CUDA_ARCH__)
  return __fadd_ru(value, 8388608.0f) - 8388608.0f;
#else
  return ceilf(value);
#endif
}

struct RayView {
  const float* origin;
  const float* direction;
  float near;
  float far;
  float offset;  // in steps, in [0, 1)
  float step;
  float steps_per_length;

  VOXELFIELD_HOST_DEVICE float t(float k) const { return fmaf(k + offset, step, near); }

  // Number of lattice positions before `far`.
  VOXELFIELD_HOST_DEVICE int32_t steps() const {
    const float estimate = (far - near) * steps_per_length - offset;
    int32_t k = 0;
    if (estimate > 0.0f) k = estimate < static_cast<float>(kMostSteps) ? static_cast<int32_t>(estimate) : kMostSteps;
    while (k > 0 && !(t(static_cast<float>(k - 1)) < far)) --k;
    while (k < kMostSteps && t(static_cast<float>(k)) < far) ++k;
    return k;
  }
};

// A product that no compiler fuses with the sum it enters.
VOXELFIELD_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

class RayWalk {
 public:
  VOXELFIELD_HOST_DEVICE RayWalk(const OccupancyView& grid, const RayView& ray) : grid_(grid), ray_(ray) {
    constexpr float kRounding = 8 * 5.9604645e-8f;
    const float slack = kRounding * (fabsf(ray.near) + fabsf(ray.far));
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float size = static_cast<float>(grid.resolution[axis]);
      const float cells = size / (grid.aabb[3 + axis] - grid.aabb[axis]);
      border_[axis] = size - 1.0f;
      start_[axis] = rounded_product(ray.origin[axis] - grid.aabb[axis], cells);
      slope_[axis] = rounded_product(ray.direction[axis], cells);
      const float error = kRounding * (fabsf(start_[axis]) + fabsf(ray.far * slope_[axis]) + size);
      const bool moves = slope_[axis] != 0.0f;
      const float length = moves ? 1.0f / slope_[axis] : 0.0f;
      const float leave = moves ? -start_[axis] * length - error * fabsf(length) : INFINITY;
      forward_[axis] = slope_[axis] > 0.0f ? 1.0f : 0.0f;
      steps_per_cell_[axis] = length * ray.steps_per_length;
      leave_[axis] = (leave - ray.near - slack) * ray.steps_per_length - ray.offset;
    }
  }

  // Calls visit(begin, end) for stretches of taken lattice positions that cover all of [first, last), in order, until
  // it returns false. Stretches may touch.
  template <typename Visit>
  VOXELFIELD_HOST_DEVICE void walk(int32_t first, int32_t last, const Visit& visit) const {
    const float stop = static_cast<float>(last);
    for (float k = static_cast<float>(first); k < stop;) {
      const float t = ray_.t(k);
      int32_t cell[3];
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        // Outside, and where the position is NaN: the cell at the border.
        const float position = fmaf(t, slope_[axis], start_[axis]);
        cell[axis] = floor_of(position > 0.0f ? (position < border_[axis] ? position : border_[axis]) : 0.0f);
      }
      const int64_t word =
          grid_.words[((cell[0] >> kBlockShift) * grid_.blocks[1] + (cell[1] >> kBlockShift)) * grid_.blocks[2] +
                      (cell[2] >> kBlockShift)];
      const bool taken = static_cast<uint64_t>(word) >> bit_of(cell[0], cell[1], cell[2]) & 1;
      const int32_t width = word == 0 || word == -1 ? kBlockCells : 1;
      float next = stop;
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        const float face = fmaf(float_of(width), forward_[axis], float_of(cell[axis] & -width));
        const float leave = fmaf(face, steps_per_cell_[axis], leave_[axis]);
        next = leave < next ? leave : next;
      }
      next = ceil_lattice(next);
      next = next > k ? next : k + 1.0f;
      if (taken && !visit(static_cast<int32_t>(k), static_cast<int32_t>(next))) return;
      k = next;
    }
  }

 private:
  const OccupancyView& grid_;
  const RayView& ray_;
  // Along each axis: the last cell; in cells, where the ray is at t = 0 and how fast it goes; 1 if it goes up; and the
  // lattice number at which it surely has not passed cell border `face` yet is face * steps_per_cell + leave.
  float border_[3], start_[3], slope_[3], forward_[3], steps_per_cell_[3], leave_[3];
};

}  // namespace voxelfield
