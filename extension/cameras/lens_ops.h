// lens_rays and lens_points, for both backends.
#pragma once

#include "cameras/lens.h"
#include "common/checks.h"

namespace voxelfield {

struct LensRays {
  Lens lens;
  bool shared;  // whether all rows have the first lens
  const float* points;
  float* rays;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const {
    const CameraRay ray = lens.at(shared ? 0 : row).ray_through(points[2 * row], points[2 * row + 1]);
    rays[3 * row] = ray.right;
    rays[3 * row + 1] = ray.down;
    rays[3 * row + 2] = ray.forward;
  }
};

struct LensPoints {
  Lens lens;
  bool shared;
  const float* rays;
  float* points;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const {
    const float* ray = rays + 3 * row;
    float point[2];
    lens.at(shared ? 0 : row).point_of({ray[0], ray[1], ray[2]}, point);
    points[2 * row] = point[0];
    points[2 * row + 1] = point[1];
  }
};

template <typename Backend>
struct LensOps {
  static Tensor lens_rays(const Tensor& points, const Tensor& lens) {
    return convert<LensRays>("points", points, 2, lens, 3);
  }

  static Tensor lens_points(const Tensor& rays, const Tensor& lens) {
    return convert<LensPoints>("rays", rays, 3, lens, 2);
  }

  static void implement(Library& m) {
    m.impl("lens_rays", TORCH_BOX(&LensOps::lens_rays));
    m.impl("lens_points", TORCH_BOX(&LensOps::lens_points));
  }

 private:
  template <typename Convert>
  static Tensor convert(const char* name, const Tensor& from, int64_t columns, const Tensor& lens,
                        int64_t out_columns) {
    const Tensor rows = checked(name, from, {kAny, columns}, ScalarType::Float, from);
    const int64_t count = rows.size(0);
    const bool shared = lens.dim() == 2 && lens.size(0) == 1;
    const Tensor lenses = checked("lens", lens, {shared ? 1 : count, kLensNumbers}, ScalarType::Float, from);
    const typename Backend::Guard guard(from);
    Tensor out = new_like(rows, {count, out_columns});
    Backend::for_each(count, Convert{{data_of(lenses)}, shared, data_of(rows), data_of(out)});
    return out;
  }
};

}  // namespace voxelfield
