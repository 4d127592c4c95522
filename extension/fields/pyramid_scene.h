// A field that rays are marched through: a pyramid of grids followed by a density network. Both backends march it, the
// CPU in pyramid.cpp and CUDA in pyramid_march.cuh.
#pragma once

#include "common/narrow.h"
#include "mlp/network.h"
#include "rays/nested_boxes.h"
#include "stencil/sparse_grid.h"
#include "volume/keep_rule.h"

namespace voxelfield {

// One of several grids over the same box, with 4 channels, read at one point by one thread.
template <typename scalar_t>
struct PyramidLevel {
  const scalar_t* features;  // (X, Y, Z, 4)
  int32_t resolution[3];
  BlockTable table;  // has no blocks if the grid is dense; otherwise `features` is the atlas

  // Sets the stencil at a point of the unit cube; points outside read the nearest face. Returns false where a block is
  // not stored. The block table is read only if `Sparse`.
  template <bool Sparse>
  VOXELFIELD_HOST_DEVICE bool find(const float* point, Stencil<float, int32_t>& stencil) const {
    float in_atlas[3] = {point[0], point[1], point[2]};
    if constexpr (Sparse) {
      if (table.blocks != nullptr && !table.place(point, in_atlas)) return false;
    }
    const GridLocator<float, true> locator{
        {resolution[0], resolution[1], resolution[2]}, Padding::kBorder, kLevelChannels, 0, true, false};
    stencil = locator(in_atlas, 0);
    return true;
  }
};

template <typename scalar_t>
struct PyramidScene {
  CellsView cells;
  PyramidLevel<scalar_t> level[kMaxFieldLevels];
  int levels;
  const float* aabb;
  Network density;
  float step, steps_per_length;
  float density_initial;
  KeepRule<float> rule;
  NestedBoxes boxes;  // used only if rays are cut into pieces

  VOXELFIELD_HOST_DEVICE float density_of(float raw) const {
    return density_initial * std::exp(raw > float(kHighestRaw) ? float(kHighestRaw) : raw);
  }
};

// One sample of a ray, in registers of the thread that evaluates it.
struct PyramidSample : EvaluatedSample<float> {
  float t;
};

}  // namespace voxelfield
