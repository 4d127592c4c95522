// Lists active tiles on CUDA: a few threads test each tile, and a warp appends all that it found with one atomic.
#include "common/backend.cuh"
#include "optim/active_tiles_ops.h"

namespace voxelfield {
namespace {

// Of the threads of a warp, `lanes` in a row share a tile; a power of two.
__global__ void __launch_bounds__(kThreads)
    active_tiles_kernel(const __grid_constant__ OccupiedCells cells, int lanes, int32_t* __restrict__ ids,
                        int32_t* __restrict__ count) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int first = lane % lanes;
  const int64_t number = thread / lanes;
  int32_t tile[3] = {0, 0, 0};
  bool found = false;
  if (number < cells.tile_total()) {
    cells.tile_of(number, tile);
    const CellRange range = cells.range_of(tile);
    for (int32_t row = first; row < range.rows() && !found; row += lanes) found = cells.any_in_row(range, row);
  }
  const unsigned peers = (lanes == kWarp ? kFullWarp : (1u << lanes) - 1) << (lane - first);
  const unsigned finders = __ballot_sync(kFullWarp, found);
  const bool active = first == 0 && (finders & peers) != 0;
  const unsigned listed = __ballot_sync(kFullWarp, active);
  int32_t place = 0;
  if (lane == 0 && listed != 0) place = atomicAdd(count, __popc(listed));
  place = __shfl_sync(kFullWarp, place, 0);
  if (active) ids[place + __popc(listed & ((1u << lane) - 1))] = tile_id(tile[0], tile[1], tile[2]);
}

struct Cuda : CudaBackend {
  static void active_tiles(const OccupiedCells& cells, int32_t* ids, int32_t* count) {
    constexpr int32_t kRowsPerThread = 16;
    const int32_t middle[3] = {cells.tiles[0] / 2, cells.tiles[1] / 2, cells.tiles[2] / 2};
    const int32_t share = cells.range_of(middle).rows() / kRowsPerThread;
    int lanes = 1;
    while (lanes < kWarp && lanes < share) lanes *= 2;
    check_cuda(cudaMemsetAsync(count, 0, sizeof(int32_t), stream()));
    active_tiles_kernel<<<blocks(cells.tile_total() * lanes, kThreads), kThreads, 0, stream()>>>(cells, lanes, ids,
                                                                                                 count);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("active_blocks_", TORCH_BOX(&ActiveTilesOps<Cuda>::active_tiles_));
}

}  // namespace voxelfield
