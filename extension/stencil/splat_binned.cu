// Splatting by bins on CUDA.
#include "common/backend.cuh"
#include "stencil/splat_coarse.cuh"
#include "stencil/splat_methods.cuh"

namespace voxelfield {

// Blocks for the pieces of split bins, of which there usually are none.
constexpr int kSplitBlocks = 128;
// Blocks that clear the sums of coarse levels, beside those that count entries.
constexpr int kClearingBlocks = 256;

template <typename scalar_t>
void splat_binned(const SortedBins& binned, const SplatInput<scalar_t>& input) {
  const BinnedGrid& grid = binned.grid;
  const CoarseLevels& coarse = binned.coarse;
  const int32_t bins = grid.bins.count;
  const int64_t n = input.n, most = 8 * n;
  const int64_t split_pieces = PieceList::max_split_pieces(most, bins, kBinPiece);
  const int64_t coarse_pieces = coarse.count > 0 ? bins + most / kCoarsePiece : 0;
  const int split_blocks = split_pieces > 0 ? kSplitBlocks : 0;
  Tensor slot_sums = new_empty(input.tensor, {split_pieces * grid.size() * kBinWidth}, ScalarType::Float);
  float* slots = slot_sums.mutable_data_ptr<float>();

  // One allocation, of which counters and counts are zeroed.
  const int64_t ints = kCounterInts + int64_t{3} * bins + 2 * (split_pieces + coarse_pieces) + most;
  Tensor scratch = new_empty(input.tensor, {ints}, ScalarType::Int);
  auto* counters = reinterpret_cast<EntryCounters*>(scratch.mutable_data_ptr<int32_t>());
  int32_t* count = scratch.mutable_data_ptr<int32_t>() + kCounterInts;
  int32_t* entries = count + bins;
  // Pairs of numbers begin at even ones.
  auto* segments = reinterpret_cast<Segment*>(entries + most + bins % 2);
  auto* split = reinterpret_cast<Piece*>(segments + bins);
  Piece* all = coarse_pieces > 0 ? split + split_pieces : nullptr;

  const cudaStream_t stream = CudaBackend::stream();
  const auto blocks = CudaBackend::blocks;
  check_cuda(cudaMemsetAsync(counters, 0, (kCounterInts + bins) * sizeof(int32_t), stream));
  const int clearing_blocks = coarse.count > 0 ? kClearingBlocks : 0;
  list_bin_entries<false><<<blocks(n, kThreads) + clearing_blocks, kThreads, 0, stream>>>(
      grid.bins, input.points, count, nullptr, n, coarse, clearing_blocks);
  reserve_segments<<<blocks(bins, kThreads), kThreads, 0, stream>>>(count, segments, counters, bins,
                                                                    PieceList::of_split_tiles(split, kBinPiece),
                                                                    PieceList::of_all_tiles(all, kCoarsePiece));
  list_bin_entries<true>
      <<<blocks(n, kThreads), kThreads, 0, stream>>>(grid.bins, input.points, count, entries, n, coarse, 0);
  if (coarse.count > 0) {
    const auto kernel = splat_coarse<scalar_t>;
    const int shared = coarse.shared_bytes(sizeof(scalar_t));
    allow_shared_memory(kernel, shared);
    // A piece for each bin is the usual case.
    kernel<<<bins, kCoarseThreads, shared, stream>>>(coarse, grid.bins, input.values, input.points, segments, all,
                                                     counters, entries);
  }
  const auto kernel = splat_bins<scalar_t>;
  allow_shared_memory(kernel, kBinShared);
  kernel<<<bins + split_blocks, kBinThreads, kBinShared, stream>>>(grid, input.values, input.points, segments, split,
                                                                   counters, entries, slots, split_blocks);
  if (split_blocks > 0) {
    join_bin_pieces<scalar_t><<<split_blocks, kBinThreads, 0, stream>>>(grid, segments, split, counters, slots);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template void splat_binned<float>(const SortedBins&, const SplatInput<float>&);
template void splat_binned<torch::headeronly::Half>(const SortedBins&, const SplatInput<torch::headeronly::Half>&);
template void splat_binned<torch::headeronly::BFloat16>(const SortedBins&,
                                                        const SplatInput<torch::headeronly::BFloat16>&);

}  // namespace voxelfield
