// Walks a ray through an occupancy grid on a fixed lattice of steps: t_k = near + (k + offset) * step.
//
// Lattice position k is a hit if it lies inside the box and in an occupied cell. This depends on k alone, namely on the
// cell that contains the rounded position. Strides over cells of one kind end early by a bound on all rounding errors,
// so neither the start of a walk nor the length of its strides changes the result. Segments of a ray can therefore be
// walked in parallel, or repeatedly. For the same reason, fused and separate products are written explicitly.
#pragma once

#include "common/constants.h"
#include "common/whole_numbers.h"

namespace voxelfield {

// A cube of cells that are either all occupied or all empty. It may extend beyond the grid.
struct CellBox {
  bool occupied;
  float low[3];  // lower faces, in cells
  float width;   // in cells
};

constexpr int32_t kBrickCells = 1 << kBrickShift;  // along each axis
constexpr int32_t kWithinBrick = kBrickCells - 1;

VOXELFIELD_HOST_DEVICE int bit_of(int32_t x, int32_t y, int32_t z) {
  return (x & kWithinBrick) << 2 * kBrickShift | (y & kWithinBrick) << kBrickShift | (z & kWithinBrick);
}

// One bit per cell. A word holds a brick of 4 x 4 x 4 cells, so one load gives a walk the surroundings of a cell, and
// it crosses an empty brick in one stride.
struct OccupancyView {
  const int64_t* words;   // (bricks[0], bricks[1], bricks[2])
  int32_t resolution[3];  // cells
  int32_t bricks[3];
  const float* aabb;  // lower corner, upper corner

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    const int64_t word =
        words[((cell[0] >> kBrickShift) * bricks[1] + (cell[1] >> kBrickShift)) * bricks[2] + (cell[2] >> kBrickShift)];
    const int32_t width = word == 0 || word == -1 ? kBrickCells : 1;
    return {(static_cast<uint64_t>(word) >> bit_of(cell[0], cell[1], cell[2]) & 1) != 0,
            {int_to_float(cell[0] & -width), int_to_float(cell[1] & -width), int_to_float(cell[2] & -width)},
            int_to_float(width)};
  }
};

// Packs the bricks of a grid (X, Y, Z) of bools. Cells beyond the grid are empty.
struct PackBricks {
  const bool* occupied;
  OccupancyView grid;
  int64_t* words;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t brick) const {
    const int32_t* size = grid.resolution;
    const int32_t first[3] = {static_cast<int32_t>(brick / grid.bricks[2] / grid.bricks[1]) * kBrickCells,
                              static_cast<int32_t>(brick / grid.bricks[2] % grid.bricks[1]) * kBrickCells,
                              static_cast<int32_t>(brick % grid.bricks[2]) * kBrickCells};
    uint64_t word = 0;
    for (int32_t x = first[0]; x < first[0] + kBrickCells && x < size[0]; ++x) {
      for (int32_t y = first[1]; y < first[1] + kBrickCells && y < size[1]; ++y) {
        const bool* row = occupied + (static_cast<int64_t>(x) * size[1] + y) * size[2];
        for (int32_t z = first[2]; z < first[2] + kBrickCells && z < size[2]; ++z) {
          word |= static_cast<uint64_t>(row[z]) << bit_of(x, y, z);
        }
      }
    }
    words[brick] = static_cast<int64_t>(word);
  }
};

// Cells in either form, for kernels that accept both. Distances take eight times the memory and have to be computed in
// passes over all cells, but allow longer strides through empty space.
struct CellsView : OccupancyView {
  // (X, Y, Z), or null if the cells are bits. 0 in an occupied cell. Otherwise all cells whose distance along each axis
  // is less than this number of cells are empty.
  const uint8_t* empty_distances;

  VOXELFIELD_HOST_DEVICE CellBox around(const int32_t cell[3]) const {
    if (empty_distances == nullptr) return OccupancyView::around(cell);
    const int32_t distance = empty_distances[(cell[0] * resolution[1] + cell[1]) * resolution[2] + cell[2]];
    const float reach = int_to_float(distance > 1 ? distance - 1 : 0);
    return {distance == 0,
            {int_to_float(cell[0]) - reach, int_to_float(cell[1]) - reach, int_to_float(cell[2]) - reach},
            fmaf(2.0f, reach, 1.0f)};
  }
};

// Maximum number of lattice positions that are examined per ray. Floats represent all integers up to this value
// exactly, and the rounding below relies on it.
constexpr int32_t kMaxSteps = 1 << 22;
constexpr int64_t kMaxCells = 1 << 22;  // along each axis

// The lattice positions begin, ..., end - 1 of a ray.
struct StepRange {
  int32_t begin, end;
};

struct RayView {
  const float* origin;
  const float* direction;
  float near;
  float far;
  float offset;  // in steps, in [0, 1)
  float step;
  float steps_per_length;

  VOXELFIELD_HOST_DEVICE float t(float k) const { return fmaf(k + offset, step, near); }

  // Returns the number of lattice positions before distance `limit`, or zero if `limit` is infinitely far.
  VOXELFIELD_HOST_DEVICE int32_t steps_before(float limit) const {
    const float length = limit - near;
    if (!(length < INFINITY)) return 0;
    const float estimate = fmaf(length, steps_per_length, -offset);
    int32_t k = 0;
    if (estimate > 0.0f) k = estimate < static_cast<float>(kMaxSteps) ? static_cast<int32_t>(estimate) : kMaxSteps;
    while (k > 0 && !(t(static_cast<float>(k - 1)) < limit)) --k;
    while (k < kMaxSteps && t(static_cast<float>(k)) < limit) ++k;
    return k;
  }
};

