// Nested boxes, each larger than the previous one by a constant ratio, and the pieces into which they cut a ray. They
// extend a grid to distant geometry: a larger box has larger voxels, which suffice for distant objects.
//
// In warped coordinates, in which the field is defined, all boxes have the size of the smallest one and are placed in a
// row along x, with a gap between neighbours. Each box represents its part of space without the next smaller box.
// There, a ray is a sequence of straight pieces, so kernels for rays through a single box work unchanged. Distances
// along a ray are measured in units of the current box and are continuous from one piece to the next. A constant step
// in warped coordinates is therefore a step in proportion to the box's size in the world.
#pragma once

#include "common/finite.h"
#include "rays/ray.h"

namespace voxelfield {

struct NestedBoxes {
  float centre[3];  // world units
  float half_edge;  // half of the smallest box's longest edge, world units
  float half[3];    // half of the smallest box's edges, in units of `half_edge`
  float pitch;      // distance between the centres of neighbouring boxes in warped coordinates, in units of `half_edge`
  float near;       // smallest distance at which rays begin, in units of `half_edge`
  int32_t count;
  float scale[kMaxBoxes];  // size of each box relative to the smallest one

  VOXELFIELD_HOST_DEVICE bool contains(int32_t box, const float* point) const {
    return fabsf(point[0]) <= half[0] * scale[box] && fabsf(point[1]) <= half[1] * scale[box] &&
           fabsf(point[2]) <= half[2] * scale[box];
  }
};

// Iterates over the pieces of a ray, from near to far. All of them have the direction and the offset of the ray, so a
// kernel stores these only once, in the current piece.
class RayPieces {
 public:
  // A ray without pieces.
  VOXELFIELD_HOST_DEVICE RayPieces() : t_(0.0f), far_(0.0f) {}

  // `ray` is in world coordinates and may end at an infinite distance.
  VOXELFIELD_HOST_DEVICE RayPieces(const NestedBoxes& boxes, const Ray& ray) {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) origin_[axis] = (ray.origin[axis] - boxes.centre[axis]) / boxes.half_edge;
    box_ = boxes.count - 1;
    float enter, leave;
    crossing(boxes, box_, Inverse(ray), enter, leave);
    t_ = fmaxf(fmaxf(ray.near / boxes.half_edge, boxes.near), enter);
    far_ = fminf(ray.far / boxes.half_edge, leave);
    float point[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) point[axis] = fmaf(t_, ray.direction[axis], origin_[axis]);
    while (box_ > 0 && boxes.contains(box_ - 1, point)) --box_;
    // fmaxf and fminf ignore NaN, which would then count as having no limit. Only `far` may be infinite.
    const float start[3] = {ray.near, ray.offset, 0.0f};
    if (!(ray.near < ray.far && all_finite(ray.origin) && all_finite(ray.direction) && all_finite(start))) far_ = t_;
  }

  // Sets `piece`, which is the whole ray or the previous piece, to the next piece that has samples, in warped
  // coordinates. Returns false if there is none. `step` is the distance between samples.
  VOXELFIELD_HOST_DEVICE bool next(const NestedBoxes& boxes, float step, Ray& piece) {
    const Inverse inverse(piece);
    while (t_ < far_) {
      const int32_t box = box_;
      const float scale = boxes.scale[box], begin = t_, local_t = local_t_;
      float enter, leave;
      crossing(boxes, box, inverse, enter, leave);
      float end = fminf(leave, far_);
      box_ = box + 1;
      if (box > 0) {
        crossing(boxes, box - 1, inverse, enter, leave);
        // Rounding may have put the start of the piece just outside the box on whose surface it lies.
        if (enter < leave && leave > begin && enter < end) {
          end = fmaxf(enter, begin);
          box_ = box - 1;
        }
      }
      local_t_ = local_t + fmaxf(end - begin, 0.0f) / scale;
      t_ = box_ < boxes.count ? fmaxf(end, begin) : far_;
      // The whole ray has a single lattice of samples: the next piece continues where this one stops.
      const float lattice = lattice_;
      const float passed = floorf(local_t_ / step);
      lattice_ = (fmaf(piece.offset, step, passed * step) < local_t_ ? passed + 1.0f : passed) * step;
      if (!(lattice < local_t_)) continue;
      begin_ = begin;
      piece_local_t_ = local_t;
      scale_ = scale;
      const float shift = begin / scale - local_t;
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        piece.origin[axis] = fmaf(shift, piece.direction[axis], origin_[axis] / scale);
      }
      piece.origin[0] += boxes.pitch * static_cast<float>(box);
      piece.near = lattice;
      piece.far = local_t_;
      return true;
    }
    return false;
  }

  // Converts a distance along the current piece to the distance from the ray's origin, world units.
  VOXELFIELD_HOST_DEVICE float distance(const NestedBoxes& boxes, float local_t) const {
    return fmaf(local_t - piece_local_t_, scale_, begin_) * boxes.half_edge;
  }

 private:
  // The inverse of a ray's direction, by which distances to the faces of all boxes are multiplied.
  struct Inverse {
    float direction[3];

    VOXELFIELD_HOST_DEVICE explicit Inverse(const Ray& ray) {
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) direction[axis] = 1.0f / ray.direction[axis];
    }
  };

  // The distances at which the ray enters and leaves a box (slabs, Kay and Kajiya 1986); `leave` <= `enter` if it
  // misses.
  VOXELFIELD_HOST_DEVICE void crossing(const NestedBoxes& boxes, int32_t box, const Inverse& inverse, float& enter,
                                       float& leave) const {
    enter = -INFINITY;
    leave = INFINITY;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float reach = boxes.half[axis] * boxes.scale[box];
      const float low = (-reach - origin_[axis]) * inverse.direction[axis];
      const float high = (reach - origin_[axis]) * inverse.direction[axis];
      // 0 * infinity occurs if the ray runs parallel to a slab and starts on its face: such a slab does not limit the
      // ray.
      if (low == low && high == high) {
        enter = fmaxf(enter, fminf(low, high));
        leave = fminf(leave, fmaxf(low, high));
      }
    }
  }

  float origin_[3];       // in units of `half_edge`, relative to the centre
  float t_, far_;         // in the same units: start of the next piece, end of the ray
  float local_t_ = 0.0f;  // start of the next piece, as a distance in warped coordinates
  float lattice_ = 0.0f;  // start of the next piece's lattice of samples
  int32_t box_ = 0;       // box of the next piece
  float begin_ = 0.0f, piece_local_t_ = 0.0f, scale_ = 1.0f;  // for the current piece
};

}  // namespace voxelfield
