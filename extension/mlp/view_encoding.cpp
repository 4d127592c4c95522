// Geometry and view side by side, on the CPU.
#include <algorithm>

#include "common/backend.h"
#include "mlp/view_encoding_ops.h"

namespace voxelfield {
namespace {

constexpr int64_t kRowsPerTask = 4096;

template <typename F>
void for_each_row(int64_t n, const F& f) {
  for_each_task((n + kRowsPerTask - 1) / kRowsPerTask, [&](int64_t task, int64_t) {
    const int64_t last = std::min(n, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < last; ++row) f(row);
  });
}

struct Cpu : CpuBackend {
  template <typename scalar_t, int Degree, typename T>
  static void append_view(const ViewRows<scalar_t, T>& rows, scalar_t* inputs, T* raw) {
    constexpr int kView = sh_basis_size(Degree);
    for_each_row(rows.n, [&](int64_t row) {
      const scalar_t* geometry = rows.geometry + row * rows.geometry_size;
      scalar_t* out = inputs + row * (rows.geometry_size + kView);
      T direction[3], basis[kView];
      rows.direction(row, direction);
      spherical_harmonics(direction, Degree, basis);
      std::copy_n(geometry, rows.geometry_size, out);
      for (int k = 0; k < kView; ++k) out[rows.geometry_size + k] = static_cast<scalar_t>(basis[k]);
      raw[row] = static_cast<T>(geometry[0]);
    });
  }

  template <typename scalar_t, typename T>
  static void append_view_backward(const ViewGradients<scalar_t, T>& gradients, scalar_t* result) {
    for_each_row(gradients.n, [&](int64_t row) {
      const scalar_t* grad = gradients.inputs + row * (gradients.geometry_size + gradients.view_size);
      scalar_t* out = result + row * gradients.geometry_size;
      std::copy_n(grad, gradients.geometry_size, out);
      out[0] = static_cast<scalar_t>(static_cast<T>(grad[0]) + gradients.raw[row]);
    });
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(voxelfield, CPU, m) {
  m.impl("append_view", TORCH_BOX(&AppendViewOps<Cpu>::append_view));
  m.impl("append_view_backward", TORCH_BOX(&AppendViewOps<Cpu>::append_view_backward));
}

}  // namespace voxelfield
