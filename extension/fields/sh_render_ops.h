// Host side of rendering, written once: check, allocate, pick types, and hand over to a backend's kernels.
//   Backend::render(scene, rays)                                             rays: ListedRays or ImageRays
//   Backend::render_backward(scene, rays, gradients, results, grad_rows)     adds to grad_rows
#pragma once

#include "common/checks.h"
#include "fields/sh_field.h"
#include "rays/ray_inputs.h"

namespace voxelfield {

// Colour (R, 3), opacity (R,) and summed depth (R,) of rays, or the gradients at them.
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

  // Colour over a background, and the mean depth instead of the sum.
  VOXELFIELD_HOST_DEVICE void store_pixel(const float* background, int64_t pixel,
                                          const RayTotals<float>& totals) const {
    const float open = 1.0f - totals.opacity;
    for (int color = 0; color < 3; ++color) rgb[3 * pixel + color] = totals.rgb[color] + open * background[color];
    opacity[pixel] = totals.opacity;
    depth[pixel] = mean_depth(totals);
  }
};

// Rays from memory, and where their results go.
struct ListedRays {
  RayBatch batch;
  RenderedPointers<float> out;

  int64_t count() const { return batch.count; }
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t index) const { return Ray::copy(batch[index]); }
  VOXELFIELD_HOST_DEVICE void store(int64_t index, const RayTotals<float>& totals) const { out.store(index, totals); }
};

// The rays of an image.
struct ImageRays {
  PinholeView camera;
  const float* background;
  RenderedPointers<float> out;

  int64_t count() const { return camera.width * camera.height; }
  VOXELFIELD_HOST_DEVICE Ray operator[](int64_t pixel) const {
    const int64_t y = pixel / camera.width;
    return camera(pixel - y * camera.width, y);
  }
  VOXELFIELD_HOST_DEVICE void store(int64_t pixel, const RayTotals<float>& totals) const {
    out.store_pixel(background, pixel, totals);
  }
};

template <typename Backend>
struct RenderOps {
  using Rendered = std::tuple<Tensor, Tensor, Tensor>;

