// The two networks of a field through which a kernel marches, and the shared memory that its launches use. Plain C++,
// so that a test can compute the plan for any GPU without having one.
#pragma once

#include <algorithm>

#include "common/constants.h"
#include "mlp/network.h"

namespace voxelfield {

constexpr int kFieldInputs = 32;

// Threads per multiprocessor. More would leave too few registers for the state of a ray next to the network.
constexpr int kMarchThreads = 512;
constexpr int kMarchWarps = kMarchThreads / 32;

// A warp has one row of features or geometry per thread.
constexpr int kRowBytes = row_stride(kFieldInputs);
constexpr int kWarpRowsBytes = 32 * kRowBytes;
// Each sample in a ColorQueue has a row of inputs of the colour network, a weight and a pixel.
constexpr int kQueueBytes = 32 * (kRowBytes + static_cast<int>(sizeof(float) + sizeof(int)));
static_assert((kWarpRowsBytes + kQueueBytes) % 16 == 0, "rows are read 16 bytes at a time");

// Describes a network of (out, in) matrices with at most kFieldInputs inputs and kMaxGeometry outputs, and with hidden
// layers padded to `width`. If the matrices already exist, `network` contains them.
inline Network field_network(int width, int layers, Network network = {}) {
  network.layers = layers;
  network.width = width;
  network.padded_in = kFieldInputs;
  network.padded_out = kMaxGeometry;
  network.log2_input_width = network.log2_output_width = 1;
  return network;
}

// A warp takes the rays of a square of pixels, because these rays stay close together. An image has few rays per
// thread, so with larger squares some warps would get many more rays than others.
constexpr int kSquare = 4;

struct MarchPlan {
  int warps;    // per block; 0: not even one fits
  int shared;   // bytes per block
  bool staged;  // whether the weights of the colour network are in shared memory too, and not packed in global memory
};

// Plans as many warps as fit next to `weights` bytes, which the whole block shares. Marching needs kWarpRowsBytes per
// warp.
inline MarchPlan plan_march(int weights, int warp_bytes, int max_warps, int limit) {
  const int warps = std::clamp((limit - weights) / warp_bytes, 0, max_warps);
  return {warps, weights + warps * warp_bytes, true};
}

// An image needs both networks. The density network is evaluated at every sample, and the colour network only at few.
// If both do not fit next to the full number of warps, the colour network is therefore read from global memory.
inline MarchPlan plan_image(const Network& density, const Network& color, int limit) {
  const int warp_bytes = kWarpRowsBytes + kQueueBytes, both = density.staged_bytes() + color.staged_bytes();
  const MarchPlan staged = plan_march(both, warp_bytes, kMarchWarps, limit);
  if (staged.warps == kMarchWarps) return staged;
  MarchPlan packed = plan_march(density.staged_bytes(), warp_bytes, kMarchWarps, limit);
  packed.staged = false;
  return packed;
}

}  // namespace voxelfield
