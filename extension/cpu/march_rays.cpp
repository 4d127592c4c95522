// Ray marching on the CPU: rays in parallel.
#include "../march_ops.h"
#include "backend.h"

namespace voxelfield {
namespace {

constexpr int64_t kRaysPerTask = 64;

struct Cpu : CpuBackend {
  static void count_samples(const RayBatch& rays, int64_t* counts) {
    torch::stable::parallel_for(0, rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) counts[ray] = count_on_ray(rays, ray);
    });
  }

  static void place_samples(const RayBatch& rays, const int64_t* ray_offsets, const RaySamplePointers& out) {
    torch::stable::parallel_for(0, rays.count, kRaysPerTask, [&](int64_t begin, int64_t end) {
      for (int64_t ray = begin; ray < end; ++ray) place_on_ray(rays, ray, ray_offsets[ray], ray_offsets[ray + 1], out);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("count_ray_samples", TORCH_BOX(&MarchOps<Cpu>::count_ray_samples));
  m.impl("place_ray_samples", TORCH_BOX(&MarchOps<Cpu>::place_ray_samples));
}

}  // namespace voxelfield
