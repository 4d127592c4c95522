// The two passes of packing on CUDA. One block of threads counts the segments of a part, and one block packs them. The
// first row of a part follows from the sums of all parts.
#pragma once

#include "common/backend.cuh"
#include "common/sums.cuh"
#include "rays/segments.h"

namespace voxelfield {

template <int Threads, typename Count>
__global__ void __launch_bounds__(Threads)
    count_kernel(SegmentParts parts, int32_t* __restrict__ counts, int64_t* __restrict__ sums, Count count) {
  __shared__ int64_t scratch[Threads / kWarp];
  int64_t sum = 0;
  for (int64_t segment = parts.begin(blockIdx.x) + threadIdx.x; segment < parts.end(blockIdx.x); segment += Threads) {
    const int32_t samples = count(segment);
    counts[segment] = samples;
    sum += samples;
  }
  sum = block_sum<Threads>(sum, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// All blocks clear the rows after those of the last ray. If there are many such rows, more blocks than parts are
// launched.
constexpr int64_t kTailRows = 4096;  // per block
constexpr int64_t kMaxTailBlocks = 1024;

// The number of samples of all parts before this block's part, and of all parts.
struct PartSums {
  int64_t before, total;
};

template <int Threads>
__device__ __forceinline__ PartSums sum_parts(const Packing& packing, int64_t part) {
  __shared__ int64_t scratch[2][Threads / kWarp];
  PartSums sums{0, 0};
  const int64_t parts = packing.parts.count;
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

// The first of several items that does not fit, and the rows of those before it.
struct Overflow {
  int64_t index, rows_before;
};

// Adds size(i) to `rows` for i in [first, end) until the sum exceeds the capacity. Returns the i at which this happens
// and the rows before it, or zeros if it never happens.
template <int Threads, typename Size>
__device__ Overflow find_overflow(int64_t first, int64_t end, int64_t rows, int64_t capacity, const Size& size) {
  __shared__ int64_t scratch[Threads / kWarp], last;
  __shared__ Overflow found;
  if (threadIdx.x == 0) found = {0, 0};
  __syncthreads();
  for (; first < end; first += Threads) {
    const int64_t i = first + threadIdx.x, count = i < end ? size(i) : 0;
    const int64_t through = rows + block_inclusive_sum<Threads>(count, scratch);
    if (through - count <= capacity && capacity < through) found = {i, through - count};
    if (threadIdx.x == Threads - 1) last = through;
    if (__syncthreads_or(through > capacity)) break;
    rows = last;
  }
  return found;
}

// Finds the first ray that does not fit, if not all of them do. It lies in the first part that does not fit completely.
// No ray fits if the counts do not add up to their sums.
template <int Threads>
__device__ Overflow find_overflowing_ray(const Packing& packing) {
  const SegmentParts& parts = packing.parts;
  const Overflow part =
      find_overflow<Threads>(0, parts.count, 0, packing.capacity, [&](int64_t i) { return packing.sum(i); });
  return find_overflow<Threads>(parts.begin(part.index) >> parts.segments_shift,
                                parts.end(part.index) >> parts.segments_shift, part.rows_before, packing.capacity,
                                [&](int64_t ray) { return packing.count_of_ray(ray); });
}

constexpr int kGroupRows = 4;  // consecutive rows that a thread writes in accesses of 16 bytes

// Writes those samples of a group that are known and whose row lies in [begin, end). `first` is the first row of the
// group.
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
__global__ void __launch_bounds__(Threads, 3) place_kernel(Packing packing, Samples samples) {
  constexpr int kChunk = Threads;  // segments per iteration
  __shared__ typename Samples::Staged staged[kChunk];
  __shared__ unsigned first_of[kChunk + 1];
  __shared__ unsigned scratch[Threads / kWarp];
  const int64_t part = blockIdx.x, rays = packing.parts.rays();
  const PartSums sums = sum_parts<Threads>(packing, part);
  const bool fits = sums.total <= packing.capacity;
  const Overflow overflow = fits ? Overflow{rays, sums.total} : find_overflowing_ray<Threads>(packing);
  if (part == 0 && threadIdx.x == 0) {
    *packing.rays_kept = overflow.index;
    packing.ray_offsets[0] = 0;
  }

  int64_t before = sums.before;
  const int64_t last = part < packing.parts.count ? packing.parts.end(part) : 0;
  for (int64_t chunk = packing.parts.begin(part); chunk < last; chunk += kChunk) {
    const int64_t index = chunk + threadIdx.x;
    const bool exists = index < last;
    const unsigned count = exists ? packing.count(index) : 0;
    if (count > 0) staged[threadIdx.x] = samples.stage(index);
    const unsigned through = block_inclusive_sum<Threads>(count, scratch);
    first_of[threadIdx.x + 1] = through;
    if (threadIdx.x == 0) first_of[0] = 0;
    __syncthreads();
    if (exists && ((index + 1) >> packing.parts.segments_shift) << packing.parts.segments_shift == index + 1) {
      const int64_t offset = before + through;
      packing.ray_offsets[(index + 1) >> packing.parts.segments_shift] =
          offset < overflow.rows_before ? offset : overflow.rows_before;
    }
    const int64_t after = before + first_of[kChunk];
    const int64_t end = after < overflow.rows_before ? after : overflow.rows_before;
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
      samples.write_rest(before + through - count, index, static_cast<int32_t>(count));
    }
    before = after;
    __syncthreads();
  }

  const SampleRow none = no_sample(rays);
  const SampleRow nothing[kGroupRows] = {none, none, none, none};
  const int64_t stride = static_cast<int64_t>(gridDim.x) * Threads * kGroupRows;
  for (int64_t row = (overflow.rows_before / kGroupRows + part * Threads + threadIdx.x) * kGroupRows;
       row < packing.capacity; row += stride) {
    write_group(samples.out, row, overflow.rows_before, packing.capacity, nothing);
  }
}

struct CudaPacking : CudaBackend {
  template <typename Count>
  static void count_segments(const SegmentParts& parts, int32_t* counts, int64_t* sums, const Count& count) {
    // Uses one thread per segment of a part, up to 256. Larger blocks would load the device less evenly.
    dispatch_value<64, 128, 256>(parts.length, [&](auto threads) {
      launch(count_kernel<threads.value, Count>, static_cast<unsigned>(parts.count), threads.value, 0, parts, counts,
             sums, count);
    });
  }

  template <typename Samples>
  static void place_segments(const Packing& packing, const Samples& samples) {
    const int64_t tail = std::min((packing.capacity + kTailRows - 1) / kTailRows, kMaxTailBlocks);
    const unsigned count = static_cast<unsigned>(std::max(packing.parts.count, tail));
    launch(place_kernel<kThreads, Samples>, count, kThreads, 0, packing, samples);
  }
};

}  // namespace voxelfield
