// What both launches of `mlp` share: checked arguments, rows that can be read by vectors, and packed weights.
#pragma once

#include <string>
#include <vector>

#include "common/backend.cuh"
#include "mlp/pack_weights.h"
#include "mlp/rows.cuh"

namespace voxelfield {

using torch::headeronly::Half;

constexpr int kMaxRows = 1 << 30;

inline const __half* halves(const Tensor& x) { return reinterpret_cast<const __half*>(x.const_data_ptr<Half>()); }
inline __half* mutable_halves(Tensor& x) { return reinterpret_cast<__half*>(x.mutable_data_ptr<Half>()); }

inline const uint4* vectors(const Tensor& x) { return reinterpret_cast<const uint4*>(x.const_data_ptr<int32_t>()); }

// The same rows with another number of columns: cut off, or filled up with zeros.
inline Tensor repacked(const Tensor& x, int64_t columns) {
  return as_contiguous(torch::stable::pad(x, {0, columns - x.size(1)}));
}

// Rows that can be read by vectors of a width: a copy where they are not.
inline Tensor by_vectors(const Tensor& x, int64_t pitch, int width) {
  const Tensor dense = as_contiguous(x);
  if (pitch == dense.size(1) && reinterpret_cast<uintptr_t>(halves(dense)) % (2 * width) == 0) return dense;
  return repacked(dense, pitch);
}

// Contiguous arguments, and the kernels' view of them.
struct MlpInputs {
  Tensor input;
  std::vector<Tensor> weights;
  std::optional<Tensor> count;
  Mlp mlp{};
  RowCount rows{};

  MlpInputs(const Tensor& any_input, const std::vector<Tensor>& any_weights, const std::optional<Tensor>& any_count)
      : count(as_contiguous(any_count)) {
    STD_TORCH_CHECK(any_input.dim() == 2 && any_input.scalar_type() == ScalarType::Half,
                    "mlp: on CUDA input must be a float16 tensor of shape (N, in)");
    const int layers = static_cast<int>(any_weights.size());
    STD_TORCH_CHECK(2 <= layers && layers <= kMaxLayers, "mlp: weights must be 2 to ", kMaxLayers, " tensors, got ",
                    layers);
    const ScalarType dtype = any_weights[0].scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::Float,
                    "mlp: on CUDA weights must be float16 or float32, got ", torch::headeronly::toString(dtype));
    int64_t columns = any_input.size(1);
    int out[kMaxLayers];
    for (int l = 0; l < layers; ++l) {
      weights.push_back(as_contiguous(any_weights[l]));
      const Tensor& own = weights[l];
      STD_TORCH_CHECK(
          own.dim() == 2 && own.size(1) == columns && own.scalar_type() == dtype && same_device(own, any_input),
          "mlp: weights[", l, "] must be (out, ", columns, "), of one dtype, on the device of input");
      STD_TORCH_CHECK(1 <= columns && columns <= kMaxWidth && 1 <= own.size(0) && own.size(0) <= kMaxWidth,
                      "mlp: weights[", l, "] must have 1 to ", kMaxWidth, " rows and columns, got ", own.size(0),
                      " and ", columns);
      columns = own.size(0);
      out[l] = static_cast<int>(columns);
    }
    mlp = plan_mlp(static_cast<int>(any_input.size(1)), out, layers);
    for (int l = 0; l < layers; ++l) mlp.network.layer[l].weights = weights[l].data_ptr();
    mlp.network.float_weights = dtype == ScalarType::Float;
    input = by_vectors(any_input, mlp.input_pitch, kInputWidth);
    STD_TORCH_CHECK(input.size(0) <= kMaxRows, "mlp: input must have at most ", kMaxRows, " rows, got ", input.size(0));
    rows.capacity = static_cast<int>(input.size(0));
    if (count.has_value()) {
      const ScalarType integer = count->scalar_type();
      STD_TORCH_CHECK(count->numel() == 1 && same_device(*count, input) &&
                          (integer == ScalarType::Long || integer == ScalarType::Int),
                      "mlp: count must be one int32 or int64 number on the device of input");
      rows.count = count->data_ptr();
      rows.wide_count = integer == ScalarType::Long;
    }
  }
};

}  // namespace voxelfield
