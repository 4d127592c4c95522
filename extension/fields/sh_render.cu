// Renders a voxel field of spherical harmonics on CUDA: the kernels, and the distribution of rays over warps.
#include "common/backend.cuh"
#include "fields/sh_render_ops.h"
#include "fields/sh_render_warp.cuh"

namespace voxelfield {
namespace {

// Blocks per multiprocessor. A training batch is too small to fill the device, so more would not help.
constexpr int kListedBlocks = 4;

// `Rays` maps the threads of a warp to rays, stores the results, and sets the number of blocks per multiprocessor: more
// blocks hide the latency of memory, fewer leave more registers to each thread.
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
  for (int color = 0; color < 3; ++color) totals.rgb[color] = group_sum(totals.rgb[color], plan.ray_lanes);
  totals.opacity = group_sum(totals.opacity, plan.ray_lanes);
  totals.depth_sum = group_sum(totals.depth_sum, plan.ray_lanes);
  if (index >= 0 && seat.ray_seat == 0) rays.store(index, totals);
}

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
      sample_gradient(scene, gradient, sample, at_weight, suffix_grad - passed.through, seat.staged[place].value);
    }
    suffix_grad -= passed.total();
    __syncwarp();
    scatter<Width>(grad_rows, scene.grid.channels, scene.grid.degree, seat, plan, count);
  });
}

// Threads that share a ray take its samples in turn. This shortens the longest sequential chain of work, but each of
// the threads walks the whole ray. It is faster while there are too few rays to keep the device busy, and slightly
// faster for images, because of their longest rays.
constexpr int64_t kEnoughThreads = 1 << 16;
constexpr int kMaxRayLanes = 8;
constexpr int kImageRayLanes = 2;

struct ListedWarps : ListedRays {
  static constexpr int blocks(int /*width*/) { return kListedBlocks; }

  __device__ __forceinline__ int64_t index(int64_t warp, int ray, int rays_per_warp) const {
    const int64_t index = warp * rays_per_warp + ray;
    return index < batch.count ? index : -1;
  }
};

// A warp renders a tile of pixels, because their rays stay close together.
struct ImageWarps : ImageRays {
  int tile_width, tile_height;  // powers of two

  // Five blocks leave 96 registers per thread. With vectors of four, that causes spills except on sm_90.
  static constexpr int blocks(int width) {
#if __CUDA_ARCH__ == 900
    return 5;
#else
    return width == 4 ? 4 : 5;
#endif
  }

  __host__ __device__ int64_t tiles_across() const { return (camera.width + tile_width - 1) / tile_width; }
  int64_t tiles() const { return tiles_across() * ((camera.height + tile_height - 1) / tile_height); }

  __device__ __forceinline__ int64_t index(int64_t warp, int ray, int /*rays_per_warp*/) const {
    const int tile = static_cast<int>(warp), across = static_cast<int>(tiles_across());
    const int row = tile / across;
    const int64_t x = (tile - row * across) * tile_width + (ray & (tile_width - 1));
    const int64_t y = row * tile_height + ray / tile_width;
    return x < camera.width && y < camera.height ? y * camera.width + x : -1;
  }
};

int ray_lanes_for(int64_t rays) {
  int lanes = 1;
  while (lanes < kMaxRayLanes && 2 * lanes * rays <= kEnoughThreads) lanes *= 2;
  return lanes;
}

// Calls f with a plan and with the widest vector that divides the rows and spans at most two colours.
template <typename scalar_t, typename F>
void dispatch_plan(const ShGridView<scalar_t>& grid, int ray_lanes, const F& f) {
  constexpr int kWidest = 16 / sizeof(scalar_t);
  const int widest = grid.degree == 0 ? 1 : vector_width(kWidest, {grid.channels}, grid.rows);
  const auto with_plan = [&](auto width) {
    // A multiple of 8 channels holds whole vectors. The 4 additional numbers put neighbouring rows into different
    // banks.
    WarpPlan plan{ray_lanes, 1, (grid.used_channels() + 7) / 8 * 8 + 4};
    while (plan.sample_lanes < kWarp && plan.sample_lanes * width < grid.used_channels()) plan.sample_lanes *= 2;
    f(width, plan);
  };
  if constexpr (kWidest > 4) {
    dispatch_vector_width<kWidest, 4, 1>(widest, with_plan);
  } else {
    dispatch_vector_width<kWidest, 1>(widest, with_plan);
  }
}

struct Cuda : CudaBackend {
  template <typename scalar_t>
  static void render(const RenderScene<scalar_t>& scene, const ListedRays& rays) {
    dispatch_plan(scene.grid, ray_lanes_for(rays.count()), [&](auto width, const WarpPlan& plan) {
      launch_warps(render_kernel<decltype(width)::value, scalar_t, ListedWarps>, plan,
                   (rays.count() + plan.rays() - 1) / plan.rays(), scene, ListedWarps{rays}, plan);
    });
  }

  template <typename scalar_t>
  static void render(const RenderScene<scalar_t>& scene, const ImageRays& rays) {
    dispatch_plan(scene.grid, kImageRayLanes, [&](auto width, const WarpPlan& plan) {
      int tile_width = 1;
      while (tile_width * tile_width < plan.rays()) tile_width *= 2;
      const ImageWarps warps{rays, tile_width, plan.rays() / tile_width};
      launch_warps(render_kernel<decltype(width)::value, scalar_t, ImageWarps>, plan, warps.tiles(), scene, warps,
                   plan);
    });
  }

  template <typename scalar_t>
  static void render_backward(const RenderScene<scalar_t>& scene, const RayBatch& batch,
                              const RenderedPointers<const float>& gradients,
                              const RenderedPointers<const float>& results, float* grad_rows) {
    dispatch_plan(scene.grid, ray_lanes_for(batch.count), [&](auto width, const WarpPlan& plan) {
      launch_warps(render_backward_kernel<decltype(width)::value, scalar_t>, plan,
                   (batch.count + plan.rays() - 1) / plan.rays(), scene, batch, gradients, results, grad_rows, plan);
    });
  }

 private:
  template <typename Kernel, typename... Arguments>
  static void launch_warps(Kernel* kernel, const WarpPlan& plan, int64_t warps, const Arguments&... arguments) {
    check_shared_memory(plan.shared_bytes());
    launch(kernel, blocks(warps, kRenderWarps), kRenderThreads, plan.shared_bytes(), arguments...);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { RenderOps<Cuda>::implement(m); }

}  // namespace voxelfield
