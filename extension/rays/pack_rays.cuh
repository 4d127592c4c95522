// The second pass of packing on CUDA: a block packs a part, whose first row follows from the sums of all parts.
#pragma once

#include "common/backend.cuh"
#include "common/block_sum.cuh"
#include "rays/packing.h"

namespace voxelfield {

// The rows behind the last ray's are cleared by all blocks; there are more blocks than parts if that pays.
constexpr int64_t kTailRows = 4096;  // for each block
constexpr int64_t kMaxTailBlocks = 1024;

// The samples of all parts before a block's own, and of all parts.
struct PartSums {
  int64_t before, total;
};

template <int Threads>
__device__ __forceinline__ PartSums sum_parts(const Packing& packing, int64_t part) {
  __shared__ int64_t scratch[2][Threads / kWarp];
  PartSums sums{0, 0};
  const int64_t parts = packing.parts.parts();
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < parts; i += Threads) {
    const int64_t sum = packing.sum(i);
    sums.total += sum;
    if (i < part) sums.before += sum;
  }
  sums.before = block_sum<Threads>(sums.before, scratch[0]);
  sums.total = block_sum<Threads>(sums.total, scratch[1]);
  return sums;
}

// The rays that fit, counted from the first, and their rows.
struct KeptRays {
  int64_t rays, rows;
};

// Finds the rays that fit, where not all do: the last of them lies in the first part that does not fit whole.
template <int Threads>
__device__ KeptRays find_kept(const Packing& packing) {
  __shared__ int64_t scratch[Threads / kWarp];
  __shared__ int64_t full_part, rows;
  __shared__ KeptRays kept;
  if (threadIdx.x == 0) {
    full_part = rows = 0;
    kept = {0, 0};  // the result if counts do not add up to their sums
  }
  const int64_t parts = packing.parts.parts();
  int64_t before = 0;
  for (int64_t first = 0; first < parts; first += Threads) {
    const int64_t i = first + threadIdx.x;
    const int64_t own = i < parts ? packing.sum(i) : 0;
    const int64_t through = before + block_inclusive_sum<Threads>(own, scratch);
    if (through - own <= packing.capacity && packing.capacity < through) {
      full_part = i;
      rows = through - own;
    }
    if (__syncthreads_or(through > packing.capacity)) break;
    if (threadIdx.x == Threads - 1) rows = through;
    __syncthreads();
    before = rows;
  }
  const int64_t end = packing.parts.end(full_part) >> packing.parts.segments_shift;
  int64_t ray = packing.parts.begin(full_part) >> packing.parts.segments_shift;
  before = rows;
  for (; ray < end; ray += Threads) {
    const int64_t i = ray + threadIdx.x;
    int64_t own = 0;
    for (int64_t s = i << packing.parts.segments_shift; i < end && s < (i + 1) << packing.parts.segments_shift; ++s) {
      own += packing.count(s);
    }
    const int64_t through = before + block_inclusive_sum<Threads>(own, scratch);
    if (through - own <= packing.capacity && packing.capacity < through) kept = {i, through - own};
    if (__syncthreads_or(through > packing.capacity)) break;
    if (threadIdx.x == Threads - 1) rows = through;
    __syncthreads();
    before = rows;
  }
  return kept;
}

constexpr int kGroupRows = 4;  // consecutive rows, which a thread writes in accesses of 16 bytes

// Writes the samples of a group that are known and whose rows, counted from `first`, lie in [begin, end).
__device__ __forceinline__ void write_group(const SamplePointers& out, int64_t first, int64_t begin, int64_t end,
                                            const SampleRow (&rows)[kGroupRows]) {
  bool whole = begin <= first && first + kGroupRows <= end;
#pragma unroll
  for (int i = 0; i < kGroupRows; ++i) whole = whole && rows[i].known;
  if (!whole) {
#pragma unroll
    for (int i = 0; i < kGroupRows; ++i) {
      if (begin <= first + i && first + i < end) out.write(first + i, rows[i]);
    }
    return;
  }
  float4* positions = reinterpret_cast<float4*>(out.positions + 3 * first);
  const float (&a)[3] = rows[0].position, (&b)[3] = rows[1].position, (&c)[3] = rows[2].position,
              (&d)[3] = rows[3].position;
  positions[0] = make_float4(a[0], a[1], a[2], b[0]);
  positions[1] = make_float4(b[1], b[2], c[0], c[1]);
  positions[2] = make_float4(c[2], d[0], d[1], d[2]);
  *reinterpret_cast<float4*>(out.t + first) = make_float4(rows[0].t, rows[1].t, rows[2].t, rows[3].t);
  *reinterpret_cast<float4*>(out.dt + first) = make_float4(rows[0].dt, rows[1].dt, rows[2].dt, rows[3].dt);
  longlong2* ray_index = reinterpret_cast<longlong2*>(out.ray_index + first);
  ray_index[0] = make_longlong2(rows[0].ray, rows[1].ray);
  ray_index[1] = make_longlong2(rows[2].ray, rows[3].ray);
}

