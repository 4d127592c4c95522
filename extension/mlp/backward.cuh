// The kernel of `mlp_backward`.
//
// Blocks are persistent and loop over the rows. Hidden activations are recomputed. Each warp propagates the gradient of
// its own rows back through the layers in registers, and writes activations and gradients to shared memory. The
// weights' gradients are divided into weight blocks of 32 x 32, which are then distributed among the block's warps.
// They sum each weight block in registers over all the block's rows. plan.h decides how much of this is in shared
// memory at once. If registers do not suffice for all weight blocks, there are several launches, beginning with the
// last layers. The sums of all blocks are then added in a fixed order, so that the result is the same in every run on a
// device.
#pragma once

#include "mlp/forward.cuh"
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

// y W of the last layer, for y in shared memory. At most 32 columns of the result are summed at a time, to save
// registers.
template <int Width, int M, typename Layer>
__device__ __forceinline__ Activations<M, Width> last_layer_transposed(const SharedMatrix& y, int row, int columns,
                                                                       const Layer& weights) {
  constexpr int kPart = Width < 32 ? Width : 32;
  Activations<M, Width> hidden;
  const auto own = weights.template tiles<true>();
#pragma unroll
  for (int part = 0; part < Width; part += kPart) {
    Panel<M> panels[kPart / 16] = {};
#pragma unroll 1
    for (int k = 0; k < columns; k += 16) {
      Fragment tiles[M];
#pragma unroll
      for (int m = 0; m < M; ++m) tiles[m] = load_fragment(y, row + 16 * m, k);
#pragma unroll
      for (int i = 0; i < kPart / 16; ++i) {
        multiply_add<2>(panels[i], tiles, own(k / 16, part / 16 + i));
      }
    }
    for_each_tile<M, kPart>([&](int i, int m) { hidden.tile[part / 16 + i][m] = to_half(panels[i], m); });
  }
  return hidden;
}

// The inputs of all layers but the first, for a warp's rows, in global memory. A thread reads only its own writes.
template <int Width, int M>
class StoredActivations {
 public:
  static constexpr int kVectors = Width / 16 * M * kWarp;  // for one layer of a warp

  __device__ __forceinline__ StoredActivations(uint4* memory, int layers)
      : own_(memory + (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp * (layers - 1) * kVectors +
             lane_of_warp()) {}

  __device__ __forceinline__ void write(int l, const Activations<M, Width>& x) const {
    for_each_tile<M, Width>([&](int i, int m) {
      const unsigned (&part)[4] = x.tile[i][m].part;
      at(l, i, m) = make_uint4(part[0], part[1], part[2], part[3]);
    });
  }

  // Copies a layer's tiles into the warp's rows of shared memory.
  __device__ __forceinline__ void read(int l, const SharedMatrix& to, int row) const {
    for_each_tile<M, Width>([&](int i, int m) {
      const uint4 f = at(l, i, m);
      store_fragment(to, row + 16 * m, 16 * i, {{f.x, f.y, f.z, f.w}});
    });
  }

 private:
  __device__ __forceinline__ uint4& at(int l, int i, int m) const {
    return own_[(l - 1) * kVectors + (i * M + m) * kWarp];
  }

  uint4* own_;
};

struct BackwardPointers {
  const uint4* packed;  // weights, unless the plan stages them
  uint4* activations;   // StoredActivations, for plans with one layer in shared memory
  const __half *grad_output, *input;
  __half* grad_input;  // null if this launch does not compute it
  float4* partial;
};

// The number of blocks per multiprocessor for which registers should suffice. With three blocks, each thread has two
// thirds of the registers that it has with two. A block of width 64 takes at least 60,672 bytes of shared memory, so
// three blocks fit only on multiprocessors with 228 KiB.
template <int Width, int WeightBlocks>
__host__ __device__ constexpr int backward_blocks() {
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200)
  constexpr int kMaxBlocks = Width == 64 ? 2 : 3;
#else
  constexpr int kMaxBlocks = 3;
#endif
  return WeightBlocks == 1 ? kMaxBlocks : 2;
}

// Whether a warp's weight blocks leave too few registers, so that other values must be recomputed. On sm_90 they
// suffice for three blocks with staged weights; on older GPUs they do not suffice for two blocks with two tiles.
template <int Width, int M, int WeightBlocks, bool Staged>
__host__ __device__ constexpr bool scarce_registers() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  if (Width == 64 && M == 2) return WeightBlocks > 1;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
  if (Staged) return Width > 64 && WeightBlocks > 3;
#endif
  return Width > 64 && WeightBlocks > 2;
}

