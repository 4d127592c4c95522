// The kernels that render rays: to pixels, and back to the grid.
#pragma once

#include "fields/sh_render_ops.h"
#include "fields/sh_render_warp.cuh"

namespace voxelfield {

// Blocks on a multiprocessor. A training batch is too small to fill the device, so that more would not help.
constexpr int kListedBlocks = 4;

__device__ __forceinline__ float sum_over_ray(float value, int ray_lanes) {
  for (int step = ray_lanes / 2; step > 0; step /= 2) value += __shfl_xor_sync(kFullWarp, value, step);
  return value;
}

// `Rays` maps the threads of a warp to rays, stores the results, and sets the number of blocks on a multiprocessor:
// more of them hide the latency of memory, fewer leave more registers to each thread.
template <int Width, typename scalar_t, typename Rays>
__global__ void __launch_bounds__(kRenderThreads, Rays::blocks(Width))
    render_kernel(const __grid_constant__ RenderScene<scalar_t> scene, const __grid_constant__ Rays rays,
                  WarpPlan plan) {
  const WarpSeat seat(plan);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kRenderWarps + threadIdx.x / kWarp;
  const int64_t index = rays.index(warp, seat.ray, kWarp / plan.ray_lanes);
  const Ray ray = rays[index < 0 ? 0 : index];
  RayTotals<float> totals;
  walk_rays<Width>(scene, ray.view(scene.step, scene.steps_per_length), index >= 0, seat, plan,
                   [&](const WalkedSample& sample, int, int) {
                     if (sample.kept) totals.add(sample.weight, sample.rgb, sample.t);
                   });
#pragma unroll
  for (int color = 0; color < 3; ++color) totals.rgb[color] = sum_over_ray(totals.rgb[color], plan.ray_lanes);
  totals.opacity = sum_over_ray(totals.opacity, plan.ray_lanes);
  totals.depth_sum = sum_over_ray(totals.depth_sum, plan.ray_lanes);
  if (index >= 0 && seat.ray_seat == 0) rays.store(index, totals);
}

// Adds the gradients of the staged samples to the grid's.
template <int Width>
__device__ __forceinline__ void scatter(float* grad_rows, int64_t channels, int degree, const WarpSeat& seat,
                                        const WarpPlan& plan, int count) {
  const int member = seat.lane & (plan.sample_lanes - 1), team = seat.lane / plan.sample_lanes;
  const int used = 1 + 3 * sh_basis_size(degree);
  for (int at = team; at < count; at += kWarp / plan.sample_lanes) {
    const StagedSample& sample = seat.staged[at];
    const float* row = seat.basis + sample.ray * plan.row;
    for (int channel = member * Width; channel < used; channel += plan.sample_lanes * Width) {
      const ShColors colors(channel, sh_basis_size(degree));
      const float ours = sample.value[1 + colors.first], next = sample.value[min(2 + colors.first, 3)];
      Vector<float, Width> value;
#pragma unroll
      for (int i = 0; i < Width; ++i) value.lane[i] = (i < colors.split ? ours : next) * row[channel + i];
      if (channel == 0) value.lane[0] = sample.value[0];
#pragma unroll
      for (int k = 0; k < kCorners; ++k) {
        const float weight = sample.weight[k];
        if (weight == 0.0f) continue;
        Vector<float, Width> share;
#pragma unroll
        for (int i = 0; i < Width; ++i) share.lane[i] = weight * value.lane[i];
        atomic_add<Width>(grad_rows + sample.vertex(k) * channels + channel, share);
      }
    }
  }
}

template <int Width, typename scalar_t>
__global__ void __launch_bounds__(kRenderThreads, kListedBlocks)
    render_backward_kernel(const __grid_constant__ RenderScene<scalar_t> scene, const RayBatch rays,
                           const RenderedPointers<const float> gradients, const RenderedPointers<const float> results,
                           float* __restrict__ grad_rows, WarpPlan plan) {
  const WarpSeat seat(plan);
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kRenderWarps + threadIdx.x / kWarp;
  const int64_t index = warp * (kWarp / plan.ray_lanes) + seat.ray;
  const bool exists = index < rays.count;
  const int64_t known = exists ? index : 0;
  const RayTotals<float> gradient = gradients.load(known);
  float suffix_grad = gradient.of_ray(results.load(known));
  walk_rays<Width>(scene, rays[known], exists, seat, plan, [&](const WalkedSample& sample, int place, int count) {
    const float at_weight = sample.kept ? gradient.at_weight(sample.rgb, sample.t) : 0.0f;
    const TeamScan<float> passed = team_scan(sample.weight * at_weight, seat.ray_seat, plan.ray_lanes);
    if (sample.kept) {
      const SampleGradient out = sample_gradient(scene, gradient, sample.raw, sample.transmittance, sample.weight,
                                                 sample.rgb, at_weight, suffix_grad - passed.through);
      float* value = seat.staged[place].value;
      value[0] = out.raw;
#pragma unroll
      for (int color = 0; color < 3; ++color) value[1 + color] = out.logit[color];
    }
    suffix_grad -= passed.total;
    __syncwarp();
    scatter<Width>(grad_rows, scene.grid.channels, scene.grid.degree, seat, plan, count);
  });
}

}  // namespace voxelfield
