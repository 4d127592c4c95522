// What the raw ops ask of tensors. The Python wrappers explain bad input; this keeps direct calls of the raw ops from
// touching foreign memory.
#pragma once

#include <initializer_list>
#include <string>

#include "common/tensors.h"
#include "rays/packed_rays.h"

namespace voxelfield {

constexpr int64_t kAny = -1;  // a length that does not matter

template <typename Sizes>
std::string describe(const Sizes& sizes, ScalarType dtype, const Tensor& on) {
  std::string text = "(";
  for (const int64_t size : sizes) text += (text.size() > 1 ? ", " : "") + (size == kAny ? "*" : std::to_string(size));
  text += std::string(") ") + torch::headeronly::toString(dtype) + " on ";
  return text + (on.is_cuda() ? "cuda:" + std::to_string(on.get_device_index()) : "cpu");
}

// Raises unless a tensor has such a shape and dtype, on the device of `like`.
inline void check_tensor(const char* name, const Tensor& x, std::initializer_list<int64_t> shape, ScalarType dtype,
                         const Tensor& like) {
  bool fits = x.dim() == static_cast<int64_t>(shape.size()) && x.scalar_type() == dtype && same_device(x, like);
  int64_t axis = 0;
  for (const int64_t size : shape) {
    fits = fits && (size == kAny || x.size(axis) == size);
    ++axis;
  }
  STD_TORCH_CHECK(fits, name, " must be ", describe(shape, dtype, like), ", got ",
                  describe(x.sizes(), x.scalar_type(), x));
}

// The same where memory is used as it lies.
inline void check_contiguous(const char* name, const Tensor& x, std::initializer_list<int64_t> shape, ScalarType dtype,
                             const Tensor& like) {
  check_tensor(name, x, shape, dtype, like);
  STD_TORCH_CHECK(x.is_contiguous(), name, " must be contiguous");
}

// Contents are bounded where they are read (PackedRays).
inline void check_ray_offsets(const Tensor& ray_offsets, const Tensor& like) {
  check_tensor("ray_offsets", ray_offsets, {kAny}, ScalarType::Long, like);
  STD_TORCH_CHECK(ray_offsets.size(0) > 0, "ray_offsets must have R + 1 entries, at least one, got none");
}

inline PackedRays packed_rays(const Tensor& ray_offsets, int64_t samples) {
  return {ray_offsets.const_data_ptr<int64_t>(), ray_offsets.size(0) - 1, samples};
}

}  // namespace voxelfield
