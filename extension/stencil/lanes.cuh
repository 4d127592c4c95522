// How the threads of a warp share points when they sample a grid or splat onto it.
//
// A point is served by 2 * vectors neighbouring threads: one for each channel vector of the lower and of the upper
// vertex along z. These vertices lie side by side in memory, so an access of the warp touches half as many cache lines
// as with one thread for both. The number of lines is what limits the L1 cache and the L2's atomic units.
#pragma once

#include "common/vector.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

constexpr int kMaxVectors = kWarp / 2;

struct LaneLayout {
  int vectors;          // of a point that are served at once
  int points;           // of a warp
  int most_vectors;     // of any level
  unsigned reciprocal;  // of 2 * vectors, times 2^16, rounded up

  explicit LaneLayout(int most)
      : vectors(most < kMaxVectors ? (most > 0 ? most : 1) : kMaxVectors),
        points(kWarp / (2 * vectors)),
        most_vectors(most),
        reciprocal((65536 + 2 * vectors - 1) / (2 * vectors)) {}
};

struct Lane {
  int point;    // among those of the warp
  int vector;   // among those served at once
  bool upper;   // vertex along z
  bool active;  // false for the last threads of a warp that are left without a point
  int partner;  // the thread that serves the other vertex; any thread, modulo a warp, for threads without a point

  __device__ __forceinline__ explicit Lane(const LaneLayout& layout) {
    const int lane = threadIdx.x % kWarp;
    point = static_cast<int>(lane * layout.reciprocal >> 16);
    const int rest = lane - point * 2 * layout.vectors;
    upper = rest >= layout.vectors;
    vector = upper ? rest - layout.vectors : rest;
    active = point < layout.points;
    partner = upper ? lane - layout.vectors : lane + layout.vectors;
  }
};

}  // namespace voxelfield
