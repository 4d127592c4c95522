// Interpolation by separable kernels on CUDA. Neighbouring threads share a point: with four vertices along each axis,
// one thread for each of them along the last axis, so that what a warp reads or adds to lies side by side in memory;
// and one for each vector of channels, unless these lie in a plane each. Values along fewer than three axes have too
// few vertices for that.
#include "common/backend.cuh"
#include "stencil/separable_ops.h"

namespace voxelfield {
namespace {

// The threads that share a point: kSplit vertices along the last axis, times lanes, a power of two.
template <int K>
constexpr int kSplit = K == 4 ? 4 : 1;
template <int D, int K>
constexpr int kGatherSplit = D == 3 ? kSplit<K> : 1;
constexpr int kMaxLanes = 8;

template <int Split>
struct Team {
  int64_t point, grid;
  int tap, lane;
  bool active;

  template <typename Job>
  __device__ __forceinline__ Team(const Job& job, int lanes) {
    const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
    const int size = Split * lanes, place = static_cast<int>(thread) & (size - 1);
    // Threads without a point take part in exchanges, with the last point.
    const int64_t own = thread / size;
    active = own < job.count;
    point = active ? own : job.count - 1;
    grid = job.grid_of(point);
    tap = place / lanes;
    lane = place & (lanes - 1);
  }

  template <typename T, int D, int K>
  __device__ __forceinline__ auto taps(const SeparableLocator<T, D, K>& locator, const T* points) const {
    const auto all = locator(points, point, grid);
    if constexpr (Split == 1) {
      return all;
    } else {
      return all.with_last(tap);
    }
  }
};

// Returns to all threads of a point the sum over those of its vertices along the last axis.
template <int Split, int Width, typename T>
__device__ __forceinline__ void sum_taps(Vector<T, Width>& value, int lanes) {
#pragma unroll
  for (int step = 1; step < Split; step *= 2) {
#pragma unroll
    for (int i = 0; i < Width; ++i) value.lane[i] += __shfl_xor_sync(kFullWarp, value.lane[i], step * lanes);
  }
}

template <int Width, typename T>
struct LoadWide {
  const T* data;

  __device__ __forceinline__ Vector<T, Width> operator()(int64_t at) const { return load_constant<Width>(data + at); }
};

template <int kSets, int Width, typename T, int D, int K>
__global__ void __launch_bounds__(kThreads)
    gather_separable_kernel(const __grid_constant__ SeparableJob<T, D, K> job, const T* __restrict__ data,
                            const T* __restrict__ points, T* __restrict__ out, int lanes) {
  constexpr int kOrder = kSets > 1, kThreadsOfPoint = kGatherSplit<D, K>;
  const Team<kThreadsOfPoint> team(job, lanes);
  const auto taps = team.taps(job.locator, points);
  T* const row = out + job.layout(team.point, team.grid);
  // All threads of a warp do the same number of steps.
  for (int64_t first = 0; first < job.channels; first += lanes * Width) {
    const int64_t c = first + team.lane * Width;
    const bool exists = c < job.channels;
    Jet<Vector<T, Width>, D> jet{};
    if (exists && !taps.empty) {
      jet = interpolate<kOrder, Vector<T, Width>>(taps, LoadWide<Width, T>{data + c * job.channel_stride});
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      Vector<T, Width>& value = value_of(jet, set);
      sum_taps<kThreadsOfPoint>(value, lanes);
      // The threads take turns to store.
      if (team.active && exists && team.tap == set % kThreadsOfPoint) {
        const int at = set_of(job.locator, set);
        store_global(row + at * job.layout.set_stride + c * job.layout.channel_stride, value);
      }
    }
  }
}

template <int kSets, int Width, typename T, int D, int K>
__global__ void __launch_bounds__(kThreads)
    point_gradient_separable_kernel(const __grid_constant__ SeparableJob<T, D, K> job, const T* __restrict__ values,
                                    const T* __restrict__ data, const T* __restrict__ points, T* __restrict__ out,
                                    int lanes) {
  const Team<kSplit<K>> team(job, lanes);
  const auto taps = team.taps(job.locator, points);
  const T* const row = values + job.layout(team.point, team.grid);
  T gradient[D] = {};  // in the order of the axes
  for (int64_t c = team.lane * Width; c < job.channels && !taps.empty; c += lanes * Width) {
    const auto jet =
        interpolate<(kSets > 1 ? 2 : 1), Vector<T, Width>>(taps, LoadWide<Width, T>{data + c * job.channel_stride});
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int at = set_of(job.locator, set);
      const auto value = LoadWide<Width, T>{row}(at * job.layout.set_stride + c * job.layout.channel_stride);
#pragma unroll
      for (int a = 0; a < D; ++a) {
#pragma unroll
        for (int i = 0; i < Width; ++i) gradient[a] += value.lane[i] * slope_of(jet, set, a).lane[i];
      }
    }
  }
#pragma unroll
  for (int a = 0; a < D; ++a) {
    for (int step = 1; step < kSplit<K> * lanes; step *= 2) {
      gradient[a] += __shfl_xor_sync(kFullWarp, gradient[a], step);
    }
  }
  if (!team.active || team.tap > 0 || team.lane > 0) return;
#pragma unroll
  for (int a = 0; a < D; ++a) out[D * team.point + job.locator.coordinate(a)] = gradient[a];
}

// Adds to sums, or if there is a scale to whole numbers, of which so many make one: these add up to the same in any
// order.
template <int Width, typename T>
struct AddAtomically {
  void* sums;
  int64_t channel;  // offset of the first channel
  double scale;     // 0 if there is none

