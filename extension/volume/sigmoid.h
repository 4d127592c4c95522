// The last step to a colour, from the output of a network or of basis functions.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

VOXELFIELD_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace voxelfield