template <int Threads, typename Samples>
static __global__ void __launch_bounds__(Threads) place_segments(Packing packing, Samples samples) {
  constexpr int kChunk = Threads;  // segments at a time
  __shared__ typename Samples::Staged staged[kChunk];
  __shared__ unsigned first_of[kChunk + 1];
  __shared__ unsigned scratch[Threads / kWarp];
  const int64_t part = blockIdx.x, rays = packing.parts.rays();
  const PartSums sums = sum_parts<Threads>(packing, part);
  const bool fits = sums.total <= packing.capacity;
  const KeptRays kept = fits ? KeptRays{rays, sums.total} : find_kept<Threads>(packing);
  if (part == 0 && threadIdx.x == 0) {
    *packing.rays_kept = kept.rays;
    packing.ray_offsets[0] = 0;
  }

  int64_t before = sums.before;
  const int64_t last = part < packing.parts.parts() ? packing.parts.end(part) : 0;
  for (int64_t chunk = packing.parts.begin(part); chunk < last; chunk += kChunk) {
    const int64_t own = chunk + threadIdx.x;
    const bool owns = own < last;
    const unsigned count = owns ? packing.count(own) : 0;
    if (count > 0) staged[threadIdx.x] = samples.stage(own);
    const unsigned through = block_inclusive_sum<Threads>(count, scratch);
    first_of[threadIdx.x + 1] = through;
    if (threadIdx.x == 0) first_of[0] = 0;
    __syncthreads();
    if (owns && ((own + 1) >> packing.parts.segments_shift) << packing.parts.segments_shift == own + 1) {
      const int64_t offset = before + through;
      packing.ray_offsets[(own + 1) >> packing.parts.segments_shift] = offset < kept.rows ? offset : kept.rows;
    }
    const int64_t after = before + first_of[kChunk];
    const int64_t end = after < kept.rows ? after : kept.rows;
    for (int64_t row = (before / kGroupRows + threadIdx.x) * kGroupRows; row < end; row += Threads * kGroupRows) {
      const unsigned from = row > before ? static_cast<unsigned>(row - before) : 0;
      int segment = 0;
#pragma unroll
      for (int step = kChunk / 2; step > 0; step /= 2) {
        if (first_of[segment + step] <= from) segment += step;
      }
      SampleRow rows[kGroupRows];
#pragma unroll
      for (int i = 0; i < kGroupRows; ++i) {
        rows[i].known = false;
        if (row + i < before || row + i >= end) continue;
        const unsigned local = static_cast<unsigned>(row + i - before);
        while (segment < kChunk - 1 && first_of[segment + 1] <= local) ++segment;
        rows[i] = samples.sample(staged[segment], chunk + segment, static_cast<int32_t>(local - first_of[segment]));
      }
      write_group(samples.out, row, before, end, rows);
    }
    if (count > 0 && before + through <= end) {
      samples.write_rest(before + through - count, own, static_cast<int32_t>(count));
    }
    before = after;
    __syncthreads();
  }

  const SampleRow none = no_sample(rays);
  const SampleRow nothing[kGroupRows] = {none, none, none, none};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * Threads * kGroupRows;
  for (int64_t row = (kept.rows / kGroupRows + part * Threads + threadIdx.x) * kGroupRows; row < packing.capacity;
       row += stride) {
    write_group(samples.out, row, kept.rows, packing.capacity, nothing);
  }
}

template <typename Samples>
void launch_place_segments(const Packing& packing, const Samples& samples, cudaStream_t stream) {
  const int64_t tail = (packing.capacity + kTailRows - 1) / kTailRows;
  const int64_t tail_blocks = tail < kMaxTailBlocks ? tail : kMaxTailBlocks;
  const int64_t parts = packing.parts.parts();
  const unsigned blocks = static_cast<unsigned>(parts > tail_blocks ? parts : tail_blocks);
  place_segments<kThreads><<<blocks, kThreads, 0, stream>>>(packing, samples);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace voxelfield
