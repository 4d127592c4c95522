// Walking a ray through an occupancy grid on a fixed lattice of steps: t_k = near + (k + offset) * step.
//
// Whether lattice position k is taken depends on k alone: on the cell that its rounded position falls into. Strides
// over cells of one kind end early by a bound on all rounding, so where a walk starts, or what it strides over, changes
// nothing; parts of a ray can be walked in parallel, and again. Which products and sums are fused is spelled out for
// the same reason.
#pragma once

#include "common/whole_numbers.h"
#include "rays/cell_box.h"

namespace voxelfield {

// Lattice positions of a ray that are looked at. Up to here floats count exactly, and round as below.
constexpr int32_t kMostSteps = 1 << 22;
constexpr int64_t kMostCells = 1 << 22;  // along an axis

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

// `Cells` are occupied or empty: their `resolution`, their `aabb`, and around(cell), a CellBox.
template <typename Cells>
class RayWalk {
 public:
  VOXELFIELD_HOST_DEVICE RayWalk(const Cells& grid, const RayView& ray) : grid_(&grid), ray_(&ray) {
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
      steps_per_cell_[axis] = length * ray.steps_per_length;
      leave_[axis] = (leave - ray.near - slack) * ray.steps_per_length - ray.offset;
    }
  }

  // Moves on from lattice position k to the next one that may differ from it, `stop` at most. Says whether those in
  // between are taken.
  VOXELFIELD_HOST_DEVICE bool stride(float& k, float stop) const {
    const float t = ray_->t(k);
    int32_t cell[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      // Outside, and where the position is NaN: the cell at the border.
      const float position = fmaf(t, slope_[axis], start_[axis]);
      cell[axis] = trunc_small(position > 0.0f ? (position < border_[axis] ? position : border_[axis]) : 0.0f);
    }
    const CellBox box = grid_->around(cell);
    float next = stop;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float face = box.low[axis] + (steps_per_cell_[axis] > 0.0f ? box.width : 0.0f);
      const float leave = fmaf(face, steps_per_cell_[axis], leave_[axis]);
      next = leave < next ? leave : next;
    }
    next = ceil_small(next);
    k = next > k ? next : k + 1.0f;
    return box.occupied;
  }

  // Calls visit(begin, end) for stretches of taken lattice positions that cover all of [first, last), in order, until
  // it returns false. Stretches may touch.
  template <typename Visit>
  VOXELFIELD_HOST_DEVICE void walk(int32_t first, int32_t last, const Visit& visit) const {
    const float stop = static_cast<float>(last);
    for (float k = static_cast<float>(first); k < stop;) {
      const float begin = k;
      if (stride(k, stop) && !visit(static_cast<int32_t>(begin), static_cast<int32_t>(k))) return;
    }
  }

 private:
  const Cells* grid_;
  const RayView* ray_;
  // Along each axis: the last cell; in cells, where the ray is at t = 0 and how fast it goes; and the lattice number at
  // which it surely has not passed cell border `face` yet is face * steps_per_cell + leave.
  float border_[3], start_[3], slope_[3], steps_per_cell_[3], leave_[3];
};

// The taken lattice positions of a ray one at a time, for those who do something else in between. A walk can be
// assigned to, which begins another ray's.
template <typename Cells>
class SampleWalk {
 public:
  enum class Step { kSample, kPassed, kEnd };

  VOXELFIELD_HOST_DEVICE SampleWalk(const Cells& grid, const RayView& ray)
      : walk_(grid, ray), ray_(&ray), next_(0.0f), taken_(0.0f), stop_(static_cast<float>(ray.steps())) {}

  // The distance of the next one; or cells without any have been passed, or none is left.
  VOXELFIELD_HOST_DEVICE Step step(float& t) {
    if (!(next_ < taken_)) {
      if (!(next_ < stop_)) return Step::kEnd;
      float end = next_;
      if (!walk_.stride(end, stop_)) {
        next_ = end;
        return Step::kPassed;
      }
      taken_ = end;
    }
    t = ray_->t(next_);
    next_ += 1.0f;
    return Step::kSample;
  }

  // The distance of the next one; false at the ray's end.
  VOXELFIELD_HOST_DEVICE bool next(float& t) {
    Step step = Step::kPassed;
    while (step == Step::kPassed) step = this->step(t);
    return step == Step::kSample;
  }

 private:
  RayWalk<Cells> walk_;
  const RayView* ray_;
  float next_, taken_, stop_;  // lattice numbers: positions from `next_` to before `taken_` are known to be taken
};

}  // namespace voxelfield
