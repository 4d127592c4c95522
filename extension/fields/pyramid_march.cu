// The visible samples of rays through a pyramid, on CUDA: marched and selected in one kernel, then packed.
#include "fields/pyramid_inputs.cuh"
#include "rays/march_ops.h"
#include "rays/packing.cuh"

namespace voxelfield {
namespace {

// Minimum number of rays per warp. With fewer, too many threads are idle at the end, when no rays are left to start.
constexpr int kRaysPerWarp = 24;

// Rays in memory, with a row of slots for each ray.
template <bool InPieces, bool Sparse>
struct ListedRays {
  static constexpr bool kInPieces = InPieces;
  static constexpr bool kSparse = Sparse;
  static constexpr bool kWorldDistances = false;
  // Four threads share a ray: a training step has about as many rays as the device has threads, and some of them are
  // many times as long as most.
  static constexpr int kLanes = 4;
  static constexpr int kBatch = 8;
  static constexpr int kMostIdle = 5;
  RayBatch batch;
  float* slots;  // (R, max_samples_per_ray)
  int max_samples_per_ray;
  int32_t* counts;
  unsigned long long* sums;  // for each part, the number of samples of its rays
  int64_t part_length;

  struct Result {
    int32_t count = 0;
  };

  __device__ __forceinline__ int count() const { return static_cast<int>(batch.count); }
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
    march_visible_kernel(const __grid_constant__ PyramidScene scene, const __grid_constant__ Rays rays,
                         int* __restrict__ next_ray) {
  extern __shared__ __align__(16) unsigned char shared[];
  const StagedField<Width> density(scene.density, shared_address(shared), nullptr);
  density.stage(scene.density);
  __syncthreads();
  unsigned char* rows = shared + scene.density.staged_bytes() + threadIdx.x / kWarp * kWarpRowsBytes;
  march_pyramid<Width, 1>(scene, density, rays, next_ray, rows,
                          [&](const PyramidSample& sample, const Panel<2>&, const float*, auto& ray, const auto& team) {
                            const unsigned kept = team.own(__ballot_sync(kFullWarp, sample.kept));
                            int& count = ray.result.count;
                            const int place = count + __popc(kept & ((1u << team.seat) - 1u));
                            if (sample.kept && place < rays.max_samples_per_ray) {
                              rays.slots[static_cast<int64_t>(ray.number) * rays.max_samples_per_ray + place] =
                                  sample.t;
                            }
                            count = min(count + __popc(kept), rays.max_samples_per_ray);
                            return count < rays.max_samples_per_ray;
                          });
}

// Small blocks finish independently, but each needs its own copy of the weights. This chooses the smallest block size
// that still fills a multiprocessor.
template <typename Kernel>
MarchPlan plan_visible(const Network& density, Kernel* kernel) {
  const int limit = shared_memory_limit();
  MarchPlan best{};
  int most_resident = 0;
  for (const int warps : {4, 8, kMarchWarps}) {
    const MarchPlan plan = plan_march(density.staged_bytes(), kWarpRowsBytes, warps, limit);
    if (plan.warps == 0) continue;
    const int resident = plan.warps * resident_blocks(kernel, plan.warps * kWarp, plan.shared);
    if (resident > most_resident) {
      best = plan;
      most_resident = resident;
    }
  }
  STD_TORCH_CHECK(best.warps > 0, "march_visible: one warp takes ", density.staged_bytes() + kWarpRowsBytes,
                  " bytes of shared memory; ", limit, " are allowed");
  return best;
}

TensorTuple<3> march_to_slots(const Tensor& origins, const Tensor& directions, const Tensor& near, const Tensor& far,
                              const Tensor& offset, const Tensor& occupied, std::vector<int64_t> resolution,
                              const Tensor& aabb_occupancy, std::vector<Tensor> levels,
                              std::vector<OptionalTensor> blocks, const Tensor& aabb,
                              std::vector<Tensor> density_weights, double step, double density_initial,
                              double min_transmittance, double min_weight, int64_t max_samples_per_ray,
                              std::vector<double> boxes) {
  const RayInputs in{origins, directions, near, far, offset};
  const CellInputs cells{occupied, resolution, aabb_occupancy, origins};
  const CudaBackend::Guard guard(origins);
  const PyramidInputs field{cells, levels, blocks, aabb, density_weights, origins};
  const int padded = padded_field_width(field.density.width);
  const PyramidScene scene = field.scene(padded, step, density_initial, min_transmittance, min_weight, boxes);
  const RayBatch batch = in.batch(step);
  STD_TORCH_CHECK(batch.count <= kMostMarchedRays, "origins must be at most 2^30 rays, got ", batch.count);
  STD_TORCH_CHECK(max_samples_per_ray >= 1 && max_samples_per_ray <= 0x7fffffff,
                  "max_samples_per_ray must be 1 to 2^31 - 1, got ", max_samples_per_ray);
  const SegmentParts parts{batch.count, 0};
  Tensor slots = new_empty(in.origins, {batch.count, max_samples_per_ray}, ScalarType::Float);
  Tensor counts = new_empty(in.origins, {batch.count}, ScalarType::Int);
  Tensor sums = new_zeros(in.origins, {parts.count}, ScalarType::Long);
  if (batch.count == 0) return {slots, counts, sums};
  const auto march = [&](auto width, auto in_pieces, auto sparse) {
    using Rays = ListedRays<decltype(in_pieces)::value, decltype(sparse)::value>;
    const Rays rays{batch,
                    data_of(slots),
                    static_cast<int>(max_samples_per_ray),
                    data_of(counts),
                    reinterpret_cast<unsigned long long*>(sums.mutable_data_ptr<int64_t>()),
                    parts.length};
    const auto kernel = march_visible_kernel<decltype(width)::value, Rays>;
    const MarchPlan plan = plan_visible(scene.density, kernel);
    launch_march(kernel, plan, batch.count, kRaysPerWarp, origins, scene, rays);
  };
  dispatch_value<64, 128>(padded, [&](auto width) {
    dispatch_scene(!boxes.empty(), field.sparse(),
                   [&](auto in_pieces, auto sparse) { march(width, in_pieces, sparse); });
  });
  return {slots, counts, sums};
}

}  // namespace

// pack_slots is compiled here because, in the same file, it changes the code generated for other kernels of rays/.
STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("march_to_slots", TORCH_BOX(&march_to_slots));
  m.impl("pack_slots", TORCH_BOX(&MarchOps<CudaPacking>::pack_slots));
}

}  // namespace voxelfield
