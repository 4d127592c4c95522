#include "common/backend.cuh"
#include "mlp/network_inputs.h"
#include "mlp/weights.cuh"

namespace voxelfield {
namespace {

// Returns the part of a tile that one lane holds, as StagedTiles would read it from shared memory.
template <typename weight_t>
__device__ __forceinline__ uint4 pack_lane(const Network& network, int l, int row, int column, bool transposed) {
  const NetworkLayer& layer = network.layer[l];
  const int row_width = l == network.layers - 1 ? network.log2_output_width : 1;
  const int column_width = l == 0 ? network.log2_input_width : 1;
  const int lane = lane_of_warp(), group = lane / 4, pair = lane % 4 * 2;
  const auto at = [&](int r, int c) {
    return weight_at<weight_t>(layer, column_at(row + r, row_width), column_at(column + c, column_width));
  };
  unsigned part[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int right = i % 2 * 8, below = i / 2 * 8;
    part[i] = transposed ? as_bits(to_half2(at(right + pair, below + group), at(right + pair + 1, below + group)))
                         : as_bits(to_half2(at(below + group, right + pair), at(below + group, right + pair + 1)));
  }
  return make_uint4(part[0], part[1], part[2], part[3]);
}

constexpr int kPackThreads = 256;

// Each warp packs one tile.
__global__ void __launch_bounds__(kPackThreads)
    pack_weights_kernel(const __grid_constant__ Network network, uint4* __restrict__ packed, int copies) {
  const int index = (blockIdx.x * kPackThreads + threadIdx.x) / kWarp, tiles = network.tiles();
  if (index >= copies * tiles) return;
  const bool turned = index >= tiles;
  const int tile = turned ? index - tiles : index;
  int l = 0;
  while (network.tiles_before(l + 1) <= tile) ++l;
  const int columns = network.columns_of(l) / 16, within = tile - network.tiles_before(l);
  const int row = within / columns * 16, column = within % columns * 16;
  packed[index * kWarp + lane_of_warp()] = network.float_weights ? pack_lane<float>(network, l, row, column, turned)
                                                                 : pack_lane<__half>(network, l, row, column, turned);
}

}  // namespace

Tensor pack_weights(const Network& network, const Tensor& like, bool transposed) {
  const int copies = transposed ? 2 : 1, tiles = copies * network.tiles();
  Tensor packed = new_empty(like, {tiles, kOperandTileBytes / static_cast<int64_t>(sizeof(int32_t))}, ScalarType::Int);
  CudaBackend::launch(pack_weights_kernel, CudaBackend::blocks(tiles, kPackThreads / kWarp), kPackThreads, 0, network,
                      reinterpret_cast<uint4*>(packed.mutable_data_ptr<int32_t>()), copies);
  return packed;
}

}  // namespace voxelfield
