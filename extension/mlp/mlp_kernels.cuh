// The kernels of mlp.cu: a multilayer perceptron on rows in global memory, forwards and backwards.
//
// Blocks stay: they stage the weights once and then walk over the rows. Backwards the hidden activations are computed
// again. A warp follows the gradient of its own rows down the layers in registers and leaves activations and gradients
// in shared memory; then the block's warps share out the weights' gradients, 32 x 32 of them a unit, and sum each unit
// in registers over all the block's rows. Where shared memory is short they do so after each layer, whose gradients
// then take the place of the activations above it. Where registers are too few for all units there are several
// launches, the last layers' first. One sum a block and unit goes to global memory, and the sums of all blocks are
// added in a fixed order: the result is the same in every run on a device.
#pragma once

#include "common/constants.h"
#include "mlp/network.cuh"

namespace voxelfield {

// A thread moves 8 neighbouring inputs at once, and 4 neighbouring outputs; of at most 8 outputs 2, one by one.
constexpr int kLog2InputWidth = 3;
constexpr int kInputWidth = 8;
constexpr int kOutputWidth = 4;
constexpr int kInputGroup = 4 * kInputWidth;
constexpr int kOutputGroup = 4 * kOutputWidth;
constexpr int kFewOutputs = 8;
constexpr int kUnit = 32;
constexpr int kUnitVectors = kUnit * kUnit / 4;

struct MlpLayer {
  const void* weights;  // (out, in)
  int out, in;
};

// A network, and where its parts lie in shared memory. Hidden layers are padded to one width.
struct Mlp {
  MlpLayer layer[kMostLayers];
  int layers;
  int width;
  int input_pitch, output_pitch;  // from row to row: multiples of kInputWidth, kOutputWidth (but for few outputs)
  bool wide_weights;              // float32, otherwise float16
  bool in_place;                  // backwards: gradients of what leaves a layer replace what enters the next

  __host__ __device__ int in() const { return layer[0].in; }
  __host__ __device__ int out() const { return layer[layers - 1].out; }
  __host__ __device__ int padded_in() const { return round_up(in(), kInputGroup); }
  __host__ __device__ int padded_out() const { return round_up(out(), kOutputGroup); }
  __host__ __device__ bool few_outputs() const { return out() <= kFewOutputs; }
  __host__ __device__ int log2_output_width() const { return few_outputs() ? 1 : 2; }

  __host__ __device__ int rows_of(int l) const { return l == layers - 1 ? padded_out() : width; }
  __host__ __device__ int columns_of(int l) const { return l == 0 ? padded_in() : width; }

  // Bytes before the weights of a layer, or after all of them.
  __host__ __device__ int weights_offset(int l) const {
    int offset = 0;
    if (l > 0) offset += width * row_stride(padded_in());
    if (l > 1) offset += (l - 1 - (l == layers)) * width * row_stride(width);
    if (l == layers) offset += padded_out() * row_stride(width);
    return offset;
  }

  // For the gradients in the weights, `rows` of activations follow: what enters each layer, then (if not in place) the
  // gradients of what leaves it; those of the output come last.
  __host__ __device__ int entering_offset(int l, int rows) const {
    return weights_offset(layers) + (l > 0 ? rows * (row_stride(padded_in()) + (l - 1) * row_stride(width)) : 0);
  }
  __host__ __device__ int leaving_offset(int l, int rows) const {
    if (in_place) return entering_offset(l + 1, rows);
    return entering_offset(layers, rows) + rows * l * row_stride(width);
  }
  __host__ __device__ int backward_bytes(int rows) const {
    return leaving_offset(layers - 1, rows) + rows * row_stride(padded_out());
  }

  __host__ __device__ int units_down(int l) const { return (rows_of(l) + kUnit - 1) / kUnit; }
  __host__ __device__ int units_across(int l) const { return (columns_of(l) + kUnit - 1) / kUnit; }
  __host__ __device__ int units() const {
    int count = 0;
    for (int l = 0; l < layers; ++l) count += units_down(l) * units_across(l);
    return count;
  }
};

// Where in the weights a unit lies.
struct MlpUnit {
  int layer, row, column;

