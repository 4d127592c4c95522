// Shared by the host sides of all ops that walk rays: the rays in memory, and the cells through which they are walked.
#pragma once

#include "common/checks.h"
#include "rays/ray.h"

namespace voxelfield {

struct RayBatch {
  const float *origins, *directions, *near, *far, *offset;
  float step, steps_per_length;
  int64_t count;

  VOXELFIELD_HOST_DEVICE RayView operator[](int64_t ray) const {
    return {origins + 3 * ray, directions + 3 * ray, near[ray], far[ray], offset[ray], step, steps_per_length};
  }
};

inline float steps_per_length(double step) { return 1.0f / static_cast<float>(step); }

// Keeps contiguous copies alive for as long as raw pointers to them are in use.
struct RayInputs {
  Tensor origins, directions, near, far;
  OptionalTensor offset;  // given to all ops but those that march in steps of their own

  RayInputs(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
            const OptionalTensor& offset)
      : origins(checked("origins", origins, {kAny, 3}, ScalarType::Float, origins)),
        directions(checked("directions", directions, {origins.size(0), 3}, ScalarType::Float, origins)),
        near(checked("near", near, {origins.size(0)}, ScalarType::Float, origins)),
        far(checked("far", far, {origins.size(0)}, ScalarType::Float, origins)),
        offset(checked("offset", offset, {origins.size(0)}, ScalarType::Float, origins)) {}

  RayBatch batch(double step) const {
    check_step(step);
    return {data_of(origins), data_of(directions),      data_of(near),          data_of(far),
            data_of(offset),  static_cast<float>(step), steps_per_length(step), origins.size(0)};
  }
};

inline OccupancyView occupancy_view(const int64_t* words, const std::vector<int64_t>& resolution, const float* aabb) {
  STD_TORCH_CHECK(resolution.size() == 3, "resolution must be X, Y, Z, got ", resolution.size(), " numbers");
  OccupancyView grid{words, {}, {}, aabb};
  int64_t bricks = 1;
  for (int axis = 0; axis < 3; ++axis) {
    STD_TORCH_CHECK(resolution[axis] >= 0 && resolution[axis] < kMaxCells,
                    "an occupancy grid must have fewer than 2^22 cells along each axis, got ", resolution[axis]);
    grid.resolution[axis] = static_cast<int32_t>(resolution[axis]);
    grid.bricks[axis] = static_cast<int32_t>((resolution[axis] + kBrickCells - 1) / kBrickCells);
    bricks *= grid.bricks[axis];
    STD_TORCH_CHECK(bricks < (int64_t{1} << 31), "an occupancy grid must have fewer than 2^31 bricks of 4^3 cells");
  }
  return grid;
}

// The cells of a box, either as bits packed into words or as a distance for each cell.
struct CellInputs {
  Tensor cells, aabb;
  std::vector<int64_t> resolution;

  CellInputs(const Tensor& cells, const std::vector<int64_t>& resolution, const Tensor& aabb, const Tensor& like)
      : cells(checked("occupied", cells, {kAny, kAny, kAny},
                      cells.scalar_type() == ScalarType::Byte ? ScalarType::Byte : ScalarType::Long, like)),
        aabb(checked("aabb_occupancy", aabb, {2, 3}, ScalarType::Float, like)),
        resolution(resolution) {
    STD_TORCH_CHECK(cells.numel() > 0, "occupied must have at least one cell, got none");
  }

  OccupancyView bits() const {
    const OccupancyView grid = occupancy_view(data_of(cells), resolution, data_of(aabb));
    check_tensor("occupied", cells, {grid.bricks[0], grid.bricks[1], grid.bricks[2]}, ScalarType::Long, cells);
    return grid;
  }

  CellsView either() const {
    if (cells.scalar_type() == ScalarType::Long) return {bits(), nullptr};
    const OccupancyView grid = occupancy_view(nullptr, resolution, data_of(aabb));
    check_tensor("occupied", cells, resolution, ScalarType::Byte, cells);
    STD_TORCH_CHECK(cells.numel() < (int64_t{1} << 31), "there must be fewer than 2^31 cells with distances");
    return {grid, data_of(cells)};
  }
};

}  // namespace voxelfield
