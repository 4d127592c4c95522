// A voxel field of spherical harmonics (Fridovich-Keil et al. 2022, Plenoxels): computes density and colour along a ray
// from the features of a grid, and their gradients. Channel 0 is raw density. The coefficients of all basis functions
// follow, first for red, then for green and blue. Any further channels are padding.
//
// The host side is the same for both backends and calls the kernels of one:
//   Backend::render(scene, rays)                                             rays: ListedRays or ImageRays
//   Backend::render_backward(scene, rays, gradients, results, grad_rows)     adds to grad_rows
#pragma once

#include "cameras/camera.h"
#include "color/color.h"
#include "common/checks.h"
#include "rays/ray_inputs.h"
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

// Colour (R, 3), opacity (R,) and summed depth (R,) of rays, or the gradients with respect to them.
template <typename T>
struct RenderedPointers {
  T *rgb, *opacity, *depth;

  VOXELFIELD_HOST_DEVICE RayTotals<float> load(int64_t ray) const {
    return {{rgb[3 * ray], rgb[3 * ray + 1], rgb[3 * ray + 2]}, opacity[ray], depth[ray]};
  }

  VOXELFIELD_HOST_DEVICE void store(int64_t ray, const RayTotals<float>& totals) const {
    for (int color = 0; color < 3; ++color) rgb[3 * ray + color] = totals.rgb[color];
    opacity[ray] = totals.opacity;
    depth[ray] = totals.depth_sum;
  }
};

// Rays in memory, and the destination of their results.
struct ListedRays {
  RayBatch batch;
  RenderedPointers<float> out;

  int64_t count() const { return batch.count; }
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t index) const { return Ray::copy(batch[index]); }
  VOXELFIELD_HOST_DEVICE void store(int64_t index, const RayTotals<float>& totals) const { out.store(index, totals); }
};

struct ImageRays {
  CameraView camera;
  const float* background;
  RenderedPointers<float> out;

  int64_t count() const { return camera.width * camera.height; }
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t pixel) const { return camera[pixel]; }
  // Stores the colour over the background, and the mean depth instead of the sum: zero if the opacity is zero.
  VOXELFIELD_HOST_DEVICE void store(int64_t pixel, RayTotals<float> totals) const {
    const float open = 1.0f - totals.opacity;
    for (int color = 0; color < 3; ++color) totals.rgb[color] += open * background[color];
    totals.depth_sum /= totals.opacity < 1e-6f ? 1e-6f : totals.opacity;
    out.store(pixel, totals);
  }
};

template <typename Backend>
struct RenderOps {
  using Rendered = TensorTuple<3>;

