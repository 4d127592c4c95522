// The gradients of the weights of a network. Warps sum weight blocks of 32 x 32 over the rows of a block. The sums of
// all blocks are then added in a fixed order, so that the result is the same in every run on a device.
#pragma once

#include "mlp/fragments.cuh"
#include "mlp/plan.h"

namespace voxelfield {

constexpr int kWeightBlockVectors = kWeightBlock * kWeightBlock / 4;

// The position of a weight block in the weights.
struct WeightBlock {
  int layer, row, column;

  VOXELFIELD_HOST_DEVICE WeightBlock(const Mlp& mlp, int index) : layer(0) {
    while (index >= mlp.weight_blocks_down(layer) * mlp.weight_blocks_across(layer)) {
      index -= mlp.weight_blocks_down(layer) * mlp.weight_blocks_across(layer);
      ++layer;
    }
    row = index / mlp.weight_blocks_across(layer) * kWeightBlock;
    column = index % mlp.weight_blocks_across(layer) * kWeightBlock;
  }
};

// The addresses from which a thread reads the operands of a weight block.
struct WeightBlockOperands {
  int layer;  // or kNoWeightBlock
  unsigned leaving, entering;
  bool tall;  // more than 16 rows
};

constexpr int kNoWeightBlock = -1;

// The same addresses in two registers. The asm statement hides from the compiler that it could keep the unpacked
// result, so unpacking happens at each use.
class CompactOperands {
 public:
  CompactOperands() = default;
  __device__ __forceinline__ CompactOperands(const WeightBlockOperands& weight_block)
      : sixteens_(weight_block.leaving / 16 | weight_block.entering / 16 << 16),
        layer_(2 * weight_block.layer + weight_block.tall) {}

  __device__ __forceinline__ operator WeightBlockOperands() const {
    unsigned sixteens = sixteens_;
    int layer = layer_;
    asm volatile("" : "+r"(sixteens), "+r"(layer));
    return {layer >> 1, sixteens % 65536 * 16, sixteens / 65536 * 16, (layer & 1) != 0};
  }

 private:
  unsigned sixteens_;
  int layer_;
};

// Adds every `splits`th group of 16 rows, starting with group `split`, to a weight block or to its upper half. Layers
// narrower than 32 columns read neighbouring shared memory; those sums are discarded.
template <int Halves>
__device__ __forceinline__ void add_to_weight_block(float (&sums)[2][4][4], const WeightBlockOperands& weight_block,
                                                    int leaving_stride, int entering_stride, int split, int splits,
                                                    int count) {
  unsigned entering = weight_block.entering + 16 * split * entering_stride;
  unsigned leaving = weight_block.leaving + 16 * split * leaving_stride;
#pragma unroll 4
  for (int i = split; i < count; i += splits) {
    const Fragment right[2] = {load_matrices_transposed(entering), load_matrices_transposed(entering + 32)};
#pragma unroll
    for (int half = 0; half < Halves; ++half) {
      const Fragment left = load_matrices_transposed(leaving + 32 * half);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        multiply_add(sums[half][j], sums[half][j], left, right[j / 2].part[j % 2 * 2],
                     right[j / 2].part[j % 2 * 2 + 1]);
      }
    }
    entering += 16 * splits * entering_stride;
    leaving += 16 * splits * leaving_stride;
  }
}

// Whether each activation of the 16 rows of a tile is positive: one bit for each number that a thread holds in its
// fragments. The bit for the lower half of a part is in the lower half of a word.
template <int Width>
struct Signs {
  static constexpr int kParts = Width / 16 * 4;
  static constexpr int kWords = (kParts + 15) / 16;
  unsigned word[kWords];

  __device__ __forceinline__ void set(int tile, const Fragment& activation) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = 4 * tile + i;
      word[part / 16] |= (__hgt2_mask(as_half2(activation.part[i]), __float2half2_rn(0.f)) & 0x00010001u) << part % 16;
    }
  }
  __device__ __forceinline__ Fragment where_set(int tile, Fragment gradient) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int part = 4 * tile + i;
      gradient.part[i] &= (word[part / 16] >> part % 16 & 0x00010001u) * 0xffffu;
    }
    return gradient;
  }
};

