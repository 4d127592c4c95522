// The visible samples of rays through a pyramid, on CUDA: marched and selected in one kernel, then packed.
#include "fields/pyramid_launch.cuh"
#include "rays/march_ops.h"
#include "rays/packing.cuh"

namespace voxelfield {
namespace {

// Minimum number of rays per warp. With more, a few thousand rays would not occupy the whole device.
constexpr int kRaysPerWarp = 2;

// Rays in memory, with a row of slots for each ray.
template <bool InPieces, bool Sparse>
struct ListedRays {
  static constexpr bool kInPieces = InPieces;
  static constexpr bool kSparse = Sparse;
  static constexpr bool kWorldDistances = false;
  // Rays through nested boxes have tens of samples, and some have hundreds. Most rays past a single object have few, or
  // none. With more threads for each ray, fewer rays are begun for whose samples there is no room, and the last rays
  // end sooner, but more samples are evaluated past the end of a ray.
  static constexpr int kLanes = InPieces ? kWarp : 8;
  static constexpr int kBatch = InPieces ? 1 : 4;
  static constexpr int kMaxIdle = kLanes - 1;
  RayBatch batch;
  float* slots;    // (R, max_samples_per_ray)
  float* lengths;  // the same, or null
  Roulette roulette;
  int max_samples_per_ray;
  int32_t* counts;
  unsigned long long* sums;  // for each part, the number of samples of its rays
  int64_t part_length;
  unsigned long long* total;     // the number of samples so far
  unsigned long long max_total;  // no rays are begun once `total` exceeds this

  struct Result {
    int32_t count = 0;
  };

  __device__ __forceinline__ int count() const { return static_cast<int>(batch.count); }
  __device__ __forceinline__ bool enough() const {
    return *static_cast<volatile unsigned long long*>(total) > max_total;
  }
  __device__ __forceinline__ int locate(int number) const { return number; }

  __device__ __forceinline__ Ray operator[](int ray) const { return Ray::copy(batch[ray]); }

  __device__ __forceinline__ void begin(int /*ray*/) const {}

  __device__ __forceinline__ void end(int ray, const Result& result) const {
    counts[ray] = result.count;
    if (result.count > 0) atomicAdd(sums + ray / part_length, static_cast<unsigned long long>(result.count));
  }
};

template <int Width, typename Rays>
__global__ void __launch_bounds__(kMarchThreads, 1)
    march_visible_kernel(const __grid_constant__ HalfScene scene, const __grid_constant__ Rays rays,
                         int* __restrict__ next_ray) {
  extern __shared__ __align__(16) unsigned char shared[];
  const StagedField<Width> density(scene.density, shared_address(shared), nullptr);
  density.stage(scene.density);
  __syncthreads();
  unsigned char* rows = shared + scene.density.staged_bytes() + threadIdx.x / kWarp * kWarpRowsBytes;
  march_pyramid<Width, 1>(scene, density, rays, next_ray, rows,
                          [&](const PyramidSample& sample, const Panel<2>&, const float*, auto& ray, const auto& team) {
                            float stretch = sample.kept ? 1.0f : 0.0f;
                            if (sample.kept && rays.lengths != nullptr) {
                              stretch = rays.roulette.stretch(sample, chance_of(ray.number, sample.t));
                            }
                            const unsigned kept = team.own(__ballot_sync(kFullWarp, stretch > 0.0f));
                            int& count = ray.result.count;
                            const int place = count + __popc(kept & ((1u << team.seat) - 1u));
                            if (stretch > 0.0f && place < rays.max_samples_per_ray) {
                              const int64_t slot = static_cast<int64_t>(ray.number) * rays.max_samples_per_ray + place;
                              rays.slots[slot] = sample.t;
                              if (rays.lengths != nullptr) rays.lengths[slot] = stretch * scene.step;
                            }
                            const int more = min(__popc(kept), rays.max_samples_per_ray - count);
                            count += more;
                            const int found = group_sum<kWarp>(team.seat == 0 ? more : 0);
                            if (lane_of_warp() == 0 && found > 0) {
                              atomicAdd(rays.total, static_cast<unsigned long long>(found));
                            }
                            return count < rays.max_samples_per_ray;
                          });
}

// Small blocks finish independently, but each needs its own copy of the weights. This chooses the smallest block size
// that still fills a multiprocessor.
template <typename Kernel>
MarchPlan plan_visible(const Network& density, Kernel* kernel) {
  const int limit = shared_memory_limit();
  MarchPlan best{};
  int max_resident = 0;
  for (const int warps : {4, 8, kMarchWarps}) {
    const MarchPlan plan = plan_march(density.staged_bytes(), kWarpRowsBytes, warps, limit);
    if (plan.warps == 0) continue;
    const int resident = plan.warps * resident_blocks(kernel, plan.warps * kWarp, plan.shared);
    if (resident > max_resident) {
      best = plan;
      max_resident = resident;
    }
  }
  STD_TORCH_CHECK(best.warps > 0, "march_visible: one warp takes ", density.staged_bytes() + kWarpRowsBytes,
                  " bytes of shared memory; ", limit, " are allowed");
  return best;
}

struct CudaMarch : CudaBackend {
  static void march(const PyramidInputs& field, const RayBatch& batch, const SampleSlots& out, const Tensor& like) {
    const int padded = padded_field_width(field.density.width);
    HalfScene scene = field.scene<torch::headeronly::Half>();
    scene.density = field_network(padded, 2, scene.density);
    Tensor total = new_zeros(like, {1}, ScalarType::Long);
    const auto run = [&](auto width, auto in_pieces, auto sparse) {
      using Rays = ListedRays<decltype(in_pieces)::value, decltype(sparse)::value>;
      const Rays rays{batch,
                      out.distances,
                      out.lengths,
                      out.roulette,
                      out.max_samples_per_ray,
                      out.counts,
                      reinterpret_cast<unsigned long long*>(out.sums),
                      out.parts.length,
                      reinterpret_cast<unsigned long long*>(total.mutable_data_ptr<int64_t>()),
                      static_cast<unsigned long long>(out.max_total_samples)};
      const auto kernel = march_visible_kernel<decltype(width)::value, Rays>;
      const MarchPlan plan = plan_visible(scene.density, kernel);
      launch_march(kernel, plan, batch.count, kRaysPerWarp, like, scene, rays);
    };
    dispatch_value<64, 128>(padded, [&](auto width) {
      dispatch_scene(field.in_pieces(), field.sparse(),
                     [&](auto in_pieces, auto sparse) { run(width, in_pieces, sparse); });
    });
  }
};

}  // namespace

// pack_slots is compiled here because, in the same file, it changes the code generated for other kernels of rays/.
STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  MarchVisibleOps<CudaMarch>::implement(m);
  m.impl("pack_slots", TORCH_BOX(&MarchOps<CudaPacking>::pack_slots));
}

}  // namespace voxelfield