  static Rendered render_grid(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
                              const Tensor& offset, const Tensor& occupied, std::vector<int64_t> resolution,
                              const Tensor& aabb_occupancy, const Tensor& grid, const std::optional<Tensor>& density,
                              const Tensor& aabb_grid, double step, int64_t degree, double density_scale,
                              double density_shift, double min_transmittance, double min_weight) {
    const RayInputs rays{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const Field field = Field{grid, density, aabb_grid, degree, density_scale, density_shift}.checked(origins);
    const typename Backend::Guard guard(origins);
    const int64_t count = rays.origins.size(0);
    const Rendered out = allocate(rays.origins, {count});
    if (count == 0) return out;
    const ListedRays listed{rays.batch(step), pointers<float>(out)};
    field.dispatch(cells, step, min_transmittance, min_weight,
                   [&](const auto& scene) { Backend::render(scene, listed); });
    return out;
  }

  static Rendered render_grid_image(const Tensor& c2w, const Tensor& intrinsics, int64_t width, int64_t height,
                                    const Tensor& background, const Tensor& occupied, std::vector<int64_t> resolution,
                                    const Tensor& aabb_occupancy, const Tensor& grid,
                                    const std::optional<Tensor>& density, const Tensor& aabb_grid, double step,
                                    int64_t degree, double density_scale, double density_shift,
                                    double min_transmittance, double min_weight) {
    const CameraInputs camera{c2w, intrinsics, width, height, background};
    const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
    const Field field = Field{grid, density, aabb_grid, degree, density_scale, density_shift}.checked(c2w);
    const typename Backend::Guard guard(c2w);
    const Rendered out = allocate(c2w, {height, width});
    const ImageRays rays{camera.view(field.aabb.template const_data_ptr<float>()),
                         camera.background.const_data_ptr<float>(), pointers<float>(out)};
    field.dispatch(cells, step, min_transmittance, min_weight,
                   [&](const auto& scene) { Backend::render(scene, rays); });
    return out;
  }

  static Tensor render_grid_backward(const Tensor& grad_rgb, const Tensor& grad_opacity, const Tensor& grad_depth_sum,
                                     const Tensor& rgb, const Tensor& opacity, const Tensor& depth_sum,
                                     const Tensor& origins, const Tensor& directions, const Tensor& near,
                                     const Tensor& far, const Tensor& offset, const Tensor& occupied,
                                     std::vector<int64_t> resolution, const Tensor& aabb_occupancy, const Tensor& grid,
                                     const Tensor& aabb_grid, double step, int64_t degree, double density_scale,
                                     double density_shift, double min_transmittance, double min_weight) {
    STD_TORCH_CHECK(grid.dim() == 4, "grid must be (X, Y, Z, C)");
    Tensor out = new_zeros(grid, {grid.size(0), grid.size(1), grid.size(2), grid.size(3)}, ScalarType::Float);
    render_grid_accumulate(out, grad_rgb, grad_opacity, grad_depth_sum, rgb, opacity, depth_sum, origins, directions,
                           near, far, offset, occupied, resolution, aabb_occupancy, grid, aabb_grid, step, degree,
                           density_scale, density_shift, min_transmittance, min_weight);
    return out;
  }

  static void render_grid_accumulate(Tensor grad_grid, const Tensor& grad_rgb, const Tensor& grad_opacity,
                                     const Tensor& grad_depth_sum, const Tensor& rgb, const Tensor& opacity,
                                     const Tensor& depth_sum, const Tensor& origins, const Tensor& directions,
                                     const Tensor& near, const Tensor& far, const Tensor& offset,
                                     const Tensor& occupied, std::vector<int64_t> resolution,
                                     const Tensor& aabb_occupancy, const Tensor& grid, const Tensor& aabb_grid,
                                     double step, int64_t degree, double density_scale, double density_shift,
                                     double min_transmittance, double min_weight) {
    const RayInputs rays{origins, directions, near, far, offset};
    const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
    const Field field = Field{grid, std::nullopt, aabb_grid, degree, density_scale, density_shift}.checked(origins);
    check_contiguous("grad_grid", grad_grid, {grid.size(0), grid.size(1), grid.size(2), grid.size(3)},
                     ScalarType::Float, origins);
    const Rendered gradients = checked("grad_", grad_rgb, grad_opacity, grad_depth_sum, origins);
    const Rendered results = checked("", rgb, opacity, depth_sum, origins);
    const typename Backend::Guard guard(origins);
    if (origins.size(0) == 0) return;
    const RayBatch batch = rays.batch(step);
    field.dispatch(cells, step, min_transmittance, min_weight, [&](const auto& scene) {
      Backend::render_backward(scene, batch, pointers<const float>(gradients), pointers<const float>(results),
                               grad_grid.mutable_data_ptr<float>());
    });
  }

  static void implement(Library& m) {
    m.impl("render_grid", TORCH_BOX(&RenderOps::render_grid));
    m.impl("render_grid_image", TORCH_BOX(&RenderOps::render_grid_image));
    m.impl("render_grid_backward", TORCH_BOX(&RenderOps::render_grid_backward));
    m.impl("render_grid_accumulate", TORCH_BOX(&RenderOps::render_grid_accumulate));
  }

 private:
  struct Field {
    Tensor grid;
    std::optional<Tensor> density;
    Tensor aabb;
    int64_t degree;
    double density_scale, density_shift;

    // Returns the field with contiguous tensors, which must live as long as raw pointers to them are in use.
    Field checked(const Tensor& like) const {
      STD_TORCH_CHECK(degree >= 0 && degree <= kMaxShDegree, "degree must lie in 0..3, got ", degree);
      check_finite_not_negative("density_scale", density_scale);
      check_finite("density_shift", density_shift);
      const ScalarType dtype = grid.scalar_type();
      STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16,
                      "grid must be float32, float16 or bfloat16, got ", torch::headeronly::toString(dtype));
      check_tensor("grid", grid, {kAny, kAny, kAny, kAny}, dtype, like);
      check_tensor("aabb_grid", aabb, {2, 3}, ScalarType::Float, like);
      const int64_t channels = 1 + 3 * sh_basis_size(static_cast<int>(degree));
      STD_TORCH_CHECK(grid.size(3) >= channels, "grid must have at least ", channels, " channels for degree ", degree,
                      ", got ", grid.size(3));
      const double vertices = double(grid.size(0)) * double(grid.size(1)) * double(grid.size(2));
      STD_TORCH_CHECK(vertices > 0 && vertices < 0x7fffffff, "grid must have 1 to 2^31 - 1 vertices, got ", vertices);
      if (density.has_value()) {
        check_tensor("density", *density, {grid.size(0), grid.size(1), grid.size(2)}, dtype, like);
      }
      return {as_contiguous(grid), as_contiguous(density), as_contiguous(aabb), degree, density_scale, density_shift};
    }

    // Calls f with the scene, of the grid's type.
    template <typename F>
    void dispatch(const CellInputs& cells, double step, double min_transmittance, double min_weight, const F& f) const {
      check_step(step);
      check_fraction("min_transmittance", min_transmittance);
      check_fraction("min_weight", min_weight);
      dispatch_floating(grid.scalar_type(), "grid", [&](auto zero) {
        using scalar_t = decltype(zero);
        if constexpr (!std::is_same_v<scalar_t, double>) {
          f(RenderScene<scalar_t>{cells.either(),
                                  view<scalar_t>(),
                                  static_cast<float>(step),
                                  steps_per_length(step),
                                  {static_cast<float>(min_transmittance), static_cast<float>(min_weight)}});
        }
      });
    }

    template <typename scalar_t>
    ShGridView<scalar_t> view() const {
      const Tensor& raw = density.has_value() ? *density : grid;
      return {grid.const_data_ptr<scalar_t>(),
              raw.const_data_ptr<scalar_t>(),
              grid.size(3),
              density.has_value() ? 1 : grid.size(3),
              {{resolution(0), resolution(1), resolution(2)}, Padding::kBorder, 1, 0, true, false},
              aabb.const_data_ptr<float>(),
              static_cast<int>(degree),
              static_cast<float>(density_scale),
              static_cast<float>(density_shift)};
    }

    int32_t resolution(int axis) const { return static_cast<int32_t>(grid.size(axis)); }
  };

