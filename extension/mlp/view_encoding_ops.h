// Host side of append_view, written once: check, allocate, pick types, and hand over to a backend's two kernels.
//   Backend::append_view<scalar_t, Degree>(rows, inputs, raw)
//   Backend::append_view_backward<scalar_t>(gradients, result)
#pragma once

#include "common/checks.h"
#include "volume/spherical_harmonics.h"

namespace voxelfield {

// What becomes the input of a colour network: each sample's geometry, and the view along its ray.
template <typename scalar_t, typename T = opmath_t<scalar_t>>
struct ViewRows {
  const scalar_t* geometry;  // (n, geometry_size)
  const T* directions;       // (rays, 3)
  const int64_t* ray_index;  // (n,)
  int64_t geometry_size;
  int64_t n;
  int64_t rays;

  // Zeros for a row whose index is that of no ray.
  VOXELFIELD_HOST_DEVICE void direction(int64_t row, T (&out)[3]) const {
    const int64_t ray = ray_index[row];
    const bool known = ray >= 0 && ray < rays;
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) out[axis] = known ? directions[3 * ray + axis] : T(0);
  }
};

template <typename scalar_t, typename T = opmath_t<scalar_t>>
struct ViewGradients {
  const scalar_t* inputs;  // (n, geometry_size + view_size)
  const T* raw;            // (n,), of the first column of the geometry
  int64_t geometry_size;
  int64_t view_size;
  int64_t n;
};

template <typename Backend>
struct AppendViewOps {
  static std::tuple<Tensor, Tensor> append_view(const Tensor& geometry, const Tensor& directions,
                                                const Tensor& ray_index, int64_t degree) {
    check_tensor("geometry", geometry, {kAny, kAny}, geometry.scalar_type(), geometry);
    check_tensor("directions", directions, {kAny, 3}, opmath_type(geometry), geometry);
    check_tensor("ray_index", ray_index, {geometry.size(0)}, ScalarType::Long, geometry);
    STD_TORCH_CHECK(geometry.size(1) > 0, "geometry must have at least one column, got none");
    STD_TORCH_CHECK(degree >= 0 && degree <= kMaxShDegree, "append_view: degree must be 0 to 3, got ", degree);
    const typename Backend::Guard guard(geometry);
    const Tensor g = as_contiguous(geometry), d = as_contiguous(directions), index = as_contiguous(ray_index);
    const int64_t n = g.size(0), columns = g.size(1) + sh_basis_size(static_cast<int>(degree));
    Tensor inputs = new_empty(g, {n, columns}, g.scalar_type());
    Tensor raw;
    dispatch_floating(g.scalar_type(), "geometry", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      raw = new_empty(g, {n}, scalar_type_of<T>());
      if (n == 0) return;
      const ViewRows<scalar_t> rows{g.const_data_ptr<scalar_t>(),
                                    d.const_data_ptr<T>(),
                                    index.const_data_ptr<int64_t>(),
                                    g.size(1),
                                    n,
                                    d.size(0)};
      dispatch_degree(degree, [&](auto tag) {
        Backend::template append_view<scalar_t, decltype(tag)::value>(rows, inputs.mutable_data_ptr<scalar_t>(),
                                                                      raw.mutable_data_ptr<T>());
      });
    });
    return {inputs, raw};
  }

  static Tensor append_view_backward(const Tensor& grad_inputs, const Tensor& grad_raw, int64_t geometry_size) {
    check_tensor("grad_inputs", grad_inputs, {kAny, kAny}, grad_inputs.scalar_type(), grad_inputs);
    check_tensor("grad_raw", grad_raw, {grad_inputs.size(0)}, opmath_type(grad_inputs), grad_inputs);
    STD_TORCH_CHECK(geometry_size > 0 && geometry_size <= grad_inputs.size(1), "geometry_size must lie in 1..",
                    grad_inputs.size(1), ", got ", geometry_size);
    const typename Backend::Guard guard(grad_inputs);
    const Tensor g = as_contiguous(grad_inputs), r = as_contiguous(grad_raw);
    Tensor result = new_empty(g, {g.size(0), geometry_size}, g.scalar_type());
    dispatch_floating(g.scalar_type(), "grad_inputs", [&](auto zero) {
      using scalar_t = decltype(zero);
      using T = opmath_t<scalar_t>;
      if (g.size(0) == 0) return;
      Backend::template append_view_backward<scalar_t>(
          ViewGradients<scalar_t>{g.const_data_ptr<scalar_t>(), r.const_data_ptr<T>(), geometry_size,
                                  g.size(1) - geometry_size, g.size(0)},
          result.mutable_data_ptr<scalar_t>());
    });
    return result;
  }

 private:
  template <typename F>
  static void dispatch_degree(int64_t degree, const F& f) {
    switch (degree) {
      case 0: return f(std::integral_constant<int, 0>{});
      case 1: return f(std::integral_constant<int, 1>{});
      case 2: return f(std::integral_constant<int, 2>{});
      default: return f(std::integral_constant<int, 3>{});
    }
  }
};

}  // namespace voxelfield