// The weight blocks that a launch sums. The launch computes activations only up to, and gradients only down to, the
// layers that these weight blocks need. The first launch, which sums the weight blocks of the last layers, writes the
// signs of the activations for the later launches.
struct MlpLaunch {
  int first_weight_block, end_weight_block, weight_blocks;
  int splits;       // number of warps that share a weight block
  int first_signs;  // the first layer for whose input there are signs
  int tiles;        // number of tiles of 16 rows
  unsigned* signs;  // for each layer and tile of rows
  bool writes_signs;

  template <int Width>
  __device__ __forceinline__ unsigned* signs_of(int l, int tile) const {
    constexpr int kWords = Signs<Width>::kWords;
    return signs + (static_cast<int64_t>(l - first_signs) * tiles + tile) * (kWords * kWarp) + lane_of_warp();
  }
  template <int Width, int M>
  __device__ __forceinline__ void write_signs(int l, int row, const Activations<M, Width>& x) const {
    if (!writes_signs || l < first_signs) return;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      Signs<Width> own{};
#pragma unroll
      for (int i = 0; i < Width / 16; ++i) own.set(i, x.tile[i][m]);
      unsigned* const to = signs_of<Width>(l, row / 16 + m);
#pragma unroll
      for (int w = 0; w < Signs<Width>::kWords; ++w) to[w * kWarp] = own.word[w];
    }
  }
  template <int Width>
  __device__ __forceinline__ Signs<Width> read_signs(int l, int tile) const {
    Signs<Width> own;
    const unsigned* const from = signs_of<Width>(l, tile);
#pragma unroll
    for (int w = 0; w < Signs<Width>::kWords; ++w) own.word[w] = __ldg(from + w * kWarp);
    return own;
  }
};

struct MlpGradients {
  float* layer[kMaxLayers];
};

// A block adds up 8 neighbouring vectors of the sums of all blocks, with 64 threads per vector.
constexpr int kReduceVectors = 8;
constexpr int kReduceGroups = 64;
constexpr int kReduceThreads = kReduceVectors * kReduceGroups;

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__global__ void __launch_bounds__(kReduceThreads)
    mlp_reduce_kernel(const __grid_constant__ Mlp mlp, const float4* __restrict__ partial, int count, int weight_blocks,
                      const __grid_constant__ MlpGradients gradients) {
  __shared__ float4 sums[kReduceGroups][kReduceVectors];
  const int block_vector = threadIdx.x % kReduceVectors, group = threadIdx.x / kReduceVectors;
  const int vector = blockIdx.x * kReduceVectors + block_vector;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int i = group; i < count; i += kReduceGroups) {
    sum = sum + partial[static_cast<int64_t>(i) * weight_blocks * kWeightBlockVectors + vector];
  }
  sums[group][block_vector] = sum;
  for (int half = kReduceGroups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group < half) sums[group][block_vector] = sums[group][block_vector] + sums[group + half][block_vector];
  }
  if (group != 0) return;
  sum = sums[0][block_vector];
  const WeightBlock weight_block(mlp, vector / kWeightBlockVectors);
  const int eight = vector % kWeightBlockVectors / kWarp, lane = vector % kWarp;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  const NetworkLayer& layer = mlp.network.layer[weight_block.layer];
  for (int i = 0; i < 4; ++i) {
    const int at_row = weight_block.row + eight / 4 * 16 + i / 2 * 8 + lane / 4;
    const int at_column = weight_block.column + eight % 4 * 8 + lane % 4 * 2 + i % 2;
    const int row =
        weight_block.layer == mlp.network.layers - 1 ? column_at(at_row, mlp.network.log2_output_width) : at_row;
    const int column = weight_block.layer == 0 ? column_at(at_column, mlp.network.log2_input_width) : at_column;
    if (row < layer.out && column < layer.in) gradients.layer[weight_block.layer][row * layer.in + column] = values[i];
  }
}

}  // namespace voxelfield
