// Argument checks of the ops: no kernel accesses memory outside of its tensors, or runs forever. Users see these
// messages (voxelfield/ops/_errors.py), which therefore name the argument, what it must be, and what it is.
#pragma once

#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "common/tensors.h"

namespace voxelfield {

constexpr int64_t kAny = -1;  // matches any size

// The same for a dimension that messages call by a letter.
constexpr int64_t any(char letter) { return -letter; }

inline std::string device_name(const Tensor& x) {
  return x.is_cuda() ? "cuda:" + std::to_string(x.get_device_index()) : "cpu";
}

template <typename Sizes>
std::string describe(const Sizes& sizes) {
  std::string text = "(";
  for (const int64_t size : sizes) {
    text += text.size() > 1 ? ", " : "";
    text += size >= 0 ? std::to_string(size) : std::string(1, size == kAny ? '*' : static_cast<char>(-size));
  }
  return text + ")";
}

inline std::vector<int64_t> shape_of(const Tensor& x) { return {x.sizes().begin(), x.sizes().end()}; }

using ShapeList = std::initializer_list<int64_t>;

inline void check_dtype(const char* name, const Tensor& x, ScalarType dtype, const char* why = "") {
  VOXELFIELD_CHECK_TYPE(x.scalar_type() == dtype, name, " must be ", dtype_name(dtype), why, ", got ",
                        dtype_name(x.scalar_type()));
}

inline void check_floating(const char* name, const Tensor& x) {
  dispatch_floating(x.scalar_type(), name, [](auto) {});
}

inline void check_device(const char* name, const Tensor& x, const Tensor& like) {
  STD_TORCH_CHECK(same_device(x, like), name, " must be on the device of the other tensors, ", device_name(like),
                  ", but it is on ", device_name(x));
}

// Raises unless a tensor has this shape (a list or a vector) and dtype, on the device of `like`. `why` explains the
// dtype in the message.
template <typename Shape = ShapeList>
void check_tensor(const char* name, const Tensor& x, const Shape& shape, ScalarType dtype, const Tensor& like,
                  const char* why = "") {
  const auto sizes = x.sizes();
  const bool fits = std::equal(shape.begin(), shape.end(), sizes.begin(), sizes.end(),
                               [](int64_t wanted, int64_t size) { return wanted < 0 || wanted == size; });
  STD_TORCH_CHECK(fits, name, " must have shape ", describe(shape), ", got ", describe(sizes));
  check_dtype(name, x, dtype, why);
  check_device(name, x, like);
}

// Checks a tensor as check_tensor does. Returns it, or a contiguous copy if it is not contiguous.
template <typename Shape = ShapeList>
Tensor checked(const char* name, const Tensor& x, const Shape& shape, ScalarType dtype, const Tensor& like,
               const char* why = "") {
  check_tensor(name, x, shape, dtype, like, why);
  return as_contiguous(x);
}

template <typename Shape = ShapeList>
OptionalTensor checked(const char* name, const OptionalTensor& x, const Shape& shape, ScalarType dtype,
                       const Tensor& like, const char* why = "") {
  return x.has_value() ? OptionalTensor(checked(name, *x, shape, dtype, like, why)) : std::nullopt;
}

// Checks memory that a kernel addresses directly, and returns it. The tensor must be contiguous.
template <typename Shape = ShapeList>
TensorData contiguous_data(const char* name, const Tensor& x, const Shape& shape, ScalarType dtype,
                           const Tensor& like) {
  check_tensor(name, x, shape, dtype, like);
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous, got a tensor that is not");
  return data_of(x);
}

// Checks a single number in device memory, and returns its address.
inline TensorData number_data(const char* name, const Tensor& x, ScalarType dtype, const Tensor& like) {
  STD_TORCH_CHECK(x.numel() == 1, name, " must have shape (1), got ", describe(x.sizes()));
  check_dtype(name, x, dtype);
  check_device(name, x, like);
  return data_of(x);
}

// The comparisons are written such that NaN fails them.
inline void check_fraction(const char* name, double value) {
  STD_TORCH_CHECK(value >= 0.0 && value <= 1.0, name, " must lie in [0, 1], got ", value);
}

// Kernels march in float32.
constexpr double kLargestFloat = std::numeric_limits<float>::max(), kLeastFloat = std::numeric_limits<float>::min();

inline void check_step(double step) {
  STD_TORCH_CHECK(step >= kLeastFloat && step <= kLargestFloat, "step must be a positive, finite distance, got ", step);
}

inline void check_finite(const char* name, double value) {
  STD_TORCH_CHECK(value >= -kLargestFloat && value <= kLargestFloat, name, " must be finite, got ", value);
}

inline void check_finite_not_negative(const char* name, double value) {
  STD_TORCH_CHECK(value >= 0.0 && value <= kLargestFloat, name, " must be finite and not negative, got ", value);
}

// Checks the sizes [begin, end) of a grid along its axes.
template <typename Size>
void check_vertices(const std::string& name, Size begin, Size end, const std::vector<int64_t>& shape,
                    int64_t smallest = 1) {
  const bool fits = std::all_of(begin, end, [&](int64_t n) { return n >= smallest && n <= (int64_t{1} << 30); });
  STD_TORCH_CHECK(fits, name, " must have ", smallest, " to 2^30 vertices along each axis, got shape ",
                  describe(shape));
}

}  // namespace voxelfield
