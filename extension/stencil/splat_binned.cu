// Splatting by bins on CUDA.
#include "common/launch.cuh"
#include "stencil/splat_coarse.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {

// Blocks for the chunks of split bins, of which there usually are none.
constexpr int kSplitBlocks = 128;
// Blocks that clear the sums of coarse levels, beside those that count entries.
constexpr int kClearingBlocks = 256;

template <typename scalar_t>
void splat_binned(const SortedBins& binned, const SplatInput<scalar_t>& input) {
  const auto launch = [](auto kernel, int64_t blocks, int threads, int shared, const auto&... arguments) {
    allow_shared_memory(kernel, shared);
    CudaBackend::launch(kernel, static_cast<unsigned>(blocks), threads, shared, arguments...);
  };
  const BinnedGrid& grid = binned.grid;
  const CoarseLevels& coarse = binned.coarse;
  const int32_t bins = grid.bins.count;
  const int64_t n = input.at.count;
  const float* points = input.at.points;
  const EntryLists lists(input.tensor, 8 * n, bins, kBinChunk, coarse.count > 0 ? kCoarseChunk : 0);
  const int split_blocks = lists.split_chunks > 0 ? kSplitBlocks : 0;
  Tensor slot_sums = new_empty(input.tensor, {lists.split_chunks * grid.size() * kBinWidth}, ScalarType::Float);
  float* slots = slot_sums.mutable_data_ptr<float>();

  lists.fill([&](auto place) {
    const int clearing_blocks = coarse.count > 0 && !place ? kClearingBlocks : 0;
    launch(list_bin_entries<place.value>, CudaBackend::blocks(n, kThreads) + clearing_blocks, kThreads, 0, grid.bins,
           points, lists.count, lists.entries, n, coarse, clearing_blocks);
  });
  if (coarse.count > 0) {
    // A chunk for each bin is the usual case.
    launch(splat_coarse<scalar_t>, bins, kCoarseThreads, coarse.shared_bytes(sizeof(scalar_t)), coarse, grid.bins,
           input.values, points, lists.lists, lists.all.chunks, lists.counters, lists.entries);
  }
  launch(splat_bins<scalar_t>, bins + split_blocks, kBinThreads, kBinShared, grid, input.values, points, lists.lists,
         lists.split.chunks, lists.counters, lists.entries, slots, split_blocks);
  if (split_blocks > 0) {
    launch(join_bin_chunks<scalar_t>, split_blocks, kBinThreads, 0, grid, lists.lists, lists.split.chunks,
           lists.counters, slots);
  }
}

template void splat_binned<float>(const SortedBins&, const SplatInput<float>&);
template void splat_binned<torch::headeronly::Half>(const SortedBins&, const SplatInput<torch::headeronly::Half>&);
template void splat_binned<torch::headeronly::BFloat16>(const SortedBins&,
                                                        const SplatInput<torch::headeronly::BFloat16>&);

}  // namespace voxelfield
