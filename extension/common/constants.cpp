// The op that tells Python the constants of constants.h and the numbers of the ways of summing a gradient.
#include "common/constants.h"

#include "common/tensors.h"
#include "stencil/stencil_ops.h"

namespace voxelfield {
namespace {

// In the order of `_NAMES` in voxelfield/ops/_constants.py.
std::vector<int64_t> constants() {
  return {kMaxLevels,
          kMaxLayers,
          kMaxWidth,
          kMaxPyramidLevels,
          kLevelChannels,
          kMaxFieldLayers,
          kFieldOutputs,
          kHighestRawDensity,
          kMaxShDegree,
          int64_t{1} << kBrickShift,
          kPartRays,
          kPartSegments,
          kMaxParts,
          kStoredRanges,
          int64_t{1} << kTileShiftXY,
          int64_t{1} << kTileShiftXY,
          int64_t{1} << kTileShiftZ,
          int64_t{1} << kTileBits,
          static_cast<int64_t>(SplatMethod::kAutomatic),
          static_cast<int64_t>(SplatMethod::kDeterministic)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CompositeExplicitAutograd, m) { m.impl("constants", TORCH_BOX(&constants)); }

}  // namespace voxelfield
