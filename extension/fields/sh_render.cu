// Rendering a voxel field of spherical harmonics on CUDA.
#include "common/backend.cuh"
#include "common/dispatch_value.h"
#include "common/vector.cuh"
#include "fields/sh_render.cuh"

namespace voxelfield {
namespace {

// Threads that share a ray take its samples in turn, which shortens its longest chain of work, but each of them walks
// the whole ray. That pays while there are too few rays to keep the device busy, and a little for the longest rays of
// an image.
constexpr int64_t kEnoughThreads = 1 << 16;
constexpr int kMaxRayLanes = 8;
constexpr int kImageRayLanes = 2;

// Rays in the order of memory.
struct ListedWarps : ListedRays {
  static constexpr int kBlocks = kListedBlocks;

  __device__ __forceinline__ int64_t index(int64_t warp, int ray, int rays_per_warp) const {
    const int64_t index = warp * rays_per_warp + ray;
    return index < batch.count ? index : -1;
  }
};

struct TileSize {
  int tile_width, tile_height;  // powers of two
};

// A warp renders a tile of pixels, whose rays stay close together.
struct ImageWarps : TileSize, ImageRays {
  static constexpr int kBlocks = 5;

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

template <typename scalar_t>
WarpPlan plan_for(const ShGridView<scalar_t>& grid, int ray_lanes, int width) {
  WarpPlan plan{ray_lanes, 1, basis_row(grid.used_channels())};
  while (plan.sample_lanes < kWarp && plan.sample_lanes * width < grid.used_channels()) plan.sample_lanes *= 2;
  return plan;
}

// Calls f with the widest vector that rows divide into and that holds no more than two colours.
template <typename scalar_t, typename F>
void dispatch_width(const ShGridView<scalar_t>& grid, const F& f) {
  constexpr int kWidest = 16 / sizeof(scalar_t);
  const int width = grid.degree == 0 ? 1 : vector_width(kWidest, {grid.channels}, grid.rows);
  if constexpr (kWidest > 4) {
    dispatch_vector_width<kWidest, 4, 1>(width, f);
  } else {
    dispatch_vector_width<kWidest, 1>(width, f);
  }
}

struct Cuda : CudaBackend {
  template <typename scalar_t>
  static void render(const RenderScene<scalar_t>& scene, const ListedRays& rays) {
    dispatch_width(scene.grid, [&](auto width) {
      const WarpPlan plan = plan_for(scene.grid, ray_lanes_for(rays.count()), width);
      launch_warps(render_kernel<decltype(width)::value, scalar_t, ListedWarps>, plan,
                   (rays.count() + plan.rays() - 1) / plan.rays(), scene, ListedWarps{rays}, plan);
    });
  }

  template <typename scalar_t>
  static void render(const RenderScene<scalar_t>& scene, const ImageRays& rays) {
    dispatch_width(scene.grid, [&](auto width) {
      const WarpPlan plan = plan_for(scene.grid, kImageRayLanes, width);
      int tile_width = 1;
      while (tile_width * tile_width < plan.rays()) tile_width *= 2;
      const ImageWarps warps{{tile_width, plan.rays() / tile_width}, rays};
      launch_warps(render_kernel<decltype(width)::value, scalar_t, ImageWarps>, plan, warps.tiles(), scene, warps,
                   plan);
    });
  }

  template <typename scalar_t>
  static void render_backward(const RenderScene<scalar_t>& scene, const RayBatch& batch,
                              const RenderedPointers<const float>& gradients,
                              const RenderedPointers<const float>& results, float* grad_rows) {
    dispatch_width(scene.grid, [&](auto width) {
      const WarpPlan plan = plan_for(scene.grid, ray_lanes_for(batch.count), width);
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