template <typename Weights, int Width, int M, int WeightBlocks>
__global__ void __launch_bounds__(kBackwardRows / (16 * M) * kWarp, M == 1 ? 1 : backward_blocks<Width, WeightBlocks>())
    mlp_backward_kernel(const __grid_constant__ BackwardPlan plan, RowCount rows,
                        const __grid_constant__ BackwardPointers pointers, const __grid_constant__ MlpLaunch launch) {
  extern __shared__ uint4 memory[];
  constexpr bool kStaged = Weights::kStaged, kScarce = scarce_registers<Width, M, WeightBlocks, kStaged>();
  const Mlp& mlp = plan.mlp;
  const unsigned shared = shared_address(memory);
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = lane_of_warp();
  const int block_rows = warps * 16 * M, own = warp * 16 * M, last = mlp.network.layers - 1;
  const int used = rows.used(), step = gridDim.x * block_rows;
  constexpr int kStride = row_stride(Width);
  const int in_stride = plan.entering_stride(0), out_stride = plan.leaving_stride(last);
  const auto entering_stride = [&](int l) { return l == 0 ? in_stride : kStride; };
  const auto leaving_stride = [&](int l) { return l == last ? out_stride : kStride; };

  // Warps beyond the last weight block process other rows of a weight block that already has a warp.
  const int weight_blocks = launch.weight_blocks, splits = WeightBlocks == kMaxWeightBlocks ? 1 : launch.splits,
            split = splits > 1 ? warp / weight_blocks : 0;
  const int first_own_block = launch.first_weight_block + (splits > 1 ? warp % weight_blocks : warp);
  std::conditional_t<kScarce, CompactOperands, WeightBlockOperands> operand[WeightBlocks];
#pragma unroll
  for (int u = 0; u < WeightBlocks; ++u) {
    const int index = first_own_block + u * warps;
    const bool valid = index < launch.end_weight_block && split < splits;
    const WeightBlock weight_block(mlp, valid ? index : 0);
    WeightBlockOperands own_block;
    own_block.layer = valid ? weight_block.layer : kNoWeightBlock;
    own_block.tall = weight_block.row + 16 < mlp.network.rows_of(weight_block.layer);
    own_block.entering = 2 * weight_block.column +
                         down({shared + plan.entering_offset(weight_block.layer), entering_stride(weight_block.layer)});
    own_block.leaving = 2 * weight_block.row +
                        across({shared + plan.leaving_offset(weight_block.layer), leaving_stride(weight_block.layer)});
    operand[u] = own_block;
  }
  float sums[WeightBlocks][2][4][4] = {};
  const int lowest = WeightBlock(mlp, launch.first_weight_block).layer,
            highest = WeightBlock(mlp, launch.end_weight_block - 1).layer;

  // Sums as many panels at once as registers allow.
  constexpr int kTogether = M == 1 ? 4 : 1;
  const bool few = mlp.few_outputs();
  const auto input_at = [&](int row) { return WarpRows<const __half*>(pointers.input, row, used, mlp.input_pitch); };
  const auto grads_at = [&](int row) {
    return WarpRows<const __half*>(pointers.grad_output, row, used, mlp.output_pitch);
  };
  const Weights weights(mlp.network, shared, pointers.packed);
  const StoredActivations<Width, M> kept(pointers.activations, mlp.network.layers);
  const SharedMatrix kept_input{shared + plan.entering_offset(0), in_stride};
  const SharedMatrix kept_grads{shared + plan.leaving_offset(last), out_stride};
  const unsigned after = kStaged ? block_rows * kStride : 0;  // from layer to layer
  const unsigned entering = shared + plan.entering_offset(1), leaving = shared + plan.leaving_offset(0);
  const auto store = [&](unsigned to, const Activations<M, Width>& x) {
    for_each_tile<M, Width>([&](int i, int m) { store_fragment({to, kStride}, own + 16 * m, 16 * i, x.tile[i][m]); });
  };
  const auto keep_input = [&](int group, const Fragment(&tiles)[2][M]) {
#pragma unroll
    for (int m = 0; m < M; ++m) {
      store_fragment(kept_input, own + 16 * m, kInputGroup * group, tiles[0][m]);
      store_fragment(kept_input, own + 16 * m, kInputGroup * group + 16, tiles[1][m]);
    }
  };
  const auto keep_entering = [&](int l, const Activations<M, Width>& x) {
    if (l < lowest || l > highest) return;
    if constexpr (kStaged) {
      store(entering + (l - 1) * after, x);
    } else {
      kept.write(l, x);
    }
  };

  int block_first = blockIdx.x * block_rows;
  prefetch<M>(input_at(block_first + own));
  prefetch<M>(grads_at(block_first + own));
  weights.stage(mlp.network);
  __syncthreads();
  for (; block_first < used; block_first += step) {
    const int first = block_first + own;
    prefetch<M>(input_at(first + step));
    prefetch<M>(grads_at(first + step));
    Fragment tiles[2][M];
    load_input(input_at(first), 0, tiles);
    for (int group = 0; group * kOutputGroup < mlp.output_pitch; ++group) {
      Fragment grads[M];
      load_output(grads_at(first), group, few, grads);
#pragma unroll
      for (int m = 0; m < M; ++m) store_fragment(kept_grads, own + 16 * m, kOutputGroup * group, grads[m]);
    }
    Activations<M, Width> x = first_layer<Width, kScarce>(weights[0], input_at(first), tiles,
                                                          [&](int group, const Fragment(&group_tiles)[2][M]) {
                                                            if (kStaged && lowest == 0) keep_input(group, group_tiles);
                                                          });
    keep_entering(1, x);
    launch.write_signs(1, first, x);
    for (int l = 1; l < highest; ++l) {
      x = layer<M, Width, Width, kTogether>(x, weights[l]);
      keep_entering(l + 1, x);
      launch.write_signs(l + 1, first, x);
    }

    __syncwarp();
    Activations<M, Width> y;
    for (int l = last; l >= lowest; --l) {
      if constexpr (!kStaged) {
        if (l == 0) {
          for (int group = 0; group * kInputGroup < mlp.input_pitch; ++group) {
            load_input(input_at(first), group, tiles);
            keep_input(group, tiles);
          }
        } else if (l <= highest) {
          kept.read(l, {entering, kStride}, own);
        }
        __syncwarp();
      }
      // The gradient of the lowest layer's input is needed only if that layer is the network's first.
      if (l > lowest || pointers.grad_input != nullptr) {
        if (l == last) {
          y = last_layer_transposed<Width, M>(kept_grads, own, mlp.network.padded_out, weights[last]);
        } else if (l > 0) {
          y = layer<M, Width, Width, kTogether, true>(y, weights[l]);
        } else {
          const WarpRows<__half*> to(pointers.grad_input, first, used, mlp.input_pitch);
          if (first + 16 * M > used) {
            clear_rows<M>(WarpRows<__half*>(pointers.grad_input, first, rows.capacity, mlp.input_pitch));
            __syncwarp();
          }
          for (int group = 0; group * kInputGroup < mlp.input_pitch; ++group) {
            Fragment out[2][M];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const Panel<M> panel = multiply<2, true>(y, weights[0], kInputGroup * group + 16 * i);
#pragma unroll
              for (int m = 0; m < M; ++m) out[i][m] = to_half(panel, m);
            }
            store_input(out, to, group);
          }
        }
        if (l > highest) {
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const Signs<Width> signs = launch.read_signs<Width>(l, first / 16 + m);
#pragma unroll
            for (int i = 0; i < Width / 16; ++i) y.tile[i][m] = signs.where_set(i, y.tile[i][m]);
          }
        } else if (l > 0) {
          const SharedMatrix activations{entering + (l - 1) * after, kStride};
          for_each_tile<M, Width>([&](int i, int m) {
            y.tile[i][m] = where_positive(load_fragment(activations, own + 16 * m, 16 * i), y.tile[i][m]);
          });
        }
      }
      if (l == lowest || (plan.residency != Residency::kAll && l <= highest)) {
        __syncthreads();
#pragma unroll
        for (int u = 0; u < WeightBlocks; ++u) {
          const WeightBlockOperands& weight_block = operand[u];
          if (weight_block.layer == kNoWeightBlock || (plan.residency != Residency::kAll && weight_block.layer != l))
            continue;
          const int down_rows = leaving_stride(weight_block.layer), across_rows = entering_stride(weight_block.layer);
          if (weight_block.tall) {
            add_to_weight_block<2>(sums[u], weight_block, down_rows, across_rows, split, splits, block_rows / 16);
          } else {
            add_to_weight_block<1>(sums[u], weight_block, down_rows, across_rows, split, splits, block_rows / 16);
          }
        }
        __syncthreads();
      }
      if constexpr (!kStaged) __syncwarp();  // later gradients overwrite the output's, which must have been read
      if (l > lowest && l - 1 <= highest) store(leaving + (l - 1) * after, y);
    }
  }
  if (pointers.grad_input != nullptr) {
    for (; block_first < rows.capacity; block_first += step) {
      clear_rows<M>(WarpRows<__half*>(pointers.grad_input, block_first + own, rows.capacity, mlp.input_pitch));
    }
  }

#pragma unroll
  for (int u = 0; u < WeightBlocks; ++u) {
    const WeightBlockOperands& weight_block = operand[u];
    if (weight_block.layer == kNoWeightBlock) continue;
    float4* to = pointers.partial +
                 ((static_cast<int64_t>(blockIdx.x) * splits + split) * weight_blocks + first_own_block + u * warps) *
                     kWeightBlockVectors +
                 lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float (&sum)[4] = sums[u][i / 4][i % 4];
      to[i * kWarp] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

}  // namespace voxelfield
