// Trilinear sampling on CUDA: the three stencil kernels. A thread serves one point and one vector of channels, so the
// threads of a point read (or add to) consecutive addresses of each of its eight vertices.
#include "../stencil_ops.h"
#include "backend.cuh"

namespace voxelfield {
namespace {

// Threads of a block: x over a point's channel vectors, y over points.
struct PointBlock {
  dim3 threads;
  unsigned blocks;

  PointBlock(int64_t points, int64_t vectors) {
    const unsigned x = static_cast<unsigned>(vectors < kThreads ? vectors : kThreads);
    threads = dim3(x, kThreads / x);
    blocks = CudaBackend::blocks(points, threads.y);
  }
};

template <typename scalar_t, int Width, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
__global__ void __launch_bounds__(kThreads)
    gather_kernel(const scalar_t* __restrict__ source, const T* __restrict__ points, const T* __restrict__ directions,
                  scalar_t* __restrict__ out, int64_t n, int64_t channels, Locator locator) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= n) return;
  const Stencil<T> s = locator(points, index);
  const Weights weights(directions, index);
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * Width; c < channels;
       c += static_cast<int64_t>(blockDim.x) * Width) {
    T sum[Width] = {};
    if (!s.empty) {
      Vector<scalar_t, Width> corner[kCorners];
#pragma unroll
      for (int k = 0; k < kCorners; ++k) corner[k] = load<Width>(source + s.offset(k) + c);
#pragma unroll
      for (int k = 0; k < kCorners; ++k) {
        const T weight = weights(s, k);
#pragma unroll
        for (int i = 0; i < Width; ++i) sum[i] += weight * static_cast<T>(corner[k].lane[i]);
      }
    }
    Vector<scalar_t, Width> result;
#pragma unroll
    for (int i = 0; i < Width; ++i) result.lane[i] = static_cast<scalar_t>(sum[i]);
    store<Width>(out + index * channels + c, result);
  }
}

template <typename scalar_t, int Width, typename Weights, typename Locator, typename accumulate_t,
          typename T = opmath_t<scalar_t>>
__global__ void __launch_bounds__(kThreads)
    scatter_kernel(const scalar_t* __restrict__ values, const T* __restrict__ points, const T* __restrict__ directions,
                   accumulate_t* __restrict__ out, int64_t n, int64_t channels, Locator locator) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= n) return;
  const Stencil<T> s = locator(points, index);
  if (s.empty && !Locator::kExclusiveCells) return;
  const Weights weights(directions, index);
  for (int64_t c = static_cast<int64_t>(threadIdx.x) * Width; c < channels;
       c += static_cast<int64_t>(blockDim.x) * Width) {
    const Vector<scalar_t, Width> value = load<Width>(values + index * channels + c);
#pragma unroll
    for (int k = 0; k < kCorners; ++k) {
      const T weight = weights(s, k);
      Vector<accumulate_t, Width> term;
#pragma unroll
      for (int i = 0; i < Width; ++i) {
        term.lane[i] = static_cast<accumulate_t>(s.empty ? T(0) : weight * static_cast<T>(value.lane[i]));
      }
      if constexpr (Locator::kExclusiveCells) {
        store<Width>(out + s.offset(k) + c, term);
      } else {
        atomic_add<Width>(out + s.offset(k) + c, term);
      }
    }
  }
}

