// From what a colour network, or basis functions, add up to, to colour.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

VOXELFIELD_HOST_DEVICE float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

}  // namespace voxelfield
