// Geometry and view side by side, on CUDA: a thread a row, moved 16 bytes at a time where rows allow it.
#include "common/backend.cuh"
#include "common/vector.cuh"
#include "mlp/view_encoding_ops.h"

namespace voxelfield {
namespace {

template <typename scalar_t, int Degree, int Width, typename T>
__global__ void append_view_kernel(ViewRows<scalar_t, T> rows, scalar_t* __restrict__ inputs, T* __restrict__ raw) {
  constexpr int kView = sh_basis_size(Degree);
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= rows.n) return;
  const scalar_t* geometry = rows.geometry + row * rows.geometry_size;
  scalar_t* out = inputs + row * (rows.geometry_size + kView);
  raw[row] = static_cast<T>(geometry[0]);
  for (int64_t c = 0; c < rows.geometry_size; c += Width) {
    store_global<scalar_t, Width>(out + c, load_constant<Width>(geometry + c));
  }
  T direction[3], basis[kView];
  rows.direction(row, direction);
  spherical_harmonics(direction, Degree, basis);
#pragma unroll
  for (int k = 0; k < kView; k += Width) {
    Vector<scalar_t, Width> part;
#pragma unroll
    for (int i = 0; i < Width; ++i) part.lane[i] = static_cast<scalar_t>(basis[k + i]);
    store_global<scalar_t, Width>(out + rows.geometry_size + k, part);
  }
}

template <typename scalar_t, int Width, typename T>
__global__ void append_view_backward_kernel(ViewGradients<scalar_t, T> gradients, scalar_t* __restrict__ result) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= gradients.n) return;
  const scalar_t* grad = gradients.inputs + row * (gradients.geometry_size + gradients.view_size);
  scalar_t* out = result + row * gradients.geometry_size;
  for (int64_t c = 0; c < gradients.geometry_size; c += Width) {
    Vector<scalar_t, Width> part = load_constant<Width>(grad + c);
    if (c == 0) part.lane[0] = static_cast<scalar_t>(static_cast<T>(part.lane[0]) + gradients.raw[row]);
    store_global<scalar_t, Width>(out + c, part);
  }
}

template <typename scalar_t>
constexpr int kWidest = 16 / sizeof(scalar_t);

struct Cuda : CudaBackend {
  template <typename scalar_t, int Degree, typename T>
  static void append_view(const ViewRows<scalar_t, T>& rows, scalar_t* inputs, T* raw) {
    constexpr int kWide = kWidest<scalar_t>;
    if constexpr (sh_basis_size(Degree) % kWide == 0) {
      if (vector_width(kWide, {rows.geometry_size}, rows.geometry, inputs) == kWide) {
        append_view_kernel<scalar_t, Degree, kWide>
            <<<blocks(rows.n, kThreads), kThreads, 0, stream()>>>(rows, inputs, raw);
        STD_CUDA_KERNEL_LAUNCH_CHECK();
        return;
      }
    }
    append_view_kernel<scalar_t, Degree, 1><<<blocks(rows.n, kThreads), kThreads, 0, stream()>>>(rows, inputs, raw);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }

  template <typename scalar_t, typename T>
  static void append_view_backward(const ViewGradients<scalar_t, T>& gradients, scalar_t* result) {
    constexpr int kWide = kWidest<scalar_t>;
    const unsigned count = blocks(gradients.n, kThreads);
    const int width = vector_width(kWide, {gradients.view_size, gradients.geometry_size}, gradients.inputs, result);
    if (width == kWide) {
      append_view_backward_kernel<scalar_t, kWide><<<count, kThreads, 0, stream()>>>(gradients, result);
    } else {
      append_view_backward_kernel<scalar_t, 1><<<count, kThreads, 0, stream()>>>(gradients, result);
    }
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CUDA, m) {
  m.impl("append_view", TORCH_BOX(&AppendViewOps<Cuda>::append_view));
  m.impl("append_view_backward", TORCH_BOX(&AppendViewOps<Cuda>::append_view_backward));
}

}  // namespace voxelfield
