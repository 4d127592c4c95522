// Prepares the weights of a network for kernels: checks them, and packs them in global memory.
#pragma once

#include <string>

#include "common/checks.h"
#include "mlp/network.h"

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

// Contiguous matrices, and the view that kernels use. The caller sets the padding in the view.
struct NetworkInputs {
  std::vector<Tensor> weights;
  Network view{};
  int width = 0;  // width of the widest hidden layer
};

// Checks the matrices of a network as checked_weights does.
inline NetworkInputs checked_network(const std::string& name, const std::vector<Tensor>& weights, int64_t inputs,
                                     int64_t max_outputs, int max_layers, const Tensor& like) {
  NetworkInputs network;
  network.weights = checked_weights(name, weights, inputs, max_outputs, max_layers, like);
  const ScalarType dtype = weights[0].scalar_type();
  VOXELFIELD_CHECK_TYPE(dtype == ScalarType::Half || dtype == ScalarType::Float, name,
                        "[0] must be float16 or float32, got ", dtype_name(dtype));
  const int layers = static_cast<int>(weights.size());
  network.view.layers = layers;
  network.view.float_weights = dtype == ScalarType::Float;
  for (int l = 0; l < layers; ++l) {
    const Tensor& weight = network.weights[l];
    const int rows = static_cast<int>(weight.size(0));
    network.view.layer[l] = {weight.data_ptr(), rows, static_cast<int>(weight.size(1))};
    if (l < layers - 1) network.width = std::max(network.width, rows);
  }
  return network;
}

// Packs weights into int32 on the current stream, in the order in which tensor cores read them (PackedWeights in
// weights.cuh). The result is for products with W^T; `transposed` adds the data for products with W.
Tensor pack_weights(const Network& network, const Tensor& like, bool transposed);

}  // namespace voxelfield
