// Rendering a voxel field of spherical harmonics on CUDA.
#include "common/backend.cuh"
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

// Rays from memory.
struct ListedRays {
  static constexpr int kBlocks = kListedBlocks;
  RayBatch batch;
  RenderedPointers<float> out;

  __device__ __forceinline__ int64_t index(int64_t warp, int ray, int rays_per_warp) const {
    const int64_t index = warp * rays_per_warp + ray;
    return index < batch.count ? index : -1;
  }

  __device__ __forceinline__ Ray operator[](int64_t index) const {
    const RayView view = batch[index < 0 ? 0 : index];
    return {{view.origin[0], view.origin[1], view.origin[2]},
            {view.direction[0], view.direction[1], view.direction[2]},
            view.near,
            view.far,
            view.offset};
  }

  __device__ __forceinline__ void store(int64_t index, const RayTotals<float>& totals) const {
    out.store(index, totals);
  }
};

// The rays of an image: a warp renders a tile of pixels, whose rays stay close together.
struct ImageRays {
  static constexpr int kBlocks = 5;
  int tile_width, tile_height;  // powers of two
  PinholeView camera;
  const float* background;
  RenderedPointers<float> out;

  __host__ __device__ int64_t tiles_across() const { return (camera.width + tile_width - 1) / tile_width; }
  int64_t tiles() const { return tiles_across() * ((camera.height + tile_height - 1) / tile_height); }

  __device__ __forceinline__ int64_t index(int64_t warp, int ray, int /*rays_per_warp*/) const {
    const int tile = static_cast<int>(warp), across = static_cast<int>(tiles_across());
    const int row = tile / across;
    const int64_t x = (tile - row * across) * tile_width + (ray & (tile_width - 1));
    const int64_t y = row * tile_height + ray / tile_width;
    return x < camera.width && y < camera.height ? y * camera.width + x : -1;
  }

  __device__ __forceinline__ Ray operator[](int64_t index) const {
    const int64_t pixel = index < 0 ? 0 : index, y = pixel / camera.width;
    return camera(pixel - y * camera.width, y);
  }

  __device__ __forceinline__ void store(int64_t index, const RayTotals<float>& totals) const {
    out.store_pixel(background, index, totals);
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
  static void render(const RenderScene<scalar_t>& scene, const RayBatch& batch, const RenderedPointers<float>& out) {
    dispatch_width(scene.grid, [&](auto width) {
      const WarpPlan plan = plan_for(scene.grid, ray_lanes_for(batch.count), width);
      launch<decltype(width)::value>(scene, ListedRays{batch, out}, plan,
                                     (batch.count + plan.rays() - 1) / plan.rays());
    });
  }

  template <typename scalar_t>
  static void render_image(const RenderScene<scalar_t>& scene, const PinholeView& camera, const float* background,
                           const RenderedPointers<float>& out) {
    dispatch_width(scene.grid, [&](auto width) {
      const WarpPlan plan = plan_for(scene.grid, kImageRayLanes, width);
      int tile_width = 1;
      while (tile_width * tile_width < plan.rays()) tile_width *= 2;
      const ImageRays rays{tile_width, plan.rays() / tile_width, camera, background, out};
      launch<decltype(width)::value>(scene, rays, plan, rays.tiles());
    });
  }

  template <typename scalar_t>
  static void render_backward(const RenderScene<scalar_t>& scene, const RayBatch& batch,
                              const RenderedPointers<const float>& gradients,
                              const RenderedPointers<const float>& results, float* grad_rows) {
    dispatch_width(scene.grid, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const WarpPlan plan = plan_for(scene.grid, ray_lanes_for(batch.count), width);
      check_shared_memory(plan.shared_bytes());
      render_backward_kernel<kWidth>
          <<<blocks(batch.count, plan.rays() * kRenderWarps), kRenderThreads, plan.shared_bytes(), stream()>>>(
              scene, batch, gradients, results, grad_rows, plan);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    });
  }

 private:
  template <int kWidth, typename scalar_t, typename Rays>
  static void launch(const RenderScene<scalar_t>& scene, const Rays& rays, const WarpPlan& plan, int64_t warps) {
    check_shared_memory(plan.shared_bytes());
    render_kernel<kWidth>
        <<<blocks(warps, kRenderWarps), kRenderThreads, plan.shared_bytes(), stream()>>>(scene, rays, plan);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("render_grid", TORCH_BOX(&RenderOps<Cuda>::render_grid));
  m.impl("render_grid_image", TORCH_BOX(&RenderOps<Cuda>::render_grid_image));
  m.impl("render_grid_backward", TORCH_BOX(&RenderOps<Cuda>::render_grid_backward));
  m.impl("render_grid_accumulate", TORCH_BOX(&RenderOps<Cuda>::render_grid_accumulate));
}

}  // namespace voxelfield