  __host__ __device__ MlpUnit(const Mlp& mlp, int index) : layer(0) {
    while (index >= mlp.units_down(layer) * mlp.units_across(layer)) {
      index -= mlp.units_down(layer) * mlp.units_across(layer);
      ++layer;
    }
    row = index / mlp.units_across(layer) * kUnit;
    column = index % mlp.units_across(layer) * kUnit;
  }
};

constexpr int kMostRows = 1 << 30;

// How many rows there are: `capacity`, or fewer if a number on the device says so.
struct RowCount {
  int capacity;
  const void* count;
  bool wide_count;  // int64, otherwise int32

  __device__ __forceinline__ int used() const {
    if (count == nullptr) return capacity;
    const int64_t value = wide_count ? *static_cast<const int64_t*>(count) : *static_cast<const int32_t*>(count);
    return value < 0 ? 0 : value < capacity ? static_cast<int>(value) : capacity;
  }
};

template <typename weight_t>
__device__ __forceinline__ void stage_layers(const Mlp& mlp, unsigned shared) {
  for (int l = 0; l < mlp.layers; ++l) {
    const MlpLayer& own = mlp.layer[l];
    stage_weights({shared + mlp.weights_offset(l), row_stride(mlp.columns_of(l))}, mlp.rows_of(l), mlp.columns_of(l),
                  static_cast<const weight_t*>(own.weights), own.out, own.in,
                  l == mlp.layers - 1 ? mlp.log2_output_width() : 1, l == 0 ? kLog2InputWidth : 1);
  }
}

__device__ __forceinline__ void stage_mlp(const Mlp& mlp, unsigned shared) {
  if (mlp.wide_weights) {
    stage_layers<float>(mlp, shared);
  } else {
    stage_layers<__half>(mlp, shared);
  }
}

// A warp's part of an array (N, columns): the rows from `first` on, of which `rows` are there (if not less than none).
template <typename pointer_t>
struct WarpRows {
  pointer_t start;
  int rows, columns;

  __device__ __forceinline__ WarpRows(pointer_t array, int first, int end, int columns)
      : start(array + static_cast<int64_t>(first) * columns), rows(end - first), columns(columns) {}
};

// Brings rows that will be read soon nearer.
template <int M>
__device__ __forceinline__ void prefetch(const WarpRows<const __half*>& rows) {
  constexpr int kLine = 64;
  const int count = (rows.rows < 16 * M ? rows.rows : 16 * M) * rows.columns;
#pragma unroll 1
  for (int i = lane_of_warp() * kLine; i < count; i += kWarp * kLine) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(rows.start + i));
  }
}

// Calls f(m, i, row) for the rows of a thread.
template <int M, typename F>
__device__ __forceinline__ void for_each_row(const F& f) {
#pragma unroll
  for (int m = 0; m < M; ++m) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f(m, i, 16 * m + 8 * i + lane_of_warp() / 4);
  }
}

// Absent rows and columns are zeros.
template <int M>
__device__ __forceinline__ void load_input(const WarpRows<const __half*>& from, int group, Fragment (&tiles)[2][M]) {
  const int column = kInputGroup * group + lane_of_warp() % 4 * kInputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    uint4 own = make_uint4(0, 0, 0, 0);
    if (row < from.rows && column < from.columns) {
      own = __ldg(reinterpret_cast<const uint4*>(from.start + row * from.columns + column));
    }
    tiles[0][m].part[i] = own.x;
    tiles[0][m].part[i + 2] = own.y;
    tiles[1][m].part[i] = own.z;
    tiles[1][m].part[i + 2] = own.w;
  });
}

