// A voxel field of spherical harmonics (Fridovich-Keil et al. 2022, Plenoxels): from a grid's features to density and
// colour along a ray, and back. The stencil is trilinear.h's, the walk ray_walk.h's, the weights composite.h's.
//
// Channels are raw density, then for red, green and blue the coefficient of every basis function; more are padding.
// A sample whose weight does not exceed min_weight is left out, as if it were not there: it neither shows nor casts a
// shadow. So two optical depths are kept, of all samples, to find each one's weight, and of those that stay.
#pragma once

#include "fields/unit_ray.h"
#include "rays/cells_view.h"
#include "rays/ray_walk.h"
#include "volume/composite.h"
#include "volume/sigmoid.h"
#include "volume/spherical_harmonics.h"

namespace voxelfield {

template <typename scalar_t>
struct ShGridView {
  const scalar_t* rows;     // (X, Y, Z, channels)
  const scalar_t* density;  // raw density of vertex v: density[v * density_stride]
  int64_t channels, density_stride;
  GridLocator<float, true> locator;  // in vertices, as if they had one channel
  const float* aabb;
  int degree;
  float density_scale, density_shift;

  VOXELFIELD_HOST_DEVICE int basis_size() const { return sh_basis_size(degree); }
  VOXELFIELD_HOST_DEVICE int used_channels() const { return 1 + 3 * basis_size(); }

  // scale * softplus(raw + shift), linear where softplus differs from it by less than float32 tells.
  VOXELFIELD_HOST_DEVICE float density_of(float raw) const {
    const float x = raw + density_shift;
    return density_scale * (x > 20.0f ? x : std::log1p(std::exp(x)));
  }

  VOXELFIELD_HOST_DEVICE float density_slope(float raw) const {
    return density_scale / (1.0f + std::exp(-(raw + density_shift)));
  }
};

// Which colours the channels of a vector belong to: those before `split` to the first, the others to the next. A vector
// of up to 8 never meets three, unless a colour is a single channel.
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
  float min_transmittance;
  float min_weight;
};

// Gradients arriving at one ray's results.
struct RenderedGradient {
  float rgb[3];
  float opacity;
  float depth;

  VOXELFIELD_HOST_DEVICE float at_weight(const float* sample_rgb, float t) const {
    return opacity + depth * t + rgb[0] * sample_rgb[0] + rgb[1] * sample_rgb[1] + rgb[2] * sample_rgb[2];
  }
};

// What a ray adds up to.
struct RenderedRay {
  float rgb[3] = {0, 0, 0};
  float opacity = 0;
  float depth = 0;

  VOXELFIELD_HOST_DEVICE void add(float weight, const float* sample_rgb, float t) {
    for (int color = 0; color < 3; ++color) rgb[color] += weight * sample_rgb[color];
    opacity += weight;
    depth += weight * t;
  }

  // The sum of weight * gradient at the weight, over all samples: what lies behind a sample is this less what came
  // before, so that the way back needs but one walk.
  VOXELFIELD_HOST_DEVICE float against(const RenderedGradient& gradient) const {
    float sum = opacity * gradient.opacity + depth * gradient.depth;
    for (int color = 0; color < 3; ++color) sum += rgb[color] * gradient.rgb[color];
    return sum;
  }
};

// Gradient at what a sample reads of the grid: at its raw density and at the three colours before the sigmoid.
struct SampleGradient {
  float raw;
  float logit[3];
};

template <typename scalar_t>
VOXELFIELD_HOST_DEVICE SampleGradient sample_gradient(const RenderScene<scalar_t>& scene,
                                                      const RenderedGradient& gradient, float raw, float transmittance,
                                                      float weight, const float* rgb, float at_weight, float behind) {
  SampleGradient result;
  result.raw = density_gradient(scene.step, transmittance, weight, at_weight, behind) * scene.grid.density_slope(raw);
  for (int color = 0; color < 3; ++color) {
    result.logit[color] = weight * gradient.rgb[color] * rgb[color] * (1.0f - rgb[color]);
  }
  return result;
}

}  // namespace voxelfield