// A product that no compiler fuses with a subsequent addition.
VOXELFIELD_HOST_DEVICE float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// `Cells` has a `resolution`, an `aabb`, and a function around(cell) that returns a CellBox.
template <typename Cells>
class RayWalk {
 public:
  VOXELFIELD_HOST_DEVICE RayWalk(const Cells& grid, const RayView& ray) : grid_(&grid), ray_(&ray) {
    constexpr float kRounding = 8 * 5.9604645e-8f;
    float enter = -INFINITY, leave = INFINITY;  // distances at which the ray crosses the faces of the box
    float length[3];                            // length of the ray per cell
    bool outside = false;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float size = static_cast<float>(grid.resolution[axis]);
      const float cells = size / (grid.aabb[3 + axis] - grid.aabb[axis]);
      border_[axis] = size - 1.0f;
      start_[axis] = rounded_product(ray.origin[axis] - grid.aabb[axis], cells);
      slope_[axis] = rounded_product(ray.direction[axis], cells);
      length[axis] = slope_[axis] != 0.0f ? 1.0f / slope_[axis] : 0.0f;
      // A position that rounding may have moved out of the box still belongs to the box.
      const float extent = fabsf(start_[axis]) + size;
      const float below = fmaf(-2 * kRounding, extent, -start_[axis]);
      const float above = fmaf(2 * kRounding, extent, size - start_[axis]);
      // A ray that is not finite in cells, for which comparisons are false, has no hits.
      outside = outside || !(below <= above) || !(fabsf(slope_[axis]) < INFINITY);
      if (slope_[axis] != 0.0f) {
        const float first = (slope_[axis] > 0.0f ? below : above) * length[axis];
        const float last = (slope_[axis] > 0.0f ? above : below) * length[axis];
        if (first > enter) enter = first;
        if (last < leave) leave = last;
      } else {
        outside = outside || below > 0.0f || above < 0.0f;
      }
    }
    // There are no hits beyond `reach`.
    const float reach = fminf(ray.far, leave), distances = fabsf(ray.near) + fabsf(reach);
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float size = static_cast<float>(grid.resolution[axis]);
      const float error = kRounding * (fabsf(start_[axis]) + fabsf(reach * slope_[axis]) + size);
      const float last = slope_[axis] != 0.0f ? -start_[axis] * length[axis] - error * fabsf(length[axis]) : INFINITY;
      steps_per_cell_[axis] = length[axis] * ray.steps_per_length;
      leave_[axis] = (last - ray.near - kRounding * distances) * ray.steps_per_length - ray.offset;
    }
    range_ = {0, 0};
    if (outside || !(enter < leave) || !(ray.near < ray.far) || !(ray.offset > -INFINITY)) return;
    const float first = fmaf(-kRounding, distances, enter), last = fmaf(kRounding, distances, leave);
    if (ray.near < first) range_.begin = ray.steps_before(first);
    range_.end = ray.steps_before(fminf(ray.far, last));
    if (range_.end < range_.begin) range_.end = range_.begin;
  }

  // Returns the lattice positions before `far` that lie inside the box.
  VOXELFIELD_HOST_DEVICE StepRange range() const { return range_; }

  // Advances from lattice position k to the next position whose cell may be of the other kind, but at most to `stop`.
  // Returns whether the positions from the old k to before the new one are hits.
  VOXELFIELD_HOST_DEVICE bool stride(float& k, float stop) const {
    const float t = ray_->t(k);
    int32_t cell[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      // Positions just outside the box, and NaN, are assigned to the cell at the border.
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

  // Calls visit(range) in order for ranges of hits, which together cover all hits in `within`, until visit returns
  // false. Ranges may be adjacent.
  template <typename Visit>
  VOXELFIELD_HOST_DEVICE void walk(const StepRange& within, const Visit& visit) const {
    const float stop = static_cast<float>(within.end);
    for (float k = static_cast<float>(within.begin); k < stop;) {
      const float begin = k;
      if (stride(k, stop) && !visit(StepRange{static_cast<int32_t>(begin), static_cast<int32_t>(k)})) return;
    }
  }

 private:
  const Cells* grid_;
  const RayView* ray_;
  StepRange range_;
  // For each axis: the last cell; the position of the ray at t = 0 and its slope, both in cells; and the coefficients
  // of face * steps_per_cell + leave, a lattice number at which the ray has certainly not yet passed cell border
  // `face`.
  float border_[3], start_[3], slope_[3], steps_per_cell_[3], leave_[3];
};

// Returns the hits of a ray in their order, for callers that do other work in between. Assigning to a walk starts it on
// another ray.
template <typename Cells>
class SampleWalk {
 public:
  VOXELFIELD_HOST_DEVICE SampleWalk(const Cells& grid, const RayView& ray)
      : walk_(grid, ray),
        ray_(&ray),
        next_(static_cast<float>(walk_.range().begin)),
        hits_end_(next_),
        stop_(static_cast<float>(walk_.range().end)) {}

  VOXELFIELD_HOST_DEVICE void end() { hits_end_ = stop_ = next_; }

  // Sets t to the distance of the next hit. Returns false at the end of the ray.
  VOXELFIELD_HOST_DEVICE bool next(float& t) {
    while (!(next_ < hits_end_)) {
      if (!(next_ < stop_)) return false;
      float end = next_;
      const bool hits = walk_.stride(end, stop_);
      (hits ? hits_end_ : next_) = end;
    }
    t = ray_->t(next_);
    next_ += 1.0f;
    return true;
  }

 private:
  RayWalk<Cells> walk_;
  const RayView* ray_;
  float next_, hits_end_, stop_;  // lattice numbers; all positions in [next_, hits_end_) are hits
};

}  // namespace voxelfield
