// Renders rays with the threads of a warp. `ray_lanes` neighbouring threads walk one ray together and take one sample
// each. The kept samples are then staged in shared memory, where `sample_lanes` threads read the features of one sample
// together, one vector each. This keeps all threads of the warp busy even if only few of its rays are inside the
// object.
#pragma once

#include "fields/sh_field.h"
#include "volume/keep_rule.cuh"

namespace voxelfield {

constexpr int kRenderThreads = 128;
constexpr int kRenderWarps = kRenderThreads / kWarp;

// A sample in shared memory, written by the thread that walks its ray and read by the threads that read its features.
struct alignas(16) StagedSample {
  float weight[kCorners];
  int32_t origin;  // counted in vertices
  int32_t step[3];
  float value[4];  // forward: colour; backward: gradient with respect to raw density and to the colours before the
                   // sigmoid
  int32_t ray;     // index of its ray within the warp

  __device__ __forceinline__ int64_t vertex(int corner) const {
    return origin + corner_side(corner, 0) * step[0] + corner_side(corner, 1) * step[1] +
           corner_side(corner, 2) * step[2];
  }
};

struct WarpPlan {
  int ray_lanes;     // a power of two
  int sample_lanes;  // a power of two
  int row;           // length of the row of basis functions of a ray, in shared memory

  int rays() const { return kWarp / ray_lanes; }
  int shared_bytes() const {
    return kRenderWarps *
           (kWarp * static_cast<int>(sizeof(StagedSample)) + rays() * row * static_cast<int>(sizeof(float)));
  }
};

// The position of a thread in its warp, and the shared memory of the warp.
struct WarpSeat {
  int lane;
  int ray;       // index of the ray of the thread within the warp
  int ray_seat;  // index of the thread among those that share its ray
  StagedSample* staged;
  float* basis;  // (rays, plan.row): a factor for each channel, zero for channels that belong to no colour

  __device__ __forceinline__ explicit WarpSeat(const WarpPlan& plan) {
    extern __shared__ __align__(16) unsigned char shared[];
    lane = threadIdx.x % kWarp;
    ray_seat = lane & (plan.ray_lanes - 1);
    ray = lane / plan.ray_lanes;
    const int warp = threadIdx.x / kWarp;
    staged = reinterpret_cast<StagedSample*>(shared) + warp * kWarp;
    basis = reinterpret_cast<float*>(reinterpret_cast<StagedSample*>(shared) + kRenderThreads) +
            warp * (kWarp / plan.ray_lanes) * plan.row;
  }
};

// Raw density at a stencil. Zero if the stencil is empty, as in sampling.
template <typename scalar_t>
__device__ __forceinline__ float raw_density(const ShGridView<scalar_t>& grid, const Stencil<float, int32_t>& s) {
  scalar_t corner[kCorners];
#pragma unroll
  for (int k = 0; k < kCorners; ++k) {
    corner[k] = load_constant<1>(grid.density + static_cast<int64_t>(s.offset(k)) * grid.density_stride).lane[0];
  }
  float raw = 0.0f;
#pragma unroll
  for (int k = 0; k < kCorners; ++k) raw += s.value(k) * static_cast<float>(corner[k]);
  return s.empty ? 0.0f : raw;
}

__device__ __forceinline__ void stage(StagedSample& staged, const Stencil<float, int32_t>& s, int ray) {
#pragma unroll
  for (int k = 0; k < kCorners; ++k) staged.weight[k] = s.empty ? 0.0f : s.value(k);
  staged.origin = s.origin;
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) staged.step[axis] = s.step[axis];
  staged.ray = ray;
}

__device__ __forceinline__ void fill_basis_row(const float* direction, int degree, int row, float* out) {
  const int size = sh_basis_size(degree);
  out[0] = 0.0f;
  spherical_harmonics(direction, degree, out + 1);
  for (int i = 0; i < size; ++i) out[1 + size + i] = out[1 + 2 * size + i] = out[1 + i];
  for (int i = 1 + 3 * size; i < row; ++i) out[i] = 0.0f;
}

