// Prepares the weights of a network for kernels: checks them, and packs them in global memory.
#pragma once

#include "mlp/checked_weights.h"
#include "mlp/network.h"

namespace voxelfield {

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