template <int M>
__device__ __forceinline__ void store_input(const Fragment (&tiles)[2][M], const WarpRows<__half*>& to, int group) {
  const int column = kInputGroup * group + lane_of_warp() % 4 * kInputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    if (row < to.rows && column < to.columns) {
      *reinterpret_cast<uint4*>(to.start + row * to.columns + column) =
          make_uint4(tiles[0][m].part[i], tiles[0][m].part[i + 2], tiles[1][m].part[i], tiles[1][m].part[i + 2]);
    }
  });
}

template <int M>
__device__ __forceinline__ void load_output(const WarpRows<const __half*>& from, int group, bool few,
                                            Fragment (&tiles)[M]) {
  if (few) {
    const int column = lane_of_warp() % 4 * 2;
    unsigned own[M][2][2];
    for_each_row<M>([&](int m, int i, int row) {
      const unsigned short* source = reinterpret_cast<const unsigned short*>(from.start + row * from.columns + column);
      own[m][i][0] = row < from.rows && column < from.columns ? __ldg(source) : 0;
      own[m][i][1] = row < from.rows && column + 1 < from.columns ? __ldg(source + 1) : 0;
    });
    for_each_row<M>([&](int m, int i, int) {
      tiles[m].part[i] = own[m][i][0] | own[m][i][1] << 16;
      tiles[m].part[i + 2] = 0;
    });
    return;
  }
  const int column = kOutputGroup * group + lane_of_warp() % 4 * kOutputWidth;
  for_each_row<M>([&](int m, int i, int row) {
    uint2 own = make_uint2(0, 0);
    if (row < from.rows && column < from.columns) {
      own = __ldg(reinterpret_cast<const uint2*>(from.start + row * from.columns + column));
    }
    tiles[m].part[i] = own.x;
    tiles[m].part[i + 2] = own.y;
  });
}

template <int M>
__device__ __forceinline__ void store_output(const Fragment (&tiles)[M], const WarpRows<__half*>& to, int group,
                                             bool few) {
  const int column = kOutputGroup * group + lane_of_warp() % 4 * (few ? 2 : kOutputWidth);
  for_each_row<M>([&](int m, int i, int row) {
    __half* target = to.start + row * to.columns + column;
    if (!few) {
      if (row < to.rows && column < to.columns) {
        *reinterpret_cast<uint2*>(target) = make_uint2(tiles[m].part[i], tiles[m].part[i + 2]);
      }
    } else {
      if (row < to.rows && column < to.columns) target[0] = __low2half(as_half2(tiles[m].part[i]));
      if (row < to.rows && column + 1 < to.columns) target[1] = __high2half(as_half2(tiles[m].part[i]));
    }
  });
}

// Zeros in a warp's 16 * M rows, by 16 bytes: so much is a multiple of that.
template <int M>
__device__ __forceinline__ void clear_rows(const WarpRows<__half*>& to) {
  const int count = (to.rows < 16 * M ? to.rows : 16 * M) * to.columns;
  for (int i = lane_of_warp() * 8; i < count; i += kWarp * 8) {
    if (i + 8 <= count) {
      *reinterpret_cast<uint4*>(to.start + i) = make_uint4(0, 0, 0, 0);
    } else {
      for (int k = i; k < count; ++k) to.start[k] = __ushort_as_half(0);
    }
  }
}

// relu(x W^T) of the first layer, whose input is walked through by groups of columns; the first group has been loaded.
// Calls visit(group, tiles).
template <int Width, int M, typename Visit>
__device__ __forceinline__ Activations<M, Width> first_layer(const SharedMatrix& weights,
                                                             const WarpRows<const __half*>& input,
                                                             Fragment (&tiles)[2][M], const Visit& visit) {
  Panel<M> panels[Width / 16] = {};
  const unsigned address = across(weights);
#pragma unroll 1
  for (int group = 0;;) {
    visit(group, tiles);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
#pragma unroll
      for (int i = 0; i < Width / 16; ++i) {
        multiply_add<2>(panels[i], tiles[k], load_matrices(address + 16 * i * weights.stride + 32 * (2 * group + k)));
      }
    }
    if (++group * kInputGroup >= input.columns) break;
    load_input(input, group, tiles);
  }
  Activations<M, Width> hidden;
