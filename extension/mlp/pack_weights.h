// A network's weights in global memory, in the order in which tensor cores take them (weights.cuh, PackedWeights).
#pragma once

#include "common/tensors.h"
#include "mlp/network.h"

namespace voxelfield {

// int32; on the current stream. `transposed` adds what products with W need beside those with W^T.
Tensor pack_weights(const Network& network, const Tensor& like, bool transposed);

}  // namespace voxelfield
