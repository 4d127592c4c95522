// The op that tells Python the constants of common/constants.h, and one that tells tests what launches take.
#include "common/constants.h"

#include <torch/csrc/stable/library.h>

#include <string>
#include <vector>

#include "common/tensors.h"
#include "fields/pyramid_plan.h"
#include "mlp/plan.h"

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

// The dynamic shared memory of a launch, computed as the launch itself computes it. `sizes` of an mlp are its input's
// and each layer's; of a field the padded width and the colour network's layers.
int64_t launch_shared_bytes(std::string launch, std::vector<int64_t> sizes, int64_t limit) {
  const int allowed = static_cast<int>(limit);
  if (launch == "mlp" || launch == "mlp_backward") {
    const int layers = static_cast<int>(sizes.size()) - 1;
    STD_TORCH_CHECK(2 <= layers && layers <= kMaxLayers, "sizes must be 3 to ", kMaxLayers + 1, " numbers, got ",
                    sizes.size());
    const std::vector<int> out(sizes.begin() + 1, sizes.end());
    const Mlp mlp = plan_mlp(static_cast<int>(sizes[0]), out.data(), layers);
    if (launch == "mlp") return plan_forward(mlp, allowed).shared;
    const BackwardPlan plan = plan_backward(mlp, allowed);
    return plan.strips > 0 ? plan.shared : -1;
  }
  if (launch == "march_visible" || launch == "render_pyramid_image") {
    STD_TORCH_CHECK(sizes.size() == 2, "sizes must be a width and a number of layers, got ", sizes.size(), " numbers");
    const int width = static_cast<int>(sizes[0]);
    const Network density = field_network(width, 2), color = field_network(width, static_cast<int>(sizes[1]));
    const MarchPlan plan =
        launch == "march_visible" ? plan_march(density, kMarchWarps, allowed) : plan_image(density, color, allowed);
    return plan.warps > 0 ? plan.shared : -1;
  }
  if (launch == "gather") return kGatherShared;
  if (launch == "splat_tiled") return kSplatTiledShared;
  if (launch == "splat_binned") return kSplatBinnedShared;
  if (launch == "splat_coarse") return kSplatCoarseShared;
  if (launch == "render_grid") return kRenderGridShared;
  STD_TORCH_CHECK(false, "launch must be one that takes dynamic shared memory, got ", launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CompositeExplicitAutograd, m) {
  m.impl("constants", TORCH_BOX(&constants));
  m.impl("launch_shared_bytes", TORCH_BOX(&launch_shared_bytes));
}

}  // namespace voxelfield