#pragma unroll
  for (int i = 0; i < Width / 16; ++i) {
#pragma unroll
    for (int m = 0; m < M; ++m) hidden.tile[i][m] = relu_to_half(panels[i], m);
  }
  return hidden;
}

// y W of the last layer; y is in shared memory. At most 32 columns of the result are summed at a time, which spares
// registers.
template <int Width, int M>
__device__ __forceinline__ Activations<M, Width> last_layer_transposed(const SharedMatrix& y, int row, int columns,
                                                                       const SharedMatrix& weights) {
  constexpr int kPart = Width < 32 ? Width : 32;
  Activations<M, Width> hidden;
#pragma unroll
  for (int part = 0; part < Width; part += kPart) {
    Panel<M> panels[kPart / 16] = {};
    const unsigned address = down(weights) + 2 * part;
#pragma unroll 1
    for (int k = 0; k < columns; k += 16) {
      Fragment tiles[M];
#pragma unroll
      for (int m = 0; m < M; ++m) tiles[m] = load_fragment(y, row + 16 * m, k);
#pragma unroll
      for (int i = 0; i < kPart / 16; ++i) {
        multiply_add<2>(panels[i], tiles, load_matrices_transposed(address + k * weights.stride + 32 * i));
      }
    }
#pragma unroll
    for (int i = 0; i < kPart / 16; ++i) {
#pragma unroll
      for (int m = 0; m < M; ++m) hidden.tile[part / 16 + i][m] = to_half(panels[i], m);
    }
  }
  return hidden;
}

template <int Width, int M>
__device__ __forceinline__ void last_layer(const Activations<M, Width>& hidden, const SharedMatrix& weights,
                                           const WarpRows<__half*>& output, bool few) {
  for (int group = 0; group * kOutputGroup < output.columns; ++group) {
    const Panel<M> panel = few ? multiply<1>(hidden, weights, 0) : multiply<2>(hidden, weights, kOutputGroup * group);
    Fragment tiles[M];
#pragma unroll
    for (int m = 0; m < M; ++m) tiles[m] = to_half(panel, m);
    store_output(tiles, output, group, few);
  }
}

template <int Width, int M, int Threads, int Blocks>
__global__ void __launch_bounds__(Threads, Blocks)
    mlp_forward_kernel(const __grid_constant__ Mlp mlp, RowCount rows, const __half* __restrict__ input,
                       __half* __restrict__ output) {
  extern __shared__ uint4 memory[];
  const unsigned shared = shared_address(memory);
  constexpr int kStride = row_stride(Width);
  const int used = rows.used(), step = gridDim.x * (blockDim.x / kWarp * 16 * M);
  int first = (threadIdx.x / kWarp * gridDim.x + blockIdx.x) * (16 * M);
  const SharedMatrix first_weights{shared, row_stride(mlp.padded_in())};
  const SharedMatrix last_weights{shared + mlp.weights_offset(mlp.layers - 1), kStride};
  const unsigned hidden_weights = shared + mlp.weights_offset(1);
  const auto input_at = [&](int row) { return WarpRows<const __half*>(input, row, used, mlp.input_pitch); };
  const auto output_at = [&](int row) { return WarpRows<__half*>(output, row, rows.capacity, mlp.output_pitch); };
  prefetch<M>(input_at(first));
  stage_mlp(mlp, shared);
  __syncthreads();
  for (; first < used; first += step) {
    prefetch<M>(input_at(first + step));
    Fragment tiles[2][M];
    load_input(input_at(first), 0, tiles);
    Activations<M, Width> hidden =
        first_layer<Width>(first_weights, input_at(first), tiles, [](int, const Fragment(&)[2][M]) {});
    for (int l = 1; l < mlp.layers - 1; ++l) {
      hidden = layer<M, Width, Width>(hidden, {hidden_weights + (l - 1) * Width * kStride, kStride});
    }
    // Rows between `used` and the tile's end had zeros for an input, and so have zeros for an output.
    last_layer(hidden, last_weights, output_at(first), mlp.few_outputs());
  }
  for (; first < rows.capacity; first += step) clear_rows<M>(output_at(first));
}