// Computes the colours of the staged samples before the sigmoid, and stores them in their `value`.
template <int Width, typename scalar_t>
__device__ __forceinline__ void shade(const ShGridView<scalar_t>& grid, const WarpSeat& seat, const WarpPlan& plan,
                                      int count) {
  constexpr int kPiece = Width < 4 ? Width : 4;
  const int member = seat.lane & (plan.sample_lanes - 1), team = seat.lane / plan.sample_lanes;
  const int teams = kWarp / plan.sample_lanes, used = grid.used_channels();
  for (int first = 0; first < count; first += teams) {
    const bool active = first + team < count;
    float sum[3] = {};
    if (active) {
      const StagedSample& sample = seat.staged[first + team];
      const float* row = seat.basis + sample.ray * plan.row;
      for (int channel = member * Width; channel < used; channel += plan.sample_lanes * Width) {
        Vector<scalar_t, Width> corner[kCorners];
#pragma unroll
        for (int k = 0; k < kCorners; ++k) {
          corner[k] = load_constant<Width>(grid.rows + sample.vertex(k) * grid.channels + channel);
        }
        Vector<float, Width> feature{};
#pragma unroll
        for (int k = 0; k < kCorners; ++k) add_weighted(feature, sample.weight[k], corner[k]);
        // The raw density, which has no part in the colour. Its basis is zero, but NaN times zero would be NaN.
        if (channel == 0) feature.lane[0] = 0.0f;
        const ShColors colors(channel, grid.basis_size());
        float ours = 0.0f, next = 0.0f;
#pragma unroll
        for (int piece = 0; piece < Width; piece += kPiece) {
          const Vector<float, kPiece> basis = load<kPiece>(row + channel + piece);
#pragma unroll
          for (int i = 0; i < kPiece; ++i) {
            if (piece + i < colors.split) {
              ours += feature.lane[piece + i] * basis.lane[i];
            } else {
              next += feature.lane[piece + i] * basis.lane[i];
            }
          }
        }
#pragma unroll
        for (int color = 0; color < 3; ++color) {
          sum[color] += color == colors.first ? ours : (color == colors.first + 1 ? next : 0.0f);
        }
      }
    }
    for (int step = plan.sample_lanes / 2; step > 0; step /= 2) {
#pragma unroll
      for (int color = 0; color < 3; ++color) sum[color] += __shfl_xor_sync(kFullWarp, sum[color], step);
    }
    if (active && member == 0) {
#pragma unroll
      for (int color = 0; color < 3; ++color) seat.staged[first + team].value[color] = sum[color];
    }
  }
}

// Walks the rays of the warp, one sample per thread at a time. If any samples are kept, computes their colours and
// calls visit(sample, place, count) on all threads. `count` is the number of staged samples, and `place` is the
// position of the thread's sample among them if it is kept.
template <int Width, typename scalar_t, typename Visit>
__device__ __forceinline__ void walk_rays(const RenderScene<scalar_t>& scene, const RayView& ray, bool exists,
                                          const WarpSeat& seat, const WarpPlan& plan, const Visit& visit) {
  bool walking = exists && ray.near < ray.far;
  if (walking && seat.ray_seat == 0) {
    fill_basis_row(ray.direction, scene.grid.degree, plan.row, seat.basis + seat.ray * plan.row);
  }
  __syncwarp();
  SampleWalk walk(scene.cells, ray);
  const CubeRay cube(ray, scene.grid.aabb);
  VisibleLight<float> light(scene.rule);
  const SizedTeam scan{seat.ray_seat, plan.ray_lanes};
  while (__any_sync(kFullWarp, walking)) {
    WalkedSample sample{};
    bool found = false;
    for (int i = 0; walking && i < plan.ray_lanes; ++i) {
      float t;
      walking = walk.next(t);
      if (walking && i == seat.ray_seat) {
        sample.t = t;
        found = true;
      }
    }
    Stencil<float, int32_t> stencil;
    Absorption<float> absorption{0.0f, 0.0f};
    if (found) {
      stencil = scene.grid.at(cube, sample.t);
      sample.raw = raw_density(scene.grid, stencil);
      absorption = absorption_of_density(scene.grid.density_of(sample.raw), scene.step);
    }
    static_cast<EvaluatedSample<float>&>(sample) = light.evaluate(absorption, found, scan);
    if (light.stopped()) walking = false;

    const unsigned kept = __ballot_sync(kFullWarp, sample.kept);
    if (kept == 0) continue;
    const int count = __popc(kept), place = __popc(kept & ((1u << seat.lane) - 1u));
    if (sample.kept) stage(seat.staged[place], stencil, seat.ray);
    __syncwarp();
    shade<Width>(scene.grid, seat, plan, count);
    __syncwarp();
    if (sample.kept) {
#pragma unroll
      for (int color = 0; color < 3; ++color) {
        // An empty stencil has read arbitrary numbers, and NaN times zero would be NaN.
        sample.rgb[color] = sigmoid(stencil.empty ? 0.0f : seat.staged[place].value[color]);
      }
    }
    visit(sample, place, count);
    __syncwarp();
  }
}

}  // namespace voxelfield
