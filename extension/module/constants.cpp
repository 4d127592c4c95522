// The op that tells Python the constants of common/constants.h.
#include "common/constants.h"

#include <torch/csrc/stable/library.h>

#include <vector>

#include "common/tensors.h"

namespace voxelfield {
namespace {

// In the order of `_NAMES` in voxelfield/ops/_constants.py.
std::vector<int64_t> constants() {
  const auto power = [](int shift) { return int64_t{1} << shift; };
  const auto number = [](SplatMethod method) { return static_cast<int64_t>(method); };
  return {kMaxLevels,
          kMaxLayers,
          kMaxWidth,
          kMaxPyramidLevels,
          kLevelChannels,
          kMaxFieldLayers,
          kFieldOutputs,
          kHighestRawDensity,
          kMaxShDegree,
          power(kBrickShift),
          kPartRays,
          kPartSegments,
          kMaxParts,
          kStoredRanges,
          power(kTileShiftXY),
          power(kTileShiftXY),
          power(kTileShiftZ),
          power(kTileBits),
          number(SplatMethod::kAutomatic),
          number(SplatMethod::kDeterministic)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CompositeExplicitAutograd, m) { m.impl("constants", TORCH_BOX(&constants)); }

}  // namespace voxelfield