// Where a thread finds the operands of a unit.
struct UnitOperands {
  int layer;
  unsigned leaving, entering;
  int leaving_stride, entering_stride;  // of 16 rows
  bool valid, tall;                     // more than 16 rows
};

// Adds what each `splits`th 16 rows from the `split`th on contribute to a unit, or to its upper half. What a narrow
// layer lacks of 32 columns is read from its surroundings, and later dropped.
template <int Halves>
__device__ __forceinline__ void add_to_unit(float (&sums)[2][4][4], const UnitOperands& unit, int split, int splits,
                                            int count) {
  unsigned entering = unit.entering + split * unit.entering_stride;
  unsigned leaving = unit.leaving + split * unit.leaving_stride;
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
    entering += splits * unit.entering_stride;
    leaving += splits * unit.leaving_stride;
  }
}

// Which activations of a tile's 16 rows are positive: a bit for each that a thread has in its fragments, that of a
// part's lower half in the lower half of a word.
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

// The units that a launch sums, of all. It computes activations only as far up, and gradients as far down, as they
// need: the first launch, that of the last layer, has written down for those after it where the ReLUs above them let
// pass.
struct MlpLaunch {
  int first_unit, end_unit, units;
  int splits;       // warps that share a unit
  int first_signs;  // the first layer for which there are signs of what enters it
  int tiles;        // of 16 rows
  unsigned* signs;  // of each layer and tile
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

template <int Width, int M, int Units, int Threads, int Blocks>
__global__ void __launch_bounds__(Threads, Blocks)
    mlp_backward_kernel(const __grid_constant__ Mlp mlp, RowCount rows, const __half* __restrict__ grad_output,
                        const __half* __restrict__ input, __half* __restrict__ grad_input, float4* __restrict__ partial,
                        const __grid_constant__ MlpLaunch launch) {
  extern __shared__ uint4 memory[];
  const unsigned shared = shared_address(memory);
  const int warps = blockDim.x / kWarp, warp = threadIdx.x / kWarp, lane = lane_of_warp();
  const int block_rows = warps * 16 * M, own = warp * 16 * M, last = mlp.layers - 1;
  const int used = rows.used(), step = gridDim.x * block_rows;
  const int in_stride = row_stride(mlp.padded_in()), out_stride = row_stride(mlp.padded_out());

  // Warps beyond the last unit take other rows of a unit that has a warp already.
  const int units = launch.units, splits = launch.splits, split = splits > 1 ? warp / units : 0;
  const int some_unit = launch.first_unit + (splits > 1 ? warp % units : warp);
  UnitOperands operand[Units];
#pragma unroll
  for (int u = 0; u < Units; ++u) {
    const int index = some_unit + u * warps;
    operand[u].valid = index < launch.end_unit && split < splits;
    const MlpUnit unit(mlp, operand[u].valid ? index : 0);
    operand[u].layer = unit.layer;
    operand[u].tall = unit.row + 16 < mlp.rows_of(unit.layer);
    const int entering_stride = unit.layer == 0 ? in_stride : row_stride(Width);
    const int leaving_stride = unit.layer == last ? out_stride : row_stride(Width);
    operand[u].entering_stride = 16 * entering_stride;
    operand[u].leaving_stride = 16 * leaving_stride;
    operand[u].entering =
        2 * unit.column + down({shared + mlp.entering_offset(unit.layer, block_rows), entering_stride});
    operand[u].leaving = 2 * unit.row + across({shared + mlp.leaving_offset(unit.layer, block_rows), leaving_stride});
  }
  float sums[Units][2][4][4] = {};
  const int lowest = MlpUnit(mlp, launch.first_unit).layer, highest = MlpUnit(mlp, launch.end_unit - 1).layer;

  // Sums of so many panels that few wait for one another, but registers suffice.
  constexpr int kTogether = M == 1 ? 4 : 1;
  constexpr int kStride = row_stride(Width);
  const bool few = mlp.few_outputs();
  const auto input_at = [&](int row) { return WarpRows<const __half*>(input, row, used, mlp.input_pitch); };
  const auto grads_at = [&](int row) { return WarpRows<const __half*>(grad_output, row, used, mlp.output_pitch); };
  const SharedMatrix first_weights{shared, in_stride};
  const SharedMatrix last_weights{shared + mlp.weights_offset(last), kStride};
  const SharedMatrix kept_input{shared + mlp.entering_offset(0, block_rows), in_stride};
  const SharedMatrix kept_grads{shared + mlp.leaving_offset(last, block_rows), out_stride};
  const unsigned hidden_weights = shared + mlp.weights_offset(1), after = block_rows * kStride;
  const unsigned entering = shared + mlp.entering_offset(1, block_rows);
  const unsigned leaving = shared + mlp.leaving_offset(0, block_rows);
  const auto keep = [&](unsigned to, const Activations<M, Width>& x) {
#pragma unroll
    for (int i = 0; i < Width / 16; ++i) {
#pragma unroll
      for (int m = 0; m < M; ++m) store_fragment({to, kStride}, own + 16 * m, 16 * i, x.tile[i][m]);
    }
  };

  int block_first = blockIdx.x * block_rows;
  prefetch<M>(input_at(block_first + own));
  prefetch<M>(grads_at(block_first + own));
  stage_mlp(mlp, shared);
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
    Activations<M, Width> x =
        first_layer<Width>(first_weights, input_at(first), tiles, [&](int group, const Fragment(&group_tiles)[2][M]) {
          if (lowest > 0) return;
#pragma unroll
          for (int m = 0; m < M; ++m) {
            store_fragment(kept_input, own + 16 * m, kInputGroup * group, group_tiles[0][m]);
            store_fragment(kept_input, own + 16 * m, kInputGroup * group + 16, group_tiles[1][m]);
          }
        });
    if (lowest <= 1 && highest >= 1) keep(entering, x);
    launch.write_signs(1, first, x);
    for (int l = 1; l < highest; ++l) {
      x = layer<M, Width, Width, kTogether>(x, {hidden_weights + (l - 1) * Width * kStride, kStride});
      if (l + 1 >= lowest) keep(entering + l * after, x);
      launch.write_signs(l + 1, first, x);
    }

    __syncwarp();
    Activations<M, Width> y;
    for (int l = last; l >= lowest; --l) {
      // What leaves the lowest layer is all that is needed of it, unless it is the network's first.
      if (l > lowest || grad_input != nullptr) {
        if (l == last) {
          y = last_layer_transposed<Width, M>(kept_grads, own, mlp.padded_out(), last_weights);
        } else if (l > 0) {
          y = multiply_transposed<kTogether>(y, {hidden_weights + (l - 1) * Width * kStride, kStride});
        } else {
          const WarpRows<__half*> to(grad_input, first, rows.capacity, mlp.input_pitch);
          for (int group = 0; group * kInputGroup < mlp.input_pitch; ++group) {
            Fragment out[2][M];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const Panel<M> panel = multiply_transposed(y, first_weights, kInputGroup * group + 16 * i);
#pragma unroll
              for (int m = 0; m < M; ++m) out[i][m] = to_half(panel, m);
            }
            store_input(out, to, group);
          }
        }
        // A ReLU is passed.
        if (l > highest) {
#pragma unroll
          for (int m = 0; m < M; ++m) {
            const Signs<Width> signs = launch.read_signs<Width>(l, first / 16 + m);
#pragma unroll
            for (int i = 0; i < Width / 16; ++i) y.tile[i][m] = signs.where_set(i, y.tile[i][m]);
          }
        } else if (l > 0) {
          const SharedMatrix activations{entering + (l - 1) * after, kStride};
#pragma unroll
          for (int i = 0; i < Width / 16; ++i) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
              y.tile[i][m] = where_positive(load_fragment(activations, own + 16 * m, 16 * i), y.tile[i][m]);
            }
          }
        }
      }
      if (l == lowest || (mlp.in_place && l <= highest)) {
        __syncthreads();
#pragma unroll
        for (int u = 0; u < Units; ++u) {
          if (!operand[u].valid || (mlp.in_place && operand[u].layer != l)) continue;
          if (operand[u].tall) {
            add_to_unit<2>(sums[u], operand[u], split, splits, block_rows / 16);
          } else {
            add_to_unit<1>(sums[u], operand[u], split, splits, block_rows / 16);
          }
        }
        __syncthreads();
      }
      if (l > lowest && l - 1 <= highest) keep(leaving + (l - 1) * after, y);
    }
  }
  if (grad_input != nullptr) {
    for (; block_first < rows.capacity; block_first += step) {
      clear_rows<M>(WarpRows<__half*>(grad_input, block_first + own, rows.capacity, mlp.input_pitch));
    }
  }

