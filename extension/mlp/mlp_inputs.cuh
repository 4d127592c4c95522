// Shared by both launches of `mlp`: checked arguments, rows that can be read as vectors, and packed weights.
#pragma once

#include "common/backend.cuh"
#include "mlp/network_inputs.h"
#include "mlp/rows.cuh"

namespace voxelfield {

using torch::headeronly::Half;

constexpr int kMaxRows = 1 << 30;

inline const __half* halves(const Tensor& x) { return reinterpret_cast<const __half*>(x.const_data_ptr<Half>()); }
inline __half* mutable_halves(Tensor& x) { return reinterpret_cast<__half*>(x.mutable_data_ptr<Half>()); }

inline const uint4* vectors(const Tensor& x) { return reinterpret_cast<const uint4*>(x.const_data_ptr<int32_t>()); }

// Returns the rows with another number of columns, truncated or padded with zeros.
inline Tensor repacked(const Tensor& x, int64_t columns) {
  return as_contiguous(torch::stable::pad(x, {0, columns - x.size(1)}));
}

// Returns rows that can be read as vectors of a given width, copied if necessary.
inline Tensor by_vectors(const Tensor& x, int64_t pitch, int width) {
  const Tensor dense = as_contiguous(x);
  if (pitch == dense.size(1) && reinterpret_cast<uintptr_t>(halves(dense)) % (2 * width) == 0) return dense;
  return repacked(dense, pitch);
}

// Contiguous arguments, and the views of them that kernels take.
struct MlpInputs {
  Tensor input;
  NetworkInputs weights;
  OptionalTensor count;
  Mlp mlp{};
  RowCount rows{};

  MlpInputs(const Tensor& any_input, const std::vector<Tensor>& any_weights, const OptionalTensor& any_count)
      : count(as_contiguous(any_count)) {
    check_tensor("input", any_input, {kAny, kAny}, ScalarType::Half, any_input,
                 " on CUDA (torch.nn.functional.linear runs other dtypes there)");
    weights = checked_network("weights", any_weights, any_input.size(1), kMaxWidth, kMaxLayers, any_input);
    mlp = plan_mlp(weights.view);
    input = by_vectors(any_input, mlp.input_pitch, mlp.input_pitch % kInputWidth == 0 ? kInputWidth : kInputWidth / 2);
    STD_TORCH_CHECK(input.size(0) <= kMaxRows, "input must have at most ", kMaxRows, " rows, got ", input.size(0));
    rows.capacity = static_cast<int>(input.size(0));
    if (count.has_value()) {
      rows.wide_count = count->scalar_type() != ScalarType::Int;
      checked_count(*count, input);
      rows.count = count->data_ptr();
    }
  }
};

}  // namespace voxelfield
