// The check of a network's matrices, for every op that takes some.
#pragma once

#include <string>

#include "common/checks.h"
#include "common/constants.h"

namespace voxelfield {

// Checks the matrices of a network, which all have one dtype, and returns contiguous ones. The first matrix has
// `inputs` columns, and the last has at most `max_outputs` rows.
inline std::vector<Tensor> checked_weights(const std::string& name, const std::vector<Tensor>& weights, int64_t inputs,
                                           int64_t max_outputs, int max_layers, const Tensor& like) {
  const int layers = static_cast<int>(weights.size());
  STD_TORCH_CHECK(2 <= layers && layers <= max_layers, name, " must be 2 to ", max_layers, " matrices, got ", layers);
  std::vector<Tensor> matrices;
  int64_t columns = inputs;
  for (int l = 0; l < layers; ++l) {
    const std::string own_name = name + "[" + std::to_string(l) + "]";
    matrices.push_back(checked(own_name.c_str(), weights[l], {kAny, columns}, weights[0].scalar_type(), like));
    const int64_t rows = weights[l].size(0), max_rows = l == layers - 1 ? max_outputs : kMaxWidth;
    STD_TORCH_CHECK(1 <= columns && columns <= kMaxWidth && 1 <= rows && rows <= max_rows, own_name, " must have 1 to ",
                    max_rows, " rows and 1 to ", kMaxWidth, " columns, got ", rows, " and ", columns);
    columns = rows;
  }
  return matrices;
}

}  // namespace voxelfield
