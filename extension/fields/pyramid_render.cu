// Images of a pyramid of grids with two networks behind it, on CUDA: one kernel, rays included.
#include "fields/color_queue.cuh"
#include "fields/pyramid_inputs.cuh"
#include "mlp/pack_weights.h"

namespace voxelfield {
namespace {

// A warp takes the rays of a square of pixels, which stay close together.
constexpr int kTile = 8;

struct PyramidImage {
  static constexpr int kLanes = 1;
  static constexpr int kBatch = kTile * kTile;
  PinholeView camera;
  PixelColors colors;
  float *opacity, *depth;
  int tiles_across, tiles;

  struct Result {
    float opacity = 0.0f;
    float depth = 0.0f;
  };

  __host__ __device__ int count() const { return tiles * kBatch; }

  __device__ __forceinline__ int locate(int number) const {
    const int tile = number / kBatch, row = tile / tiles_across;
    const int x = (tile - row * tiles_across) * kTile + number % kTile;
    const int y = row * kTile + number % kBatch / kTile;
    return x < camera.width && y < camera.height ? y * static_cast<int>(camera.width) + x : -1;
  }

  __device__ __forceinline__ Ray operator[](int pixel) const {
    const int width = static_cast<int>(camera.width), y = pixel / width;
    return camera(pixel - y * width, y);
  }

  __device__ __forceinline__ void begin(int pixel) const {
#pragma unroll
    for (int color = 0; color < 3; ++color)
      colors.rgb[3 * static_cast<int64_t>(pixel) + color] = colors.background[color];
  }

