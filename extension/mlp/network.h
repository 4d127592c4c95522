// The view of a multilayer perceptron that kernels use, and the size of its weights. Plain C++, so that a test can
// compute sizes without a GPU.
#pragma once

#include <cstdint>

#include "common/constants.h"
#include "common/platform.h"

namespace voxelfield {

constexpr int kOperandTileBytes = 512;  // 16 x 16 float16

// The rows of a matrix in shared memory are 16 bytes longer than their columns (a multiple of 16) require. This puts
// the eight rows that ldmatrix reads at once into different banks.
VOXELFIELD_HOST_DEVICE constexpr int row_stride(int columns) { return 2 * (columns + 8); }

VOXELFIELD_HOST_DEVICE constexpr int round_up(int value, int multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// mma.sync assigns columns 2t and 2t + 1 of every eight to a thread. Treating them as columns width * t to width * t +
// width - 1 permutes the columns of the weights of the first layer, or the rows of those of the last layer. A thread
// can then move `width` neighbouring numbers of a row in global memory in one access. A width of 2 does not permute
// anything.
VOXELFIELD_HOST_DEVICE constexpr int column_at(int position, int log2_width) {
  const int within = position & ((4 << log2_width) - 1);
  return position - within + ((within & 6) >> 1 << log2_width) + (within >> 3) * 2 + (within & 1);
}

struct NetworkLayer {
  const void* weights;  // (out, in)
  int out, in;
};

// A network whose hidden layers are padded to `width`, which is 16, 32, 64 or 128.
struct Network {
  NetworkLayer layer[kMaxLayers];
  int layers;
  int width;
  int padded_in, padded_out;                // multiples of 16
  int log2_input_width, log2_output_width;  // for column_at
  bool float_weights;                       // float32 if true, else float16

  VOXELFIELD_HOST_DEVICE int in() const { return layer[0].in; }
  VOXELFIELD_HOST_DEVICE int out() const { return layer[layers - 1].out; }
  VOXELFIELD_HOST_DEVICE int rows_of(int l) const { return l == layers - 1 ? padded_out : width; }
  VOXELFIELD_HOST_DEVICE int columns_of(int l) const { return l == 0 ? padded_in : width; }

  // The size of the weights of all layers, stored as rows in shared memory.
  VOXELFIELD_HOST_DEVICE int staged_bytes() const {
    return width * row_stride(padded_in) + ((layers - 2) * width + padded_out) * row_stride(width);
  }

  // The number of tiles of 16 x 16 weights before layer l; for l == layers, the number in all layers.
  VOXELFIELD_HOST_DEVICE int tiles_before(int l) const {
    if (l == 0) return 0;
    const int tall = width / 16, hidden = (l < layers ? l - 1 : layers - 2) * tall * tall;
    return tall * (padded_in / 16) + hidden + (l == layers ? padded_out / 16 * tall : 0);
  }
  VOXELFIELD_HOST_DEVICE int tiles() const { return tiles_before(layers); }
};

}  // namespace voxelfield
