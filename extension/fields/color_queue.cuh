// Visible samples wait in shared memory until a warp has enough of them for the colour network, because only few of the
// marched samples are visible. One thread adds a pixel's samples in their order along the ray, so that the sum does not
// depend on which samples waited together.
#pragma once

#include "fields/pyramid_march.cuh"
#include "volume/spherical_harmonics.h"
#include "volume/transfer.h"

namespace voxelfield {

// A pixel's colour is background + sum of weight * (colour - background), because the weights and the transmittance to
// the background add up to one. So a pixel needs no visit when its ray ends.
struct PixelColors {
  float* rgb;               // (pixels, 3)
  const float* background;  // (3,)
};

class ColorQueue {
 public:
  // `memory`: kQueueBytes of the warp's own, aligned to 16.
  __device__ __forceinline__ explicit ColorQueue(unsigned char* memory)
      : rows_(memory),
        inputs_{shared_address(memory), kRowBytes},
        weights_(reinterpret_cast<float*>(memory + kWarp * kRowBytes)),
        pixels_(reinterpret_cast<int*>(weights_ + kWarp)) {}

  __device__ __forceinline__ bool fits(int more) const { return count_ + more <= kWarp; }

  // Appends the samples of the threads in `kept`: for each its row of `panel` (the geometry), direction, weight and
  // pixel.
  __device__ __forceinline__ void push(unsigned kept, const Fragment (&geometry)[2], const float* direction, int degree,
                                       float weight, int pixel) {
    const int lane = lane_of_warp();
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 16 * m + 8 * i + lane / 4;
        if (kept >> row & 1) {
          unsigned char* to = rows_ + place(kept, row) * kRowBytes + lane % 4 * 4;
          *reinterpret_cast<unsigned*>(to) = geometry[m].part[i];
          *reinterpret_cast<unsigned*>(to + 16) = geometry[m].part[i + 2];
        }
      }
    }
    if (kept >> lane & 1) {
      const int own = place(kept, lane);
      float basis[kMaxShBasis] = {};
      spherical_harmonics(direction, degree, basis);
      uint4* to = reinterpret_cast<uint4*>(rows_ + own * kRowBytes + 2 * kFieldOutputs);
#pragma unroll
      for (int i = 0; i < kMaxShBasis / 8; ++i) {
        const float* eight = basis + 8 * i;
        to[i] = make_uint4(as_bits(to_half2(eight[0], eight[1])), as_bits(to_half2(eight[2], eight[3])),
                           as_bits(to_half2(eight[4], eight[5])), as_bits(to_half2(eight[6], eight[7])));
      }
      weights_[own] = weight;
      pixels_[own] = pixel;
    }
    count_ += __popc(kept);
    __syncwarp();
  }

  // Evaluates the colours of all waiting samples and adds them to their pixels. `weights()` are the network's.
  template <int Width, typename Weights>
  __device__ __forceinline__ void flush(const Weights& weights, int layers, const PixelColors& pixels) {
    const int lane = lane_of_warp(), quarter = lane % 4;
#pragma unroll 1
    for (int row = 0; row < count_; row += 16) {
      const Activations<1, kFieldInputs> x = load_rows<1>(inputs_, row);
      const Panel<1> panel = logits<Width>(weights(), layers, x);
      __syncwarp();
      // Every fourth thread holds red and green, the next one blue. Their contributions overwrite the inputs.
      if (quarter < 2) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int own = row + 8 * i + lane / 4;
          float* to = reinterpret_cast<float*>(rows_ + own * kRowBytes);
#pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int color = 2 * quarter + k;
            if (color > 2) continue;
            const float logit = __half2float(__float2half_rn(panel.sum[0][0][2 * i + k]));
            to[color] = weights_[own] * (sigmoid(logit) - pixels.background[color]);
          }
        }
      }
      __syncwarp();  // the next rows are loaded by the warp as one
    }
    add_up(pixels);
    count_ = 0;
    __syncwarp();
  }

 private:
  template <int Width, typename Weights>
  static __device__ __forceinline__ Panel<1> logits(const Weights& weights, int layers,
                                                    const Activations<1, kFieldInputs>& x) {
    if (layers == 2) return last_two_layers<Width, 1>(x, weights[0], weights[1]);
    Activations<1, Width> hidden = layer<1, kFieldInputs, Width>(x, weights[0]);
    for (int l = 1; l < layers - 2; ++l) hidden = layer<1, Width, Width>(hidden, weights[l]);
    return last_two_layers<Width, 1>(hidden, weights[layers - 2], weights[layers - 1]);
  }

  __device__ __forceinline__ int place(unsigned kept, int row) const {
    return count_ + __popc(kept & ((1u << row) - 1u));
  }

  __device__ __forceinline__ void add_up(const PixelColors& pixels) const {
    const int lane = lane_of_warp();
    // Threads without a sample differ from all others, and from one another.
    const int pixel = lane < count_ ? pixels_[lane] : -1 - lane;
    unsigned peers = __match_any_sync(kFullWarp, pixel);
    if (pixel < 0 || __ffs(peers) - 1 != lane) return;
    float* to = pixels.rgb + 3 * static_cast<int64_t>(pixel);
    float sum[3] = {to[0], to[1], to[2]};
    for (; peers != 0; peers &= peers - 1) {
      const float* add = reinterpret_cast<const float*>(rows_ + (__ffs(peers) - 1) * kRowBytes);
#pragma unroll
      for (int color = 0; color < 3; ++color) sum[color] += add[color];
    }
#pragma unroll
    for (int color = 0; color < 3; ++color) to[color] = sum[color];
  }

  unsigned char* rows_;
  SharedMatrix inputs_;
  float* weights_;
  int* pixels_;
  int count_ = 0;
};

}  // namespace voxelfield