  __device__ __forceinline__ void end(int pixel, const Result& result) const {
    opacity[pixel] = result.opacity;
    depth[pixel] = result.depth / fmaxf(result.opacity, 1e-6f);
  }
};

// What a thread puts into its row of features while the warp evaluates colours, which takes most of the registers.
struct ParkedSample {
  MarchedRay<PyramidImage::Result> ray;
  Fragment geometry[2];
};
static_assert(sizeof(ParkedSample) <= kRowBytes, "a row must hold what is parked in it");

// One block on a multiprocessor: rows and weights take most of its shared memory.
template <int Width, typename ColorWeights>
__global__ void __launch_bounds__(kMarchThreads, 1)
    render_pyramid_kernel(const __grid_constant__ PyramidScene scene, const __grid_constant__ Network color,
                          const uint4* __restrict__ packed_color, const __grid_constant__ PyramidImage image,
                          int degree, int* __restrict__ next_ray) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int density_bytes = scene.density.staged_bytes();
  const int weight_bytes = density_bytes + (ColorWeights::kStaged ? color.staged_bytes() : 0);
  const StagedField<Width> density(scene.density, shared_address(shared), nullptr);
  // The compiler would load packed tiles once for all the batches of a flush, and spill them, if it knew them to be the
  // same.
  const auto color_weights = [&] {
    const uint4* tiles = packed_color;
    asm volatile("" : "+l"(tiles));
    return ColorWeights(color, shared_address(shared) + density_bytes, tiles);
  };
  density.stage(scene.density);
  color_weights().stage(color);
  __syncthreads();
  unsigned char* const rows = shared + weight_bytes + threadIdx.x / kWarp * (kWarpRowsBytes + kQueueBytes);
  ColorQueue queue(rows + kWarpRowsBytes);
  const auto flush = [&] { queue.flush<Width>(color_weights, color.layers, image.colors); };
  march_pyramid<Width, 2>(scene, density, image, next_ray, rows,
                          [&](const PyramidSample& sample, const Panel<2>& panel, auto& ray, const auto& /*team*/) {
                            const unsigned kept = __ballot_sync(kFullWarp, sample.kept);
                            if (kept == 0) return true;
                            ParkedSample own{ray, {to_half(panel, 0), to_half(panel, 1)}};
                            if (!queue.fits(__popc(kept))) {
                              auto& parked = *reinterpret_cast<ParkedSample*>(rows + lane_of_warp() * kRowBytes);
                              parked = own;
                              flush();
                              own = parked;
                              ray = own.ray;
                              clear_row(rows);
                            }
                            queue.push(kept, own.geometry, ray.direction, degree, sample.weight, ray.number);
                            ray.result.opacity += sample.weight;
                            ray.result.depth += sample.weight * sample.t;
                            return true;
                          });
  flush();
}

// Whether a kernel can march through a field whose hidden layers have at most `width` numbers.
bool pyramid_image_fits(const Tensor& like, int64_t width) {
  const CudaBackend::Guard guard(like);
  const int padded = padded_field_width(static_cast<int>(width));
  const Network density = field_network(padded, 2), color = field_network(padded, kMaxFieldLayers);
  return plan_image(density, color, shared_memory_limit()).warps > 0;
}

std::tuple<Tensor, Tensor, Tensor> render_pyramid_image(
    const Tensor& c2w, const Tensor& intrinsics, int64_t width, int64_t height, const Tensor& background,
    const Tensor& occupied, std::vector<int64_t> resolution, const Tensor& aabb_occupancy, std::vector<Tensor> levels,
    const Tensor& aabb, std::vector<Tensor> density_weights, std::vector<Tensor> color_weights, double step,
    double density_initial, int64_t degree, double min_transmittance, double min_weight) {
  check_camera(c2w, intrinsics, width, height, background);
  const Tensor pose = as_contiguous(c2w), lens = as_contiguous(intrinsics), behind = as_contiguous(background);
  STD_TORCH_CHECK(double(width + kTile) * double(height + kTile) <= kMostMarchedRays,
                  "an image must have 1 to 2^30 pixels, got ", width, " x ", height);
  STD_TORCH_CHECK(degree >= 0 && degree <= kMaxShDegree, "degree must lie in 0..3, got ", degree);
  const CellInputs cells{occupied, resolution, aabb_occupancy, c2w};
  const CudaBackend::Guard guard(c2w);
  const PyramidInputs pyramid{levels, aabb, c2w};
  const NetworkInputs density{"density_weights", density_weights, kLevelChannels * pyramid.view.levels, 2, c2w};
  const NetworkInputs color{"color_weights", color_weights, kFieldOutputs + sh_basis_size(static_cast<int>(degree)),
                            kMaxFieldLayers, c2w};
  STD_TORCH_CHECK(density.outputs() == kFieldOutputs && color.outputs() == 3,
                  "the density network must have 16 outputs and the colour network 3");
  const int padded = padded_field_width(std::max(density.width, color.width));
  const PyramidScene scene =
      pyramid_scene(cells, pyramid, density, padded, step, density_initial, min_transmittance, min_weight);
  Tensor rgb = new_empty(pose, {height, width, 3}, ScalarType::Float);
  Tensor opacity = new_empty(pose, {height, width}, ScalarType::Float);
  Tensor depth = new_empty(pose, {height, width}, ScalarType::Float);
  const int across = static_cast<int>((width + kTile - 1) / kTile),
            down = static_cast<int>((height + kTile - 1) / kTile);
  const PyramidImage image{
      PinholeView{pose.const_data_ptr<float>(), lens.const_data_ptr<float>(), width, height, pyramid.view.aabb},
      PixelColors{rgb.mutable_data_ptr<float>(), behind.const_data_ptr<float>()},
      opacity.mutable_data_ptr<float>(),
      depth.mutable_data_ptr<float>(),
      across,
      across * down};
  const Network color_network = color.padded_to(padded);
  const int limit = shared_memory_limit();
  const MarchPlan plan = plan_image(scene.density, color_network, limit);
  STD_TORCH_CHECK(plan.warps > 0, "render_pyramid_image: one warp takes ",
                  scene.density.staged_bytes() + kWarpRowsBytes + kQueueBytes, " bytes of shared memory; ", limit,
                  " are allowed; voxelfield.rendering.render_view needs none");
  const auto launch = [&](const auto& kernel, const uint4* packed) {
    launch_march(kernel, plan, image.count(), PyramidImage::kBatch, pose, scene, color_network, packed, image,
                 static_cast<int>(degree));
  };
  dispatch_value<64, 128>(padded, [&](auto width_constant) {
    constexpr int kWidth = decltype(width_constant)::value;
    if (plan.staged) return launch(render_pyramid_kernel<kWidth, StagedField<kWidth>>, nullptr);
    static std::once_flag said;
    warn_of_packed_weights(
        said, "render_pyramid_image",
        scene.density.staged_bytes() + color_network.staged_bytes() + kMarchWarps * (kWarpRowsBytes + kQueueBytes),
        limit);
    const Tensor packed = pack_weights(color_network, c2w, false);
    launch(render_pyramid_kernel<kWidth, PackedField<kWidth>>,
           reinterpret_cast<const uint4*>(packed.const_data_ptr<int32_t>()));
  });
  return {rgb, opacity, depth};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("render_pyramid_image", TORCH_BOX(&render_pyramid_image));
  m.impl("pyramid_image_fits", TORCH_BOX(&pyramid_image_fits));
}

}  // namespace voxelfield