// `Lanes` neighbouring threads share a point, split its channels, and sum their three partial results at the end.
template <typename scalar_t, int Width, int Lanes, typename Weights, typename Locator, typename T = opmath_t<scalar_t>>
__global__ void __launch_bounds__(kThreads)
    point_gradient_kernel(const scalar_t* __restrict__ values, const scalar_t* __restrict__ source,
                          const T* __restrict__ points, const T* __restrict__ directions, T* __restrict__ out,
                          int64_t n, int64_t channels, Locator locator) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t index = thread / Lanes;
  const int lane = static_cast<int>(thread % Lanes);
  T gradient[3] = {};
  if (index < n) {
    const Stencil<T> s = locator(points, index);
    const Weights weights(directions, index);
    for (int64_t c = static_cast<int64_t>(lane) * Width; !s.empty && c < channels; c += Lanes * Width) {
      const Vector<scalar_t, Width> value = load<Width>(values + index * channels + c);
#pragma unroll
      for (int k = 0; k < kCorners; ++k) {
        const Vector<scalar_t, Width> corner = load<Width>(source + s.offset(k) + c);
        T product = 0;
#pragma unroll
        for (int i = 0; i < Width; ++i) product += static_cast<T>(value.lane[i]) * static_cast<T>(corner.lane[i]);
#pragma unroll
        for (int axis = 0; axis < 3; ++axis) gradient[axis] += weights.gradient(s, k, axis) * product;
      }
    }
  }
#pragma unroll
  for (int axis = 0; axis < 3; ++axis) {
#pragma unroll
    for (int step = Lanes / 2; step > 0; step /= 2) gradient[axis] += __shfl_xor_sync(kFullWarp, gradient[axis], step);
  }
  if (index < n && lane == 0) {
#pragma unroll
    for (int axis = 0; axis < 3; ++axis) out[3 * index + axis] = gradient[axis];
  }
}

struct Cuda : CudaBackend {
  template <typename scalar_t, typename Weights, typename Locator, typename T>
  static void gather(const scalar_t* source, const T* points, const T* directions, scalar_t* out, int64_t n,
                     int64_t channels, const Locator& locator) {
    dispatch_width<scalar_t>(channels, {source, out}, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const PointBlock block(n, channels / kWidth);
      gather_kernel<scalar_t, kWidth, Weights, Locator>
          <<<block.blocks, block.threads, 0, stream()>>>(source, points, directions, out, n, channels, locator);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename scalar_t, typename Weights, typename T, typename accumulate_t, typename Locator>
  static void scatter(const scalar_t* values, const T* points, const T* directions, accumulate_t* out, int64_t n,
                      int64_t channels, const Locator& locator) {
    // `out` is freshly allocated by the caller, hence aligned.
    dispatch_width<scalar_t>(channels, {values}, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const PointBlock block(n, channels / kWidth);
      scatter_kernel<scalar_t, kWidth, Weights, Locator, accumulate_t>
          <<<block.blocks, block.threads, 0, stream()>>>(values, points, directions, out, n, channels, locator);
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename scalar_t, typename Weights, typename T, typename Locator>
  static void point_gradient(const scalar_t* values, const scalar_t* source, const T* points, const T* directions,
                             T* out, int64_t n, int64_t channels, const Locator& locator) {
    dispatch_width<scalar_t>(channels, {values, source}, [&](auto width) {
      constexpr int kWidth = decltype(width)::value;
      const auto launch = [&](auto lanes) {
        constexpr int kLanes = decltype(lanes)::value;
        point_gradient_kernel<scalar_t, kWidth, kLanes, Weights, Locator>
            <<<blocks(n, kThreads / kLanes), kThreads, 0, stream()>>>(values, source, points, directions, out, n,
                                                                      channels, locator);
      };
      const int64_t vectors = channels / kWidth;
      if (vectors <= 1) {
        launch(std::integral_constant<int, 1>{});
      } else if (vectors <= 8) {
        launch(std::integral_constant<int, 4>{});
      } else {
        launch(std::integral_constant<int, kWarp>{});
      }
    });
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  using Ops = StencilOps<Cuda>;
  m.impl("sample_trilinear", TORCH_BOX(&Ops::sample_trilinear));
  m.impl("splat_trilinear", TORCH_BOX(&Ops::splat_trilinear));
  m.impl("point_gradient_trilinear", TORCH_BOX(&Ops::point_gradient_trilinear));
  m.impl("interpolate_cells", TORCH_BOX(&Ops::interpolate_cells));
  m.impl("splat_cells", TORCH_BOX(&Ops::splat_cells));
  m.impl("point_gradient_cells", TORCH_BOX(&Ops::point_gradient_cells));
}

}  // namespace voxelfield