  static Rendered allocate(const Tensor& like, const std::vector<int64_t>& shape) {
    std::vector<int64_t> colored = shape;
    colored.push_back(3);
    return {new_empty(like, colored, ScalarType::Float), new_empty(like, shape, ScalarType::Float),
            new_empty(like, shape, ScalarType::Float)};
  }

  static Rendered checked(const std::string& prefix, const Tensor& rgb, const Tensor& opacity, const Tensor& depth_sum,
                          const Tensor& origins) {
    const int64_t rays = origins.size(0);
    check_tensor((prefix + "rgb").c_str(), rgb, {rays, 3}, ScalarType::Float, origins);
    check_tensor((prefix + "opacity").c_str(), opacity, {rays}, ScalarType::Float, origins);
    check_tensor((prefix + "depth_sum").c_str(), depth_sum, {rays}, ScalarType::Float, origins);
    return {as_contiguous(rgb), as_contiguous(opacity), as_contiguous(depth_sum)};
  }

  template <typename T>
  static RenderedPointers<T> pointers(const Rendered& tensors) {
    const auto& [rgb, opacity, depth] = tensors;
    return {static_cast<T*>(rgb.data_ptr()), static_cast<T*>(opacity.data_ptr()), static_cast<T*>(depth.data_ptr())};
  }
};

}  // namespace voxelfield
