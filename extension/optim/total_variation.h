// The gradient of a grid's total variation.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

// Each pair of neighbours costs weight / pairs * h(difference) along its axis. h is the square up to `delta` and goes
// on along its tangent (Huber 1964, doubled).
struct VariationRule {
  const float* weights;  // of x, y, z
  float per_pair[3];     // 2 / pairs along the axis
  float delta;

  VOXELFIELD_HOST_DEVICE float factor(int axis) const { return weights[axis] * per_pair[axis]; }

  // h' / 2
  VOXELFIELD_HOST_DEVICE float slope(float difference) const {
    return difference < -delta ? -delta : (difference > delta ? delta : difference);
  }
};

}  // namespace voxelfield
