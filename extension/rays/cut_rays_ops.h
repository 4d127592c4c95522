// Cuts rays into pieces by nested boxes, for both backends.
#pragma once

#include "rays/nested_boxes.h"
#include "rays/ray_inputs.h"

namespace voxelfield {

// Converts the numbers that Python passes: the common centre of the boxes (3 numbers), half of the edges of the
// smallest box (3), the ratio of the sizes of consecutive boxes, the number of boxes, the pitch in halves of the
// longest edge of the smallest box, and the minimum distance at which rays begin. Lengths other than the pitch are in
// world units.
inline NestedBoxes nested_boxes(const std::vector<double>& numbers) {
  STD_TORCH_CHECK(numbers.size() == 10, "boxes must be 10 numbers, got ", numbers.size());
  for (const double number : numbers) STD_TORCH_CHECK(std::isfinite(number), "boxes must be finite, got ", number);
  const double half_edge = std::max({numbers[3], numbers[4], numbers[5]}), ratio = numbers[6], count = numbers[7];
  const double smallest = std::min({numbers[3], numbers[4], numbers[5]});
  STD_TORCH_CHECK(smallest > 0, "boxes must have a positive size, got half an edge of ", smallest);
  STD_TORCH_CHECK(ratio > 1, "boxes must have a ratio above 1, got ", ratio);
  STD_TORCH_CHECK(1 <= count && count <= kMaxBoxes && count == std::floor(count), "boxes must be 1 to ", kMaxBoxes,
                  ", got ", count);
  STD_TORCH_CHECK(numbers[8] > 0 && numbers[9] >= 0,
                  "boxes must have a positive pitch, and rays begin at 0 at least, got ", numbers[8], " and ",
                  numbers[9]);
  NestedBoxes boxes{};
  boxes.half_edge = static_cast<float>(half_edge);
  for (int axis = 0; axis < 3; ++axis) {
    boxes.centre[axis] = static_cast<float>(numbers[axis]);
    boxes.half[axis] = static_cast<float>(numbers[3 + axis] / half_edge);
  }
  boxes.count = static_cast<int32_t>(count);
  for (int32_t box = 0; box < boxes.count; ++box) boxes.scale[box] = static_cast<float>(std::pow(ratio, box));
  boxes.pitch = static_cast<float>(numbers[8]);
  boxes.near = static_cast<float>(numbers[9] / half_edge);
  return boxes;
}

struct CutRays {
  RayBatch rays;  // in world coordinates
  NestedBoxes boxes;
  int64_t pieces;                            // maximum number per ray
  float *origins, *directions, *near, *far;  // for each piece; the pieces of a ray are adjacent

  VOXELFIELD_HOST_DEVICE void operator()(int64_t ray) const {
    const Ray whole = Ray::copy(rays[ray]);
    RayPieces cut(boxes, whole);
    Ray piece = whole;
    bool more = true;
    for (int64_t row = ray * pieces; row < (ray + 1) * pieces; ++row) {
      more = more && cut.next(boxes, rays.step, piece);
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        origins[3 * row + axis] = piece.origin[axis];
        directions[3 * row + axis] = piece.direction[axis];
      }
      near[row] = more ? piece.near : 0.0f;
      far[row] = more ? piece.far : 0.0f;
    }
  }
};

template <typename Backend>
struct CutRaysOps {
  static TensorTuple<4> cut_rays(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
                                 const Tensor& offset, std::vector<double> numbers, double step) {
    const RayInputs in{origins, directions, near, far, offset};
    const NestedBoxes boxes = nested_boxes(numbers);
    const typename Backend::Guard guard(origins);
    const RayBatch rays = in.batch(step);
    const int64_t pieces = 2 * boxes.count - 1, rows = rays.count * pieces;
    Tensor cut_origins = new_like(in.origins, {rows, 3}), cut_directions = new_like(in.origins, {rows, 3});
    Tensor cut_near = new_like(in.origins, {rows}), cut_far = new_like(in.origins, {rows});
    Backend::for_each(rays.count, CutRays{rays, boxes, pieces, data_of(cut_origins), data_of(cut_directions),
                                          data_of(cut_near), data_of(cut_far)});
    return {cut_origins, cut_directions, cut_near, cut_far};
  }

  static void implement(Library& m) { m.impl("cut_rays", TORCH_BOX(&CutRaysOps::cut_rays)); }
};

}  // namespace voxelfield
