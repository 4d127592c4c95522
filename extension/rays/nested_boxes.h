// Nested boxes, each larger than the previous one by a constant ratio, and the pieces into which they cut a ray. They
// extend a grid to distant geometry: a larger box has larger voxels, which suffice for distant objects.
//
// The field lies in a frame of its own, in which all boxes have the size of the smallest one and stand in a row along
// x, with a gap between neighbours. The part of space that belongs to a box, which is the box without the one inside of
// it, lies in the box's place. In that frame a ray is a sequence of straight pieces, and every kernel for rays through
// a box serves as it is. Distances along a ray count in units of the box that it is in, so that they go on from one
// piece to the next, and steps of one length there are steps in proportion to the box here.
#pragma once

#include "rays/camera.h"

namespace voxelfield {

struct NestedBoxes {
  float centre[3];  // world units
  float unit;       // of the smallest box's frame: half of its longest edge, world units
  float half[3];    // half of the edges, in that unit
  float pitch;      // from a box's place to the next one's, in that unit
  float near;       // where rays begin at least, in that unit
  int32_t count;
  float scale[kMaxBoxes];  // how many times as large as the smallest box each one is

  VOXELFIELD_HOST_DEVICE bool holds(int32_t box, const float* point) const {
    return fabsf(point[0]) <= half[0] * scale[box] && fabsf(point[1]) <= half[1] * scale[box] &&
           fabsf(point[2]) <= half[2] * scale[box];
  }
};

// A ray from piece to piece, near to far.
class RayPieces {
 public:
  // A ray without pieces.
  VOXELFIELD_HOST_DEVICE RayPieces() : t_(0.0f), far_(0.0f) {}

  // `ray` is in the world; the distance at which it ends may be infinite. Samples will lie `step` apart.
  VOXELFIELD_HOST_DEVICE RayPieces(const NestedBoxes& boxes, const Ray& ray, float step)
      : offset_(ray.offset), step_(step) {
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      origin_[axis] = (ray.origin[axis] - boxes.centre[axis]) / boxes.unit;
      direction_[axis] = ray.direction[axis];
      inverse_[axis] = 1.0f / direction_[axis];
    }
    box_ = boxes.count - 1;
    float enter, leave;
    crossing(boxes, box_, enter, leave);
    t_ = fmaxf(fmaxf(ray.near / boxes.unit, boxes.near), enter);
    far_ = fminf(ray.far / boxes.unit, leave);
    float point[3];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) point[axis] = fmaf(t_, direction_[axis], origin_[axis]);
    while (box_ > 0 && boxes.holds(box_ - 1, point)) --box_;
    // fmaxf and fminf drop NaN, which must not count as no limit.
    if (!(ray.near < ray.far)) far_ = t_;
  }

  // Sets `piece` to the next piece that has samples, in the field's frame; returns false if there is none.
  VOXELFIELD_HOST_DEVICE bool next(const NestedBoxes& boxes, Ray& piece) {
    while (t_ < far_) {
      const int32_t box = box_;
      const float scale = boxes.scale[box], begin = t_, local_t = local_t_;
      float enter, leave;
      crossing(boxes, box, enter, leave);
      float end = fminf(leave, far_);
      box_ = box + 1;
      if (box > 0) {
        crossing(boxes, box - 1, enter, leave);
        // Rounding may have put the beginning just outside of the box that it lies on.
        if (enter < leave && leave > begin && enter < end) {
          end = fmaxf(enter, begin);
          box_ = box - 1;
        }
      }
      local_t_ = local_t + fmaxf(end - begin, 0.0f) / scale;
      t_ = box_ < boxes.count ? fmaxf(end, begin) : far_;
      // The lattice of samples is one for the whole ray: the next piece goes on where this one stops.
      const float lattice = lattice_;
      const float passed = floorf(local_t_ / step_);
      lattice_ = (fmaf(offset_, step_, passed * step_) < local_t_ ? passed + 1.0f : passed) * step_;
      if (!(lattice < local_t_)) continue;
      begin_ = begin;
      piece_local_t_ = local_t;
      scale_ = scale;
      const float shift = begin / scale - local_t;
      VOXELFIELD_UNROLL
      for (int axis = 0; axis < 3; ++axis) {
        piece.origin[axis] = fmaf(shift, direction_[axis], origin_[axis] / scale);
        piece.direction[axis] = direction_[axis];
      }
      piece.origin[0] += boxes.pitch * static_cast<float>(box);
      piece.near = lattice;
      piece.far = local_t_;
      piece.offset = offset_;
      return true;
    }
    return false;
  }

  // The distance from the ray's origin, world units, at a distance along the present piece.
  VOXELFIELD_HOST_DEVICE float distance(const NestedBoxes& boxes, float local_t) const {
    return fmaf(local_t - piece_local_t_, scale_, begin_) * boxes.unit;
  }

 private:
  // Where the ray crosses the faces of a box (Kay and Kajiya 1986, slabs); `leave` is not beyond `enter` if it misses.
  VOXELFIELD_HOST_DEVICE void crossing(const NestedBoxes& boxes, int32_t box, float& enter, float& leave) const {
    enter = -INFINITY;
    leave = INFINITY;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) {
      const float reach = boxes.half[axis] * boxes.scale[box];
      const float low = (-reach - origin_[axis]) * inverse_[axis], high = (reach - origin_[axis]) * inverse_[axis];
      // 0 * infinity comes from an origin on the face of a slab that the ray runs along: such a slab does not limit it.
      if (low == low && high == high) {
        enter = fmaxf(enter, fminf(low, high));
        leave = fminf(leave, fmaxf(low, high));
      }
    }
  }

  float origin_[3], direction_[3], inverse_[3];  // in units of the smallest box, from the centre
  float offset_, step_;
  float t_, far_;         // in that unit: where the next piece begins, and where the ray ends
  float local_t_ = 0.0f;  // the same place, as distances count in the field's frame
  float lattice_ = 0.0f;  // where the next piece's lattice of samples begins
  int32_t box_ = 0;       // that the next piece lies in
  float begin_ = 0.0f, piece_local_t_ = 0.0f, scale_ = 1.0f;  // of the present piece
};

}  // namespace voxelfield