  static Rendered render_grid(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
                              const Tensor& offset, const Tensor& occupied, std::vector<int64_t> resolution,
                              const Tensor& aabb_occupancy, const Tensor& grid, const OptionalTensor& density,
                              const Tensor& aabb_grid, double step, int64_t degree, double density_scale,
                              double density_shift, double min_transmittance, double min_weight) {
    const RayInputs rays{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const typename Backend::Guard guard(origins);
    const Rendered out = allocate(origins, {origins.size(0)});
    with_scene(cells, grid, density, aabb_grid, step, degree, density_scale, density_shift, min_transmittance,
               min_weight, origins, [&](const auto& scene) {
                 const ListedRays listed{rays.batch(step), pointers<float>(out)};
                 if (listed.count() > 0) Backend::render(scene, listed);
               });
    return out;
  }

  static Rendered render_grid_image(const Tensor& c2w, const Tensor& intrinsics, const OptionalTensor& lens,
                                    int64_t width, int64_t height, int64_t across, const Tensor& background,
                                    const Tensor& occupied, std::vector<int64_t> resolution,
                                    const Tensor& aabb_occupancy, const Tensor& grid, const OptionalTensor& density,
                                    const Tensor& aabb_grid, double step, int64_t degree, double density_scale,
                                    double density_shift, double min_transmittance, double min_weight) {
    const CameraInputs camera{c2w, intrinsics, lens, width, height, across, background};
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const typename Backend::Guard guard(c2w);
    const Rendered out = allocate(c2w, {height, width});
    with_scene(cells, grid, density, aabb_grid, step, degree, density_scale, density_shift, min_transmittance,
               min_weight, c2w, [&](const auto& scene) {
                 Backend::render(
                     scene, ImageRays{camera.view(scene.grid.aabb), data_of(camera.background), pointers<float>(out)});
               });
    return out;
  }

  static Tensor render_grid_backward(const Tensor& grad_rgb, const Tensor& grad_opacity, const Tensor& grad_depth_sum,
                                     const Tensor& rgb, const Tensor& opacity, const Tensor& depth_sum,
                                     const Tensor& origins, const Tensor& directions, const Tensor& near,
                                     const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                     std::vector<int64_t> resolution, const Tensor& aabb_occupancy, const Tensor& grid,
                                     const Tensor& aabb_grid, double step, int64_t degree, double density_scale,
                                     double density_shift, double min_transmittance, double min_weight) {
    const RayInputs rays{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const Rendered gradients = checked_rendered("grad_", grad_rgb, grad_opacity, grad_depth_sum, origins);
    const Rendered results = checked_rendered("", rgb, opacity, depth_sum, origins);
    const typename Backend::Guard guard(origins);
    Tensor out = new_zeros(grid, shape_of(grid), ScalarType::Float);
    with_scene(cells, grid, std::nullopt, aabb_grid, step, degree, density_scale, density_shift, min_transmittance,
               min_weight, origins, [&](const auto& scene) {
                 const RayBatch batch = rays.batch(step);
                 if (batch.count == 0) return;
                 Backend::render_backward(scene, batch, pointers<const float>(gradients),
                                          pointers<const float>(results), out.template mutable_data_ptr<float>());
               });
    return out;
  }

  static void implement(Library& m) {
    m.impl("render_grid", TORCH_BOX(&RenderOps::render_grid));
    m.impl("render_grid_image", TORCH_BOX(&RenderOps::render_grid_image));
    m.impl("render_grid_backward", TORCH_BOX(&RenderOps::render_grid_backward));
  }

 private:
  // Checks a field, and calls f with its scene, which is typed by the dtype of the grid.
  template <typename F>
  static void with_scene(const CellInputs& cells, const Tensor& any_grid, const OptionalTensor& any_density,
                         const Tensor& any_aabb, double step, int64_t degree, double density_scale,
                         double density_shift, double min_transmittance, double min_weight, const Tensor& like,
                         const F& f) {
    check_step(step);
    check_finite_not_negative("density_scale", density_scale);
    check_finite("density_shift", density_shift);
    check_fraction("min_transmittance", min_transmittance);
    check_fraction("min_weight", min_weight);
    STD_TORCH_CHECK(degree >= 0 && degree <= kMaxDegree, "degree must lie in 0..3, got ", degree);
    const ScalarType dtype = any_grid.scalar_type();
    VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                          "grid must be float32, float16 or bfloat16, got ", dtype_name(dtype));
    const Tensor grid = checked("grid", any_grid, {kAny, kAny, kAny, kAny}, dtype, like);
    const Tensor aabb = checked("aabb_grid", any_aabb, {2, 3}, ScalarType::Float, like);
    const int64_t x = grid.size(0), y = grid.size(1), z = grid.size(2), channels = grid.size(3);
    const int highest_band = static_cast<int>(degree);
    const int64_t used = 1 + 3 * sh_basis_size(highest_band);
    STD_TORCH_CHECK(channels >= used, "grid must have at least ", used, " channels for degree ", degree, ", got ",
                    channels);
    const double vertices = double(x) * double(y) * double(z);
    STD_TORCH_CHECK(vertices > 0 && vertices < 0x7fffffff, "grid must have 1 to 2^31 - 1 vertices, got ", vertices);
    const OptionalTensor density = checked("density", any_density, {x, y, z}, dtype, like);
    const auto size = [&](int axis) { return static_cast<int32_t>(grid.size(axis)); };
    const GridLocator<float, true> locator{{size(0), size(1), size(2)}, Padding::kBorder, 1, 0, true, false};
    const KeepRule<float> rule{static_cast<float>(min_transmittance), static_cast<float>(min_weight)};
    const float scale = static_cast<float>(density_scale), shift = static_cast<float>(density_shift);
    dispatch_floating(dtype, "grid", [&](auto zero) {
      using scalar_t = decltype(zero);
      if constexpr (!std::is_same_v<scalar_t, double>) {
        ShGridView<scalar_t> view{data_of(grid), data_of(grid), channels, channels, locator,
                                  data_of(aabb), highest_band,  scale,    shift};
        if (density.has_value()) {
          view.density = data_of(density);
          view.density_stride = 1;
        }
        f(RenderScene<scalar_t>{cells.either(), view, static_cast<float>(step), steps_per_length(step), rule});
      }
    });
  }

  static Rendered allocate(const Tensor& like, std::vector<int64_t> shape) {
    const Tensor opacity = new_empty(like, shape, ScalarType::Float), depth = new_empty(like, shape, ScalarType::Float);
    shape.push_back(3);
    return {new_empty(like, shape, ScalarType::Float), opacity, depth};
  }

  static Rendered checked_rendered(const std::string& prefix, const Tensor& rgb, const Tensor& opacity,
                                   const Tensor& depth_sum, const Tensor& origins) {
    const auto own = [&](const char* name, const Tensor& x, std::vector<int64_t> shape) {
      return checked((prefix + name).c_str(), x, shape, ScalarType::Float, origins);
    };
    const int64_t rays = origins.size(0);
    return {own("rgb", rgb, {rays, 3}), own("opacity", opacity, {rays}), own("depth_sum", depth_sum, {rays})};
  }

  template <typename T>
  static RenderedPointers<T> pointers(const Rendered& tensors) {
    const auto& [rgb, opacity, depth] = tensors;
    return {data_of(rgb), data_of(opacity), data_of(depth)};
  }
};

}  // namespace voxelfield
