// Renders a voxel field of spherical harmonics on CUDA. `ray_lanes` neighbouring threads of a warp walk one ray
// together and take one sample each. The kept samples are then staged in shared memory, where `sample_lanes` threads
// read the features of one sample together, one vector each. This keeps all threads of the warp busy even if only few
// of its rays are inside the object.
#include "common/backend.cuh"
#include "fields/sh_render_ops.h"
#include "volume/keep_rule.cuh"

namespace voxelfield {
namespace {

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

// Zero if the stencil is empty, as in sampling.
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
  dispatch_vector_width<kWidest, 4, 1>(widest, [&](auto width) {
    // A multiple of 8 channels holds whole vectors. The 4 additional numbers put neighbouring rows into different
    // banks.
    WarpPlan plan{ray_lanes, 1, (grid.used_channels() + 7) / 8 * 8 + 4};
    while (plan.sample_lanes < kWarp && plan.sample_lanes * width < grid.used_channels()) plan.sample_lanes *= 2;
    f(width, plan);
  });
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
