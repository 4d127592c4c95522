// Helpers on top of the stable tensor API for the host code of both backends, and functions that dispatch from dtypes
// and numbers known at run time to template arguments.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/Dispatch.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#include "common/platform.h"

namespace voxelfield {

using torch::headeronly::ScalarType;
using torch::stable::new_zeros;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Library = torch::stable::detail::StableLibrary;

// The result of an op that returns `Count` tensors.
template <size_t Count>
using TensorTuple = decltype(std::tuple_cat(std::array<Tensor, Count>{}));

// Arithmetic is done in float64 for float64 tensors, and in float32 for all narrower types.
template <typename scalar_t>
using opmath_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

inline ScalarType opmath_type(const Tensor& x) {
  return x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
}

template <typename T>
constexpr ScalarType scalar_type_of() {
  return std::is_same_v<T, double>                        ? ScalarType::Double
         : std::is_same_v<T, torch::headeronly::Half>     ? ScalarType::Half
         : std::is_same_v<T, torch::headeronly::BFloat16> ? ScalarType::BFloat16
                                                          : ScalarType::Float;
}

inline Tensor as_contiguous(const Tensor& x) { return x.is_contiguous() ? x : torch::stable::contiguous(x); }

inline OptionalTensor as_contiguous(const OptionalTensor& x) {
  return x.has_value() ? OptionalTensor(as_contiguous(*x)) : std::nullopt;
}

// Calls the C shim directly, because torch::stable::new_empty looks the operator up by name in every call.
inline Tensor new_empty(const Tensor& like, const std::vector<int64_t>& shape, ScalarType dtype) {
  constexpr size_t kMaxDims = 8;
  STD_TORCH_CHECK(shape.size() <= kMaxDims, "expected at most ", kMaxDims, " dimensions, got ", shape.size());
  int64_t strides[kMaxDims], stride = 1;
  for (size_t axis = shape.size(); axis-- > 0;) {
    strides[axis] = stride;
    stride *= std::max<int64_t>(shape[axis], 1);
  }
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle result = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(static_cast<int64_t>(shape.size()), shape.data(), strides,
                               torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type,
                               like.get_device_index(), &result));
  return Tensor(result);
}

inline Tensor new_like(const Tensor& like, const std::vector<int64_t>& shape) {
  return new_empty(like, shape, like.scalar_type());
}

inline bool same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// The memory of a tensor. It converts to a pointer of the type of the tensor, to const for reading and to non-const for
// writing; the pointer is null if there is no tensor.
struct TensorData {
  const Tensor* tensor;

  template <typename T>
  operator T*() const {
    if (tensor == nullptr) return nullptr;
    if constexpr (std::is_const_v<T>) {
      return tensor->const_data_ptr<std::remove_const_t<T>>();
    } else {
      return tensor->mutable_data_ptr<T>();
    }
  }
};

inline TensorData data_of(const Tensor& x) { return {&x}; }

inline TensorData data_of(const OptionalTensor& x) { return {x.has_value() ? &*x : nullptr}; }

// Calls f(T{}) with the C++ type of a tensor that the caller has checked to be float32 or float64.
template <typename F>
auto dispatch_opmath(const Tensor& like, const F& f) {
  return like.scalar_type() == ScalarType::Double ? f(double{}) : f(float{});
}

// The name of a dtype in Python.
inline const char* dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Bool: return "bool";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: return torch::headeronly::toString(dtype);
  }
}

// Raises what Python turns into a TypeError (voxelfield/ops/_errors.py), like all messages that begin with this word.
#define VOXELFIELD_CHECK_TYPE(condition, ...) STD_TORCH_CHECK(condition, "TypeError: ", __VA_ARGS__)

// Calls f(scalar_t{}) with the C++ type of a floating dtype.
template <typename F>
auto dispatch_floating(ScalarType dtype, const char* name, const F& f) {
  switch (dtype) {
    case ScalarType::Float: return f(float{});
    case ScalarType::Double: return f(double{});
    case ScalarType::Half: return f(torch::headeronly::Half{});
    case ScalarType::BFloat16: return f(torch::headeronly::BFloat16{});
    default: break;
  }
  VOXELFIELD_CHECK_TYPE(false, name, " must be float32, float64, float16 or bfloat16, got ", dtype_name(dtype));
}

inline bool is_integral(ScalarType dtype) {
  return dtype == ScalarType::Bool || dtype == ScalarType::Byte || dtype == ScalarType::Char ||
         dtype == ScalarType::Short || dtype == ScalarType::Int || dtype == ScalarType::Long;
}

// Calls f(element_t{}) with the C++ type of a dtype for which is_integral holds.
template <typename F>
auto dispatch_integral(ScalarType dtype, const F& f) {
  switch (dtype) {
    case ScalarType::Bool: return f(bool{});
    case ScalarType::Byte: return f(uint8_t{});
    case ScalarType::Char: return f(int8_t{});
    case ScalarType::Short: return f(int16_t{});
    case ScalarType::Int: return f(int32_t{});
    default: return f(int64_t{});
  }
}

// Calls f with an integral_constant: the first of the ascending Values that is at least `value`, or the last one if
// there is none.
template <int First, int... Values, typename F>
void dispatch_value(int64_t value, const F& f) {
  if constexpr (sizeof...(Values) > 0) {
    if (value > First) return dispatch_value<Values...>(value, f);
  }
  f(std::integral_constant<int, First>{});
}

template <typename F>
void dispatch_flag(bool flag, const F& f) {
  flag ? f(std::true_type{}) : f(std::false_type{});
}

// Returns the largest width, a power of two up to `widest`, of vectors into which the data can be divided: it divides
// every count (a length, stride or offset in elements), and every array is aligned to it. Null pointers are compatible
// with any width.
template <typename... Elements>
int vector_width(int widest, std::initializer_list<int64_t> counts, const Elements*... arrays) {
  uint64_t bits = static_cast<uint64_t>(widest);
  for (const int64_t count : counts) bits |= static_cast<uint64_t>(count);
  ((bits |= reinterpret_cast<uintptr_t>(arrays) / sizeof(Elements)), ...);
  return static_cast<int>(bits & (~bits + 1));  // the lowest set bit
}

// Calls f with the first of `Width, Narrower...`, given in descending order, that is at most `width`. At least the last
// one must be.
template <int Width, int... Narrower, typename F>
void dispatch_vector_width(int width, const F& f) {
  if constexpr (sizeof...(Narrower) > 0) {
    if (width < Width) return dispatch_vector_width<Narrower...>(width, f);
  }
  f(std::integral_constant<int, Width>{});
}

}  // namespace voxelfield