  __device__ __forceinline__ void operator()(int64_t at, const Vector<T, Width>& value) const {
    if (Width == 1 && scale != 0) {
      const long long whole = __double2ll_rn(static_cast<double>(value.lane[0]) * scale);
      atomicAdd(static_cast<unsigned long long*>(sums) + at + channel, static_cast<unsigned long long>(whole));
      return;
    }
    atomic_add<Width>(static_cast<T*>(sums) + at + channel, value);
  }
};

template <int kSets, int Width, typename T, int D, int K>
__global__ void __launch_bounds__(kThreads)
    splat_separable_kernel(const __grid_constant__ SeparableJob<T, D, K> job, const T* __restrict__ values,
                           const T* __restrict__ points, void* __restrict__ sums, const double* __restrict__ scale,
                           int lanes) {
  const Team<kSplit<K>> team(job, lanes);
  if (!team.active) return;
  const auto taps = team.taps(job.locator, points);
  if (taps.empty) return;
  const double per_one = scale == nullptr ? 0 : *scale;
  const T* const row = values + job.layout(team.point, team.grid);
  for (int64_t c = team.lane * Width; c < job.channels; c += lanes * Width) {
    Vector<T, Width> given[kSets];  // in the order of the axes
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int at = set_of(job.locator, set);
      given[set] = LoadWide<Width, T>{row}(at * job.layout.set_stride + c * job.layout.channel_stride);
    }
    const AddAtomically<Width, T> add{sums, c * job.channel_stride, per_one};
    distribute<kSets, 0, D, K, kSplit<K> == 1 ? K : 1>(taps, taps.origin, given, add);
  }
}

struct Cuda : CudaBackend {
  static constexpr bool kAddsInAnyOrder = true;

  template <bool kGradient, int kSets, typename T, int D, int K>
  static void read(const SeparableJob<T, D, K>& job, const T* values, const T* data, const T* points, T* out) {
    if constexpr (kGradient) {
      with_width<kSets, 1>(job, data, values, [&](auto width) {
        start<kSplit<K>>(point_gradient_separable_kernel<kSets, width.value, T, D, K>, job, width.value, values, data,
                         points, out);
      });
    } else {
      with_width<kSets, 4, 2, 1>(job, data, out, [&](auto width) {
        start<kGatherSplit<D, K>>(gather_separable_kernel<kSets, width.value, T, D, K>, job, width.value, data, points,
                                  out);
      });
    }
  }

  template <int kSets, typename T, int D, int K>
  static void splat(const SeparableJob<T, D, K>& job, const T* values, const T* points, void* sums,
                    const double* scale) {
    with_width<kSets, 4, 1>(
        job, static_cast<const T*>(sums), values,
        [&](auto width) {
          start<kSplit<K>>(splat_separable_kernel<kSets, width.value, T, D, K>, job, width.value, values, points, sums,
                           scale);
        },
        scale != nullptr);
  }

 private:
  // Calls f with one of the numbers of channels that a thread handles at once. Derivatives and float64 are compiled for
  // one, and whole numbers are added one by one.
  template <int kSets, int... Widths, typename T, int D, int K, typename F>
  static void with_width(const SeparableJob<T, D, K>& job, const T* vertices, const T* rows, const F& f,
                         bool single = false) {
    if constexpr (kSets > 1 || std::is_same_v<T, double>) {
      f(std::integral_constant<int, 1>{});
    } else {
      const int widest = single || job.channel_stride > 1 ? 1 : 4;
      dispatch_vector_width<Widths...>(vector_width(widest, {job.channels}, vertices, rows), f);
    }
  }

  // One call has up to 2^31 blocks, and the grids of a plane for each channel one thread for each point and vertex.
  template <int Split, typename T, int D, int K, typename... Parameters, typename... Arguments>
  static void start(void (*kernel)(SeparableJob<T, D, K>, Parameters...), const SeparableJob<T, D, K>& job, int width,
                    const Arguments&... arguments) {
    int lanes = 1;
    while (job.channel_stride == 1 && lanes < kMaxLanes && lanes * width < job.channels) lanes *= 2;
    launch(kernel, blocks(job.count, kThreads / (Split * lanes)), kThreads, 0, job, arguments..., lanes);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) { SeparableOps<Cuda>::implement(m); }

}  // namespace voxelfield