#pragma unroll
  for (int u = 0; u < Units; ++u) {
    if (!operand[u].valid) continue;
    float4* to = partial +
                 ((static_cast<int64_t>(blockIdx.x) * splits + split) * units + some_unit + u * warps) * kUnitVectors +
                 lane;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float (&sum)[4] = sums[u][i / 4][i % 4];
      to[i * kWarp] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
  }
}

// Rows with other gaps between them; columns that `from` does not have are zeros.
__global__ void __launch_bounds__(256) repack_kernel(const __half* __restrict__ from, int from_columns,
                                                     __half* __restrict__ to, int to_columns, int64_t rows) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t row = i / to_columns;
  const int column = static_cast<int>(i - row * to_columns);
  if (row < rows) to[i] = column < from_columns ? from[row * from_columns + column] : __ushort_as_half(0);
}

struct MlpGradients {
  float* layer[kMostLayers];
};

// A block adds up 8 neighbouring vectors of the blocks' sums, each by 64 threads.
constexpr int kReduceVectors = 8;
constexpr int kReduceGroups = 64;
constexpr int kReduceThreads = kReduceVectors * kReduceGroups;

__device__ __forceinline__ float4 operator+(const float4& a, const float4& b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

__global__ void __launch_bounds__(kReduceThreads)
    mlp_reduce_kernel(const __grid_constant__ Mlp mlp, const float4* __restrict__ partial, int count, int units,
                      const __grid_constant__ MlpGradients gradients) {
  __shared__ float4 sums[kReduceGroups][kReduceVectors];
  const int own_vector = threadIdx.x % kReduceVectors, group = threadIdx.x / kReduceVectors;
  const int vector = blockIdx.x * kReduceVectors + own_vector;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
  for (int i = group; i < count; i += kReduceGroups) {
    sum = sum + partial[static_cast<int64_t>(i) * units * kUnitVectors + vector];
  }
  sums[group][own_vector] = sum;
  for (int half = kReduceGroups / 2; half > 0; half /= 2) {
    __syncthreads();
    if (group < half) sums[group][own_vector] = sums[group][own_vector] + sums[group + half][own_vector];
  }
  if (group != 0) return;
  sum = sums[0][own_vector];
  const MlpUnit unit(mlp, vector / kUnitVectors);
  const int eight = vector % kUnitVectors / kWarp, lane = vector % kWarp;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  const MlpLayer& own = mlp.layer[unit.layer];
  for (int i = 0; i < 4; ++i) {
    const int at_row = unit.row + eight / 4 * 16 + i / 2 * 8 + lane / 4;
    const int at_column = unit.column + eight % 4 * 8 + lane % 4 * 2 + i % 2;
    const int row = unit.layer == mlp.layers - 1 ? column_at(at_row, mlp.log2_output_width()) : at_row;
    const int column = unit.layer == 0 ? column_at(at_column, kLog2InputWidth) : at_column;
    if (row < own.out && column < own.in) gradients.layer[unit.layer][row * own.in + column] = values[i];
  }
}

}  // namespace voxelfield
