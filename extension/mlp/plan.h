// Plans the use of shared memory by the launches of `mlp`. Plain C++, so that a test can compute the plan for any GPU
// without having one.
#pragma once

#include <algorithm>

#include "common/constants.h"
#include "mlp/network.h"

namespace voxelfield {

// A thread moves 8 neighbouring inputs and 4 neighbouring outputs at once. If there are at most 8 outputs, it moves
// single outputs. A row of inputs has a multiple of 4 numbers, because each grid of a pyramid has four features; it is
// read 8 numbers at a time if it has a multiple of 8.
constexpr int kLog2InputWidth = 3;
constexpr int kInputWidth = 8;
constexpr int kOutputWidth = 4;
constexpr int kInputGroup = 4 * kInputWidth;
constexpr int kOutputGroup = 4 * kOutputWidth;
constexpr int kFewOutputs = 8;
// The gradients of the weights are summed in weight blocks of 32 x 32.
constexpr int kWeightBlock = 32;

// A network whose input and output are rows in global memory.
struct Mlp {
  Network network;
  // Row strides: multiples of kInputWidth / 2, and of kOutputWidth unless outputs are few.
  int input_pitch, output_pitch;

  VOXELFIELD_HOST_DEVICE bool few_outputs() const { return network.out() <= kFewOutputs; }

  VOXELFIELD_HOST_DEVICE int weight_blocks_down(int l) const {
    return (network.rows_of(l) + kWeightBlock - 1) / kWeightBlock;
  }
  VOXELFIELD_HOST_DEVICE int weight_blocks_across(int l) const {
    return (network.columns_of(l) + kWeightBlock - 1) / kWeightBlock;
  }
  VOXELFIELD_HOST_DEVICE int weight_blocks() const {
    int count = 0;
    for (int l = 0; l < network.layers; ++l) count += weight_blocks_down(l) * weight_blocks_across(l);
    return count;
  }
};

// `network` contains the layers. Its padding is set here.
inline Mlp plan_mlp(Network network) {
  network.width = 16;
  for (int l = 0; l < network.layers - 1; ++l) {
    while (network.width < network.layer[l].out) network.width *= 2;
  }
  network.padded_in = round_up(network.in(), kInputGroup);
  network.padded_out = round_up(network.out(), kOutputGroup);
  Mlp mlp{network, round_up(network.in(), kInputWidth / 2), round_up(network.out(), kOutputWidth)};
  if (mlp.few_outputs()) mlp.output_pitch = network.out();
  mlp.network.log2_input_width = kLog2InputWidth;
  mlp.network.log2_output_width = mlp.few_outputs() ? 1 : 2;
  return mlp;
}

// Networks that do not fit in shared memory are padded to at least this width, which avoids further variants of the
// kernels.
constexpr int kNarrowestPacked = 64;

inline Mlp widened(Mlp mlp) {
  mlp.network.width = std::max(mlp.network.width, kNarrowestPacked);
  return mlp;
}

struct ForwardPlan {
  Mlp mlp;
  bool staged;  // weights are in shared memory if true, else packed in global memory
  int shared;   // bytes per block
};

inline ForwardPlan plan_forward(const Mlp& mlp, int limit) {
  const int staged = mlp.network.staged_bytes();
  return staged <= limit ? ForwardPlan{mlp, true, staged} : ForwardPlan{widened(mlp), false, 0};
}

// The number of rows that a block of the backward pass processes at once, unless shared memory limits it to fewer: 4
// warps with two tiles of 16 rows each, or 8 warps with one tile each.
constexpr int kBackwardRows = 128;
// If shared memory limits the number of rows, it is a multiple of this.
VOXELFIELD_HOST_DEVICE constexpr int strip_rows(int width) { return width > 64 ? 16 : 32; }

// Maximum number of weight blocks of the weight gradients that a warp sums if it processes one tile at a time, and if
// it processes two tiles, for hidden layers of a given width. More weight blocks would exceed the available registers.
constexpr int kMaxWeightBlocks = 4;
constexpr int max_weight_blocks_of_two_row_tiles(int width) { return width < 64 ? 2 : 3; }

// The contents of shared memory in a block of the backward pass.
enum class Residency : int {
  kAll,       // weights, the input of each layer, and the gradient of the output of each layer
  kReplaced,  // the same, but the gradient of each output overwrites that output, the input of the next layer
  kOneLayer,  // only the input of one layer and the gradient of its output; the rest is in global memory
};

struct BackwardPlan {
  Mlp mlp;
  Residency residency;
  int strips;  // strips of rows per block
  int shared;  // bytes per block

  VOXELFIELD_HOST_DEVICE bool staged() const { return residency != Residency::kOneLayer; }

  VOXELFIELD_HOST_DEVICE int rows() const { return strip_rows(mlp.network.width) * strips; }

  // The number of tiles of 16 rows that a warp processes at once. With two tiles, each weight that is read is used
  // twice.
  int row_tiles() const {
    const int width = mlp.network.width, warps = kBackwardRows / 32;
    return width < 64 ||
                   (width == 64 && staged() && mlp.weight_blocks() <= warps * max_weight_blocks_of_two_row_tiles(width))
               ? 2
               : 1;
  }
  int warps() const { return rows() / (16 * row_tiles()); }
  VOXELFIELD_HOST_DEVICE int entering_stride(int l) const { return row_stride(mlp.network.columns_of(l)); }
  VOXELFIELD_HOST_DEVICE int leaving_stride(int l) const { return row_stride(mlp.network.rows_of(l)); }

  // The offsets in shared memory of the rows of the input of a layer, and of the gradient of its output.
  VOXELFIELD_HOST_DEVICE int entering_offset(int l) const {
    if (!staged()) return 0;
    const int width = row_stride(mlp.network.width);
    return mlp.network.staged_bytes() + (l > 0 ? rows() * (entering_stride(0) + (l - 1) * width) : 0);
  }
  VOXELFIELD_HOST_DEVICE int leaving_offset(int l) const {
    const int layers = mlp.network.layers, width = row_stride(mlp.network.width);
    if (!staged()) return rows() * (width > entering_stride(0) ? width : entering_stride(0));
    if (residency == Residency::kReplaced) return entering_offset(l + 1);
    return entering_offset(layers) + rows() * l * width;
  }
  VOXELFIELD_HOST_DEVICE int bytes() const {
    const int last = mlp.network.layers - 1, width = row_stride(mlp.network.width), out = leaving_stride(last);
    return leaving_offset(last) + rows() * (staged() || out > width ? out : width);
  }
};

// Returns the first form in which all rows fit, or else the last form with as many rows as fit. If `strips` is 0, not
// even one strip fits.
inline BackwardPlan plan_backward(const Mlp& mlp, int limit) {
  for (const Residency residency : {Residency::kAll, Residency::kReplaced}) {
    BackwardPlan plan{mlp, residency, kBackwardRows / strip_rows(mlp.network.width), 0};
    plan.shared = plan.bytes();
    if (plan.shared <= limit) return plan;
  }
  BackwardPlan plan{widened(mlp), Residency::kOneLayer, 1, 0};
  plan.strips = std::min(kBackwardRows / strip_rows(plan.mlp.network.width), limit / plan.bytes());
  plan.shared = plan.bytes();
  return plan;
}

}  // namespace voxelfield
