// Samples a grid with voxelfield, back-propagates, and compares both with the formula written in LibTorch's own
// operators. Runs on the CPU and, if there is one, on a GPU; exits with 1 if anything differs.
#include <torch/torch.h>
#include <voxelfield/voxelfield.h>

#include <cstdio>
#include <exception>

namespace {

using torch::Tensor;
using torch::indexing::Slice;

// Trilinear interpolation of a grid (X, Y, Z, C) at points (N, 3) inside the unit cube, corner by corner.
Tensor interpolate(const Tensor& grid, const Tensor& points) {
  const Tensor last = torch::tensor({grid.size(0) - 1, grid.size(1) - 1, grid.size(2) - 1}, points.options());
  const Tensor position = points * last;
  const Tensor lower = torch::minimum(position.detach().floor(), last - 1);
  const Tensor fraction = position - lower;
  Tensor sum = torch::zeros({points.size(0), grid.size(3)}, grid.options());
  for (int corner = 0; corner < 8; ++corner) {
    const Tensor offset = torch::tensor({corner >> 2 & 1, corner >> 1 & 1, corner & 1}, points.options());
    const Tensor vertex = (lower + offset).to(torch::kLong);
    const Tensor weight = (offset * fraction + (1 - offset) * (1 - fraction)).prod(1, /*keepdim=*/true);
    sum =
        sum + weight * grid.index({vertex.index({Slice(), 0}), vertex.index({Slice(), 1}), vertex.index({Slice(), 2})});
  }
  return sum;
}

bool agree(const char* what, const Tensor& ours, const Tensor& expected) {
  const bool same = torch::allclose(ours, expected, /*rtol=*/1e-10, /*atol=*/1e-12);
  std::printf("  %-18s %s (largest difference %.1e)\n", what, same ? "agrees" : "DIFFERS",
              (ours - expected).abs().max().item<double>());
  return same;
}

bool check(const torch::Device& device) {
  std::printf("%s\n", device.str().c_str());
  const auto options = torch::TensorOptions().dtype(torch::kDouble).device(device);
  const Tensor grid = torch::randn({9, 7, 5, 4}, options).requires_grad_();
  const Tensor points = torch::rand({1000, 3}, options).requires_grad_();
  const Tensor target = torch::randn({1000, 4}, options);

  const Tensor values = voxelfield::sample_trilinear(grid, points);
  (values - target).square().sum().backward();
  const Tensor grid_gradient = grid.grad().clone(), point_gradient = points.grad().clone();

  grid.mutable_grad().reset();
  points.mutable_grad().reset();
  const Tensor expected = interpolate(grid, points);
  (expected - target).square().sum().backward();

  const bool values_agree = agree("values", values, expected);
  const bool grids_agree = agree("gradient of grid", grid_gradient, grid.grad());
  const bool points_agree = agree("gradient of points", point_gradient, points.grad());
  return values_agree && grids_agree && points_agree;
}

}  // namespace

int main() try {
  torch::manual_seed(0);
  bool good = check(torch::kCPU);
  if (torch::cuda::is_available()) good = check(torch::kCUDA) && good;
  return good ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
