// Limits that several families share.
#pragma once

namespace voxelfield {

// Grids that one call takes: the levels of a pyramid, or the parameters of one optimizer step.
constexpr int kMaxLevels = 16;

}  // namespace voxelfield
