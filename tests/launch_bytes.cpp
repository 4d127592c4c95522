// The dynamic shared memory of launches, computed as the launches themselves compute it, for ops/test_launch_limits.py.
#include <cstdint>
#include <string>
#include <vector>

#include "common/constants.h"
#include "fields/pyramid_plan.h"
#include "mlp/plan.h"

using namespace voxelfield;

// `sizes` of an mlp are its input's and each layer's; of a field the padded width and the colour network's layers.
// Returns -1 where not even the smallest form fits, and -2 for a launch that is not known.
extern "C" int64_t launch_shared_bytes(const char* name, const int* sizes, int count, int limit) {
  const std::string launch = name;
  if (launch == "mlp" || launch == "mlp_backward") {
    Network network{};
    network.layers = count - 1;
    for (int l = 0; l < network.layers; ++l) network.layer[l] = {nullptr, sizes[l + 1], sizes[l]};
    const Mlp mlp = plan_mlp(network);
    if (launch == "mlp") return plan_forward(mlp, limit).shared;
    const BackwardPlan plan = plan_backward(mlp, limit);
    return plan.strips > 0 ? plan.shared : -1;
  }
  if (launch == "march_visible" || launch == "render_pyramid_image") {
    const Network density = field_network(sizes[0], 2), color = field_network(sizes[0], sizes[1]);
    const MarchPlan plan = launch == "march_visible"
                               ? plan_march(density.staged_bytes(), kWarpRowsBytes, kMarchWarps, limit)
                               : plan_image(density, color, limit);
    return plan.warps > 0 ? plan.shared : -1;
  }
  if (launch == "gather") return kGatherShared;
  if (launch == "splat_tiled") return kSplatTiledShared;
  if (launch == "render_grid") return kRenderGridShared;
  return -2;
}
