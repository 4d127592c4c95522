// How the threads of a warp share points, in the kernels that go from points to vertices.
//
// A point is served by 2 * vectors neighbouring threads: one for each channel vector of the lower and of the upper
// vertex along z. Those lie side by side in memory, so a warp's access touches half as many lines as one thread for
// both would, and the L1 cache and the L2's atomic units, which count lines, are what these kernels wait for.
#pragma once

#include "common/vector.cuh"
#include "stencil/trilinear.h"

namespace voxelfield {

constexpr int kMostVectors = kWarp / 2;

struct LaneLayout {
  int vectors;          // of a point's channels that are served at once
  int points;           // of a warp
  int most_vectors;     // of any level
  unsigned reciprocal;  // of 2 * vectors, times 2^16, rounded up

  explicit LaneLayout(int most)
      : vectors(most < kMostVectors ? (most > 0 ? most : 1) : kMostVectors),
        points(kWarp / (2 * vectors)),
        most_vectors(most),
        reciprocal((65536 + 2 * vectors - 1) / (2 * vectors)) {}
};

struct Lane {
  int point;    // of the warp's
  int vector;   // of those served at once
  bool upper;   // vertex along z
  bool active;  // the warp's last threads may have no point
  int partner;  // serves the other vertex; threads without a point have some other, counted modulo a warp

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
