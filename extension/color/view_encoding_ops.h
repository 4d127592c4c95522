// append_view for both backends, with accesses of 16 bytes if the rows allow it.
#pragma once

#include "color/color.h"
#include "common/checks.h"

#if defined(__CUDACC__)
#include "common/vector.cuh"
#endif

namespace voxelfield {

template <int Width, typename scalar_t>
VOXELFIELD_HOST_DEVICE void load_lanes(scalar_t (&lanes)[Width], const scalar_t* from) {
#if defined(__CUDA_ARCH__)
  const Vector<scalar_t, Width> loaded = load_constant<Width>(from);
  from = loaded.lane;
#endif
  VOXELFIELD_UNROLL
  for (int i = 0; i < Width; ++i) lanes[i] = from[i];
}

template <int Width, typename scalar_t>
VOXELFIELD_HOST_DEVICE void store_lanes(scalar_t* to, const scalar_t (&lanes)[Width]) {
#if defined(__CUDA_ARCH__)
  Vector<scalar_t, Width> stored;
  VOXELFIELD_UNROLL
  for (int i = 0; i < Width; ++i) stored.lane[i] = lanes[i];
  store_global<scalar_t, Width>(to, stored);
#else
  for (int i = 0; i < Width; ++i) to[i] = lanes[i];
#endif
}

// The input of a colour network: the geometry of each sample, followed by the encoded viewing direction of its ray.
template <typename scalar_t, int Degree, int Width, typename T = opmath_t<scalar_t>>
struct ViewAppended {
  const scalar_t* geometry;  // (n, geometry_size)
  const T* directions;       // (rays, 3)
  const int64_t* ray_index;  // (n,)
  int64_t geometry_size, rays;
  scalar_t* inputs;
  T* raw;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const {
    constexpr int kView = sh_basis_size(Degree);
    const scalar_t* own = geometry + row * geometry_size;
    scalar_t* out = inputs + row * (geometry_size + kView);
    raw[row] = static_cast<T>(own[0]);
    scalar_t lanes[Width];
    for (int64_t c = 0; c < geometry_size; c += Width) {
      load_lanes(lanes, own + c);
      store_lanes(out + c, lanes);
    }
    // A row without a valid ray index gets a direction of zero.
    const int64_t ray = ray_index[row];
    const bool known = ray >= 0 && ray < rays;
    T direction[3], basis[kView];
    VOXELFIELD_UNROLL
    for (int axis = 0; axis < 3; ++axis) direction[axis] = known ? directions[3 * ray + axis] : T(0);
    spherical_harmonics(direction, Degree, basis);
    VOXELFIELD_UNROLL
    for (int k = 0; k < kView; k += Width) {
      VOXELFIELD_UNROLL
      for (int i = 0; i < Width; ++i) lanes[i] = static_cast<scalar_t>(basis[k + i]);
      store_lanes(out + geometry_size + k, lanes);
    }
  }
};

template <typename scalar_t, int Width, typename T = opmath_t<scalar_t>>
struct GeometryGradient {
  const scalar_t* inputs;  // (n, geometry_size + view_size)
  const T* raw;            // (n,); gradient of the first column of the geometry
  int64_t geometry_size, view_size;
  scalar_t* result;

  VOXELFIELD_HOST_DEVICE void operator()(int64_t row) const {
    const scalar_t* grad = inputs + row * (geometry_size + view_size);
    scalar_t lanes[Width];
    for (int64_t c = 0; c < geometry_size; c += Width) {
      load_lanes(lanes, grad + c);
      if (c == 0) lanes[0] = static_cast<scalar_t>(static_cast<T>(lanes[0]) + raw[row]);
      store_lanes(result + row * geometry_size + c, lanes);
    }
  }
};

template <typename Backend>
struct AppendViewOps {
  static TensorTuple<2> append_view(const Tensor& geometry, const Tensor& directions, const Tensor& ray_index,
                                    int64_t degree) {
    const Tensor g = checked("geometry", geometry, {kAny, kAny}, geometry.scalar_type(), geometry);
    const Tensor d = checked("directions", directions, {kAny, 3}, opmath_type(g), g);
    const Tensor index = checked("ray_index", ray_index, {g.size(0)}, ScalarType::Long, g);
    STD_TORCH_CHECK(g.size(1) > 0, "geometry must have at least one column, got none");
    STD_TORCH_CHECK(degree >= 0 && degree <= kMaxDegree, "append_view: degree must be 0 to 3, got ", degree);
    const typename Backend::Guard guard(geometry);
    const int64_t n = g.size(0), columns = g.size(1) + sh_basis_size(static_cast<int>(degree));
    Tensor inputs = new_empty(g, {n, columns}, g.scalar_type()), raw = new_empty(g, {n}, opmath_type(g));
    dispatch_floating(g.scalar_type(), "geometry", [&](auto zero) {
      using scalar_t = decltype(zero);
      const scalar_t* from = g.const_data_ptr<scalar_t>();
      scalar_t* to = inputs.mutable_data_ptr<scalar_t>();
      dispatch_value<0, 1, 2, 3>(degree, [&](auto tag) {
        constexpr int kDegree = decltype(tag)::value, kWidest = 16 / sizeof(scalar_t);
        constexpr int kWide = sh_basis_size(kDegree) % kWidest == 0 ? kWidest : 1;
        dispatch_vector_width<kWide, 1>(vector_width(kWide, {g.size(1)}, from, to), [&](auto width) {
          Backend::for_each(n, ViewAppended<scalar_t, kDegree, decltype(width)::value>{
                                   from, data_of(d), data_of(index), g.size(1), d.size(0), to, data_of(raw)});
        });
      });
    });
    return {inputs, raw};
  }

  static Tensor append_view_backward(const Tensor& grad_inputs, const Tensor& grad_raw, int64_t geometry_size) {
    const Tensor g = checked("grad_inputs", grad_inputs, {kAny, kAny}, grad_inputs.scalar_type(), grad_inputs);
    const Tensor r = checked("grad_raw", grad_raw, {g.size(0)}, opmath_type(g), g);
    STD_TORCH_CHECK(geometry_size > 0 && geometry_size <= g.size(1), "geometry_size must lie in 1..", g.size(1),
                    ", got ", geometry_size);
    const typename Backend::Guard guard(grad_inputs);
    const int64_t view_size = g.size(1) - geometry_size;
    Tensor result = new_empty(g, {g.size(0), geometry_size}, g.scalar_type());
    dispatch_floating(g.scalar_type(), "grad_inputs", [&](auto zero) {
      using scalar_t = decltype(zero);
      constexpr int kWide = 16 / sizeof(scalar_t);
      const scalar_t* from = g.const_data_ptr<scalar_t>();
      scalar_t* to = result.mutable_data_ptr<scalar_t>();
      dispatch_vector_width<kWide, 1>(vector_width(kWide, {view_size, geometry_size}, from, to), [&](auto width) {
        Backend::for_each(g.size(0), GeometryGradient<scalar_t, decltype(width)::value>{from, data_of(r), geometry_size,
                                                                                        view_size, to});
      });
    });
    return result;
  }

  static void implement(Library& m) {
    m.impl("append_view", TORCH_BOX(&AppendViewOps::append_view));
    m.impl("append_view_backward", TORCH_BOX(&AppendViewOps::append_view_backward));
  }
};

}  // namespace voxelfield
