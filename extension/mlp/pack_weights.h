// Prepares the weights of a network for kernels: checks them, and packs them in global memory.
#pragma once

#include "common/checks.h"
#include "mlp/network.h"

namespace voxelfield {

// Contiguous matrices, and the view that kernels use. The caller sets the padding in the view.
struct NetworkInputs {
  std::vector<Tensor> weights;
  Network view{};
  int width = 0;  // width of the widest hidden layer
};

// Checks the matrices of a network. The first matrix has `inputs` columns, and the last has at most `max_outputs` rows.
inline NetworkInputs checked_network(const std::string& name, const std::vector<Tensor>& weights, int64_t inputs,
                                     int64_t max_outputs, int max_layers, const Tensor& like) {
  const int layers = static_cast<int>(weights.size());
  STD_TORCH_CHECK(2 <= layers && layers <= max_layers, name, " must be 2 to ", max_layers, " matrices, got ", layers);
  const ScalarType dtype = weights[0].scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Half || dtype == ScalarType::Float, "on CUDA ", name,
                  " must be float16 or float32, got ", torch::headeronly::toString(dtype));
  NetworkInputs network;
  network.view.layers = layers;
  network.view.float_weights = dtype == ScalarType::Float;
  int64_t columns = inputs;
  for (int l = 0; l < layers; ++l) {
    const std::string own_name = name + "[" + std::to_string(l) + "]";
    const Tensor own = checked(own_name.c_str(), weights[l], {kAny, columns}, dtype, like);
    const int64_t rows = own.size(0), max_rows = l == layers - 1 ? max_outputs : kMaxWidth;
    STD_TORCH_CHECK(1 <= columns && columns <= kMaxWidth && 1 <= rows && rows <= max_rows, own_name, " must have 1 to ",
                    max_rows, " rows and 1 to ", kMaxWidth, " columns, got ", rows, " and ", columns);
    network.view.layer[l] = {own.data_ptr(), static_cast<int>(rows), static_cast<int>(columns)};
    network.weights.push_back(own);
    if (l < layers - 1) network.width = std::max(network.width, static_cast<int>(rows));
    columns = rows;
  }
  return network;
}

// Packs weights into int32 on the current stream, in the order in which tensor cores read them (PackedWeights in
// weights.cuh). The result is for products with W^T; `transposed` adds the data for products with W.
Tensor pack_weights(const Network& network, const Tensor& like, bool transposed);

}  // namespace voxelfield
