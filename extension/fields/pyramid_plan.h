// The two networks of a field that a kernel marches through, and how its launches use shared memory. Plain C++, so that
// a test can compute it for every GPU without one.
#pragma once

#include <algorithm>

#include "common/constants.h"
#include "mlp/network.h"

namespace voxelfield {

constexpr int kFieldInputs = 32;

// Threads of a multiprocessor. More would leave too few registers for a ray's state beside the network.
constexpr int kMarchThreads = 512;
constexpr int kMarchWarps = kMarchThreads / 32;

// A warp's rows of features or of geometry, one for each thread.
constexpr int kRowBytes = row_stride(kFieldInputs);
constexpr int kWarpRowsBytes = 32 * kRowBytes;
// A row of the colour network's inputs, a weight and a pixel for each sample that waits in a ColorQueue.
constexpr int kQueueBytes = 32 * (kRowBytes + static_cast<int>(sizeof(float) + sizeof(int)));
static_assert((kWarpRowsBytes + kQueueBytes) % 16 == 0, "rows are read 16 bytes at a time");

// A network of (out, in) matrices of at most kFieldInputs inputs, kFieldOutputs outputs, hidden layers padded to
// `width`. `network` has the matrices, where there are any yet.
inline Network field_network(int width, int layers, Network network = {}) {
  network.layers = layers;
  network.width = width;
  network.padded_in = kFieldInputs;
  network.padded_out = kFieldOutputs;
  network.log2_input_width = network.log2_output_width = 1;
  return network;
}

struct MarchPlan {
  int warps;    // of a block; 0: not even one fits
  int shared;   // bytes a block
  bool staged;  // the colour network's weights too are in shared memory, otherwise packed in global memory
};

// As many warps as fit beside `weights` bytes, which the whole block shares. Marching needs kWarpRowsBytes for each.
inline MarchPlan plan_march(int weights, int warp_bytes, int max_warps, int limit) {
  const int warps = std::clamp((limit - weights) / warp_bytes, 0, max_warps);
  return {warps, weights + warps * warp_bytes, true};
}

// An image needs both networks. The density network is evaluated at every sample, the colour network at few, so the
// second one gives way where both do not fit beside the full number of warps.
inline MarchPlan plan_image(const Network& density, const Network& color, int limit) {
  const int warp_bytes = kWarpRowsBytes + kQueueBytes, both = density.staged_bytes() + color.staged_bytes();
  const MarchPlan staged = plan_march(both, warp_bytes, kMarchWarps, limit);
  if (staged.warps == kMarchWarps) return staged;
  MarchPlan packed = plan_march(density.staged_bytes(), warp_bytes, kMarchWarps, limit);
  packed.staged = false;
  return packed;
}

}  // namespace voxelfield
