// Renders images of a pyramid of grids followed by two networks on CUDA, in one kernel that also generates the rays.
#include "fields/pyramid_launch.cuh"

namespace voxelfield {
namespace {

// A queue of visible samples in shared memory. Only few of the marched samples are visible, so samples are queued until
// a warp has enough of them for the colour network. One thread adds the samples of a pixel in their order along the
// ray, so the sum does not depend on which samples were in the queue together.
class ColorQueue {
 public:
  // `memory`: kQueueBytes for this warp alone, aligned to 16.
  __device__ __forceinline__ explicit ColorQueue(unsigned char* memory)
      : rows_(memory),
        inputs_{shared_address(memory), kRowBytes},
        weights_(reinterpret_cast<float*>(memory + kWarp * kRowBytes)),
        pixels_(reinterpret_cast<int*>(weights_ + kWarp)) {}

  __device__ __forceinline__ bool fits(int more) const { return count_ + more <= kWarp; }

  // Appends the samples of the threads in `kept`. Each has a row of `panel` (the geometry), a direction, a weight and a
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
      uint4* to = reinterpret_cast<uint4*>(rows_ + own * kRowBytes + 2 * kMaxGeometry);
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

  // Evaluates the colours of all queued samples and adds them to their pixels. `weights()` returns the weights of the
  // network.
  template <int Width, typename Weights>
  __device__ __forceinline__ void flush(const Weights& weights, int layers, const ImagePointers& pixels) {
    const int lane = lane_of_warp(), quarter = lane % 4;
#pragma unroll 1
    for (int row = 0; row < count_; row += 16) {
      const Activations<1, kFieldInputs> x = load_rows<1>(inputs_, row);
      const Panel<1> panel = logits<Width>(weights(), layers, x);
      __syncwarp();
      // Of every four threads, the first holds red and green, and the second holds blue. The contributions overwrite
      // the inputs.
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
      __syncwarp();  // the warp loads the next rows collectively
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

  __device__ __forceinline__ void add_up(const ImagePointers& pixels) const {
    const int lane = lane_of_warp();
    // Threads without a sample get distinct negative numbers, so that they match no other thread.
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

struct PixelSums {
  float opacity = 0.0f;
  float depth = 0.0f;
};

template <bool InPieces, bool Sparse>
struct PyramidImage {
  static constexpr bool kInPieces = InPieces;
  static constexpr bool kSparse = Sparse;
  static constexpr bool kWorldDistances = true;
  static constexpr int kLanes = 1;
  static constexpr int kBatch = kSquare * kSquare;
  static constexpr int kMaxIdle = 20;
  CameraView camera;
  ImagePointers out;
  int squares_across, squares;

  using Result = PixelSums;

  __host__ __device__ int count() const { return squares * kBatch; }

  __device__ __forceinline__ bool enough() const { return false; }

  __device__ __forceinline__ int locate(int number) const {
    const int square = number / kBatch, row = square / squares_across;
    const int x = (square - row * squares_across) * kSquare + number % kSquare;
    const int y = row * kSquare + number % kBatch / kSquare;
    return x < camera.width && y < camera.height ? y * static_cast<int>(camera.width) + x : -1;
  }

  __device__ __forceinline__ Ray operator[](int pixel) const {
    const int width = static_cast<int>(camera.width), y = pixel / width;
    return camera(pixel - y * width, y);
  }

  __device__ __forceinline__ void begin(int pixel) const {
#pragma unroll
    for (int color = 0; color < 3; ++color) out.rgb[3 * static_cast<int64_t>(pixel) + color] = out.background[color];
  }

  __device__ __forceinline__ void end(int pixel, const Result& result) const {
    out.opacity[pixel] = result.opacity;
    out.depth[pixel] = result.depth / fmaxf(result.opacity, 1e-6f);
  }
};

// The state that a thread saves to its row of features while the warp evaluates colours, which needs most of the
// registers.
struct ParkedSample {
  MarchedRay<PixelSums> ray;
  Fragment geometry[2];
};
static_assert(sizeof(ParkedSample) <= kRowBytes, "a row must have room for the parked state");

// One block per multiprocessor, because rows and weights take most of its shared memory.
template <int Width, typename ColorWeights, typename Image>
__global__ void __launch_bounds__(kMarchThreads, 1)
    render_pyramid_kernel(const __grid_constant__ HalfScene scene, const __grid_constant__ Network color,
                          const uint4* __restrict__ packed_color, const __grid_constant__ Image image, int degree,
                          int* __restrict__ next_ray) {
  extern __shared__ __align__(16) unsigned char shared[];
  const int density_bytes = scene.density.staged_bytes();
  const int weight_bytes = density_bytes + (ColorWeights::kStaged ? color.staged_bytes() : 0);
  const StagedField<Width> density(scene.density, shared_address(shared), nullptr);
  // Hides from the compiler that all batches of a flush read the same packed tiles. Otherwise it would load the tiles
  // once for all batches and spill them.
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
  const auto flush = [&] { queue.flush<Width>(color_weights, color.layers, image.out); };
  march_pyramid<Width, 2>(
      scene, density, image, next_ray, rows,
      [&](const PyramidSample& sample, const Panel<2>& panel, const float* direction, auto& ray, const auto& /*team*/) {
        const unsigned kept = __ballot_sync(kFullWarp, sample.kept);
        if (kept == 0) return true;
        ParkedSample own{ray, {to_half(panel, 0), to_half(panel, 1)}};
        if (!queue.fits(__popc(kept))) {
          auto& parked = *reinterpret_cast<ParkedSample*>(rows + lane_of_warp() * kRowBytes);
          __syncwarp();  // the warp loaded the features stored there collectively
          parked = own;
          flush();
          own = parked;
          ray = own.ray;
          clear_row(rows);
        }
        queue.push(kept, own.geometry, direction, degree, sample.weight, ray.number);
        ray.result.opacity += sample.weight;
        ray.result.depth += sample.weight * sample.t;
        return true;
      });
  flush();
}

struct CudaImage : CudaBackend {
  // Whether a kernel can march through a field whose hidden layers have at most `width` numbers.
  static bool pyramid_image_fits(const Tensor& like, int64_t width) {
    const Guard guard(like);
    const int padded = padded_field_width(static_cast<int>(width));
    const Network density = field_network(padded, 2), color = field_network(padded, kMaxFieldLayers);
    return plan_image(density, color, shared_memory_limit()).warps > 0;
  }

  static void render(const PyramidInputs& field, const NetworkInputs& color, int degree, const CameraView& camera,
                     const ImagePointers& out, const Tensor& like) {
    const int padded = padded_field_width(std::max(field.density.width, color.width));
    HalfScene scene = field.scene<torch::headeronly::Half>();
    scene.density = field_network(padded, 2, scene.density);
    const Network color_network = field_network(padded, color.view.layers, color.view);
    const int across = static_cast<int>((camera.width + kSquare - 1) / kSquare),
              down = static_cast<int>((camera.height + kSquare - 1) / kSquare);
    const int limit = shared_memory_limit();
    const MarchPlan plan = plan_image(scene.density, color_network, limit);
    STD_TORCH_CHECK(plan.warps > 0, "render_pyramid_image: one warp takes ",
                    scene.density.staged_bytes() + kWarpRowsBytes + kQueueBytes, " bytes of shared memory; ", limit,
                    " are allowed; voxelfield.rendering.render.render_view needs none");
    const auto run = [&](auto width_constant, auto in_pieces, auto sparse) {
      constexpr int kWidth = decltype(width_constant)::value;
      using Image = PyramidImage<decltype(in_pieces)::value, decltype(sparse)::value>;
      const Image image{camera, out, across, across * down};
      const auto launch_image = [&](const auto& kernel, const uint4* packed) {
        launch_march(kernel, plan, int64_t{across} * down * image.kBatch, image.kBatch, like, scene, color_network,
                     packed, image, degree);
      };
      if (plan.staged) return launch_image(render_pyramid_kernel<kWidth, StagedField<kWidth>, Image>, nullptr);
      static std::once_flag warned;
      warn_of_packed_weights(
          warned, "render_pyramid_image",
          scene.density.staged_bytes() + color_network.staged_bytes() + kMarchWarps * (kWarpRowsBytes + kQueueBytes),
          limit);
      const Tensor packed = pack_weights(color_network, like, false);
      launch_image(render_pyramid_kernel<kWidth, PackedField<kWidth>, Image>,
                   reinterpret_cast<const uint4*>(packed.const_data_ptr<int32_t>()));
    };
    dispatch_value<64, 128>(padded, [&](auto width_constant) {
      dispatch_scene(field.in_pieces(), field.sparse(),
                     [&](auto in_pieces, auto sparse) { run(width_constant, in_pieces, sparse); });
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { PyramidImageOps<CudaImage>::implement(m); }

}  // namespace voxelfield
