// A voxel field of spherical harmonics (Fridovich-Keil et al. 2022, Plenoxels): computes density and colour along a ray
// from the features of a grid, and their gradients. The stencil is in trilinear.h, the walk in ray_walk.h, and the
// weights are in keep_rule.h.
//
// Channel 0 is raw density. The coefficients of all basis functions follow, first for red, then for green and blue. Any
// further channels are padding.
#pragma once

#include "color/color.h"
#include "rays/ray.h"
#include "stencil/trilinear.h"
#include "volume/composite.h"

namespace voxelfield {

template <typename scalar_t>
struct ShGridView {
  const scalar_t* rows;     // (X, Y, Z, channels)
  const scalar_t* density;  // the raw density of vertex v is density[v * density_stride]
  int64_t channels, density_stride;
  GridLocator<float, true> locator;  // counts in vertices, as if each had one channel
  const float* aabb;
  int degree;
  float density_scale, density_shift;

  VOXELFIELD_HOST_DEVICE Stencil<float, int32_t> at(const CubeRay& ray, float t) const {
    float point[3];
    ray.point(t, point);
    return locator(point, 0);
  }

  VOXELFIELD_HOST_DEVICE int basis_size() const { return sh_basis_size(degree); }
  VOXELFIELD_HOST_DEVICE int used_channels() const { return 1 + 3 * basis_size(); }

  // scale * softplus(raw + shift). Above 20, softplus(x) rounds to x in float32.
  VOXELFIELD_HOST_DEVICE float density_of(float raw) const {
    const float x = raw + density_shift;
    return density_scale * (x > 20.0f ? x : std::log1p(std::exp(x)));
  }

  VOXELFIELD_HOST_DEVICE float density_slope(float raw) const {
    return density_scale / (1.0f + std::exp(-(raw + density_shift)));
  }
};

// The colours to which the channels of a vector belong: channels below `split` belong to `first`, the others to the
// next colour. A vector of up to 8 channels spans at most two colours, unless a colour has a single channel.
struct ShColors {
  int first;
  int split;

  VOXELFIELD_HOST_DEVICE ShColors(int channel, int basis_size)
      : first((channel > basis_size ? 1 : 0) + (channel > 2 * basis_size ? 1 : 0)),
        split((first + 1) * basis_size + 1 - channel) {}
};

template <typename scalar_t>
struct RenderScene {
  CellsView cells;
  ShGridView<scalar_t> grid;
  float step, steps_per_length;
  KeepRule<float> rule;
};

// One sample of a ray in the thread that walks the ray. `rgb` is set only if the sample is kept.
struct WalkedSample : EvaluatedSample<float> {
  float t, raw;
  float rgb[3];
};

// Writes the gradient with respect to the numbers that a sample reads from the grid: its raw density, then its three
// colours before the sigmoid. `gradient` is the gradient with respect to the totals of the ray, and `at_weight` that
// with respect to the weight of the sample. density_gradient explains `suffix_grad`.
template <typename scalar_t>
VOXELFIELD_HOST_DEVICE void sample_gradient(const RenderScene<scalar_t>& scene, const RayTotals<float>& gradient,
                                            const WalkedSample& sample, float at_weight, float suffix_grad,
                                            float (&out)[4]) {
  out[0] = density_gradient(scene.step, sample.transmittance, sample.weight, at_weight, suffix_grad) *
           scene.grid.density_slope(sample.raw);
  VOXELFIELD_UNROLL
  for (int color = 0; color < 3; ++color) {
    const float own = sample.rgb[color];
    out[1 + color] = sample.weight * gradient.rgb[color] * own * (1.0f - own);
  }
}

}  // namespace voxelfield
