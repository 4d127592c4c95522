// The check of a network's matrices, for every op that takes some.
#pragma once

#include <string>

#include "common/checks.h"
#include "common/constants.h"

namespace voxelfield {

// Checks the number of rows in use, int32 or int64, and returns its address.
inline TensorData checked_count(const Tensor& count, const Tensor& input) {
  const ScalarType dtype = count.scalar_type();
  VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Int || dtype == ScalarType::Long, "count must be int32 or int64, got ",
                        dtype_name(dtype));
  return number_data("count", count, dtype, input);
}

// Checks the matrices of a network, which all have one dtype, and returns contiguous ones. The first matrix has
// `inputs` columns, and the last has at most `max_outputs` rows.
inline std::vector<Tensor> checked_weights(const std::string& name, const std::vector<Tensor>& weights, int64_t inputs,
                                           int64_t max_outputs, int max_layers, const Tensor& like) {
  const int layers = static_cast<int>(weights.size());
  STD_TORCH_CHECK(2 <= layers && layers <= max_layers, name, " must be 2 to ", max_layers, " tensors, got ", layers);
  std::vector<Tensor> matrices;
  const std::string why = " as " + name + "[0] is";
  int64_t columns = inputs;
  for (int l = 0; l < layers; ++l) {
    const std::string layer_name = name + "[" + std::to_string(l) + "]";
    STD_TORCH_CHECK(weights[l].dim() == 2 && weights[l].size(1) == columns, layer_name, " must have shape (out, ",
                    columns, ") to take ", l == 0 ? "the input" : "what the layer before it gives", ", got ",
                    describe(weights[l].sizes()));
    matrices.push_back(
        checked(layer_name.c_str(), weights[l], {kAny, columns}, weights[0].scalar_type(), like, why.c_str()));
    const int64_t rows = weights[l].size(0), max_rows = l == layers - 1 ? max_outputs : kMaxWidth;
    STD_TORCH_CHECK(1 <= columns && columns <= kMaxWidth && 1 <= rows && rows <= max_rows, layer_name,
                    " must have 1 to ", max_rows, " rows and 1 to ", kMaxWidth, " columns, got shape ",
                    describe(weights[l].sizes()));
    columns = rows;
  }
  return matrices;
}

}  // namespace voxelfield
