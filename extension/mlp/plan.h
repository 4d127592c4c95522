// How the launches of `mlp` use shared memory. Plain C++, so that a test can compute it for every GPU without one.
#pragma once

#include <algorithm>

#include "common/constants.h"
#include "mlp/network.h"

namespace voxelfield {

// A thread moves 8 neighbouring inputs at once and 4 neighbouring outputs, but single outputs where there are at
// most 8.
constexpr int kLog2InputWidth = 3;
constexpr int kInputWidth = 8;
constexpr int kOutputWidth = 4;
constexpr int kInputGroup = 4 * kInputWidth;
constexpr int kOutputGroup = 4 * kOutputWidth;
constexpr int kFewOutputs = 8;
// The weights' gradients are summed in units of 32 x 32.
constexpr int kUnit = 32;

// A network whose input and output are rows in global memory.
struct Mlp {
  Network network;
  int input_pitch, output_pitch;  // from row to row: multiples of kInputWidth, kOutputWidth (unless outputs are few)

  VOXELFIELD_HOST_DEVICE bool few_outputs() const { return network.out() <= kFewOutputs; }

  VOXELFIELD_HOST_DEVICE int units_down(int l) const { return (network.rows_of(l) + kUnit - 1) / kUnit; }
  VOXELFIELD_HOST_DEVICE int units_across(int l) const { return (network.columns_of(l) + kUnit - 1) / kUnit; }
  VOXELFIELD_HOST_DEVICE int units() const {
    int count = 0;
    for (int l = 0; l < network.layers; ++l) count += units_down(l) * units_across(l);
    return count;
  }
};

// `network` has its layers; its padding is filled in here.
inline Mlp plan_mlp(Network network) {
  network.width = 16;
  for (int l = 0; l < network.layers - 1; ++l) {
    while (network.width < network.layer[l].out) network.width *= 2;
  }
  network.padded_in = round_up(network.in(), kInputGroup);
  network.padded_out = round_up(network.out(), kOutputGroup);
  Mlp mlp{network, round_up(network.in(), kInputWidth), round_up(network.out(), kOutputWidth)};
  if (mlp.few_outputs()) mlp.output_pitch = network.out();
  mlp.network.log2_input_width = kLog2InputWidth;
  mlp.network.log2_output_width = mlp.few_outputs() ? 1 : 2;
  return mlp;
}

// Networks that do not fit shared memory are padded to at least 64, which avoids further variants of the kernels.
constexpr int kNarrowestPacked = 64;

inline Mlp widened(Mlp mlp) {
  mlp.network.width = std::max(mlp.network.width, kNarrowestPacked);
  return mlp;
}

struct ForwardPlan {
  Mlp mlp;
  bool staged;  // weights in shared memory, otherwise packed in global memory
  int shared;   // bytes a block
};

inline ForwardPlan plan_forward(const Mlp& mlp, int limit) {
  const int staged = mlp.network.staged_bytes();
  return staged <= limit ? ForwardPlan{mlp, true, staged} : ForwardPlan{widened(mlp), false, 0};
}

// Rows that a block of the backward pass takes at once, unless shared memory limits it to fewer: 4 warps with two tiles
// of 16 rows each, or 8 warps with one.
constexpr int kBackwardRows = 128;
// Fewer are a multiple of these.
VOXELFIELD_HOST_DEVICE constexpr int strip_rows(int width) { return width > 64 ? 16 : 32; }

// Units of the weights' gradients that a warp holds at most beside one tile, and beside two, in hidden layers of a
// width. More would take more registers than there are.
constexpr int kMostUnits = 4;
constexpr int most_units_of_two_tiles(int width) { return width < 64 ? 2 : 3; }

// The contents of shared memory in a block of the backward pass.
enum class Kept : int {
  kAll,       // weights, what enters each layer, and the gradients of what leaves it
  kReplaced,  // the same, but a layer's gradients take the place of the activations above it
  kOneLayer,  // only what enters one layer, and the gradients of what leaves it; the rest is in global memory
};

struct BackwardPlan {
  Mlp mlp;
  Kept kept;
  int strips;  // of rows, in a block
  int shared;  // bytes a block

  VOXELFIELD_HOST_DEVICE bool staged() const { return kept != Kept::kOneLayer; }

  VOXELFIELD_HOST_DEVICE int rows() const { return strip_rows(mlp.network.width) * strips; }

  // Tiles of 16 rows that a warp takes at once. One weight read then serves two of them.
  int tiles() const {
    const int width = mlp.network.width, warps = kBackwardRows / 32;
    return width < 64 || (width == 64 && staged() && mlp.units() <= warps * most_units_of_two_tiles(width)) ? 2 : 1;
  }
  int warps() const { return rows() / (16 * tiles()); }
  VOXELFIELD_HOST_DEVICE int entering_stride(int l) const { return row_stride(mlp.network.columns_of(l)); }
  VOXELFIELD_HOST_DEVICE int leaving_stride(int l) const { return row_stride(mlp.network.rows_of(l)); }

  // Where in shared memory the rows of what enters a layer begin, and of the gradients of what leaves it.
  VOXELFIELD_HOST_DEVICE int entering_offset(int l) const {
    if (!staged()) return 0;
    const int width = row_stride(mlp.network.width);
    return mlp.network.staged_bytes() + (l > 0 ? rows() * (entering_stride(0) + (l - 1) * width) : 0);
  }
  VOXELFIELD_HOST_DEVICE int leaving_offset(int l) const {
    const int layers = mlp.network.layers, width = row_stride(mlp.network.width);
    if (!staged()) return rows() * (width > entering_stride(0) ? width : entering_stride(0));
    if (kept == Kept::kReplaced) return entering_offset(l + 1);
    return entering_offset(layers) + rows() * l * width;
  }
  VOXELFIELD_HOST_DEVICE int bytes() const {
    const int last = mlp.network.layers - 1, width = row_stride(mlp.network.width), out = leaving_stride(last);
    return leaving_offset(last) + rows() * (staged() || out > width ? out : width);
  }
};

// The first form that fits with all rows; the last form with as many as fit. No strips: none fits.
inline BackwardPlan plan_backward(const Mlp& mlp, int limit) {
  for (const Kept kept : {Kept::kAll, Kept::kReplaced}) {
    BackwardPlan plan{mlp, kept, kBackwardRows / strip_rows(mlp.network.width), 0};
    plan.shared = plan.bytes();
    if (plan.shared <= limit) return plan;
  }
  BackwardPlan plan{widened(mlp), Kept::kOneLayer, 1, 0};
  plan.strips = std::min(kBackwardRows / strip_rows(plan.mlp.network.width), limit / plan.bytes());
  plan.shared = plan.bytes();
  return plan;
}

}  // namespace voxelfield
