// Lenses: the projection of a ray to an image point, and its inverse. The distortion terms are OpenCV's.
//
// A ray has an ideal point in the image plane of the unit focal length, x to the right and y down from the principal
// point. The point's direction is that of the ray's component perpendicular to the optical axis. Its length is the
// tangent of the angle between ray and axis for a perspective lens, and the angle itself, in radians, for a fisheye
// lens. The lens images the ray at
//   x * radial + 2 p1 x y + p2 (r^2 + 2 x^2),   y * radial + p1 (r^2 + 2 y^2) + 2 p2 x y,
// where radial = 1 + k1 r^2 + k2 r^4 + k3 r^6 + k4 r^8, and r is the length of the ideal point.
#pragma once

#include <cmath>

#include "common/platform.h"

namespace voxelfield {

constexpr int kLensCoefficients = 6;
constexpr float kPerPi = 0.318309886f;

// A ray's direction from the camera's centre, of any length.
struct CameraRay {
  float right, down, forward;
};

struct Lens {
  const float* coefficients;  // k1, k2, k3, k4, p1, p2; null for a pinhole
  bool fisheye;

  // Returns the ray that is imaged at a point.
  //
  // There may be no ray for the outermost points of an image: if the lens polynomial decreases beyond some radius, rays
  // farther out fold back towards the centre. Such points get a ray near that fold, so that results are always finite.
  VOXELFIELD_HOST_DEVICE CameraRay ray_through(float x, float y) const {
    float ideal[2];
    ideal_point(x, y, ideal);
    if (!fisheye) return {ideal[0], ideal[1], 1.0f};
    const float radius = std::sqrt(ideal[0] * ideal[0] + ideal[1] * ideal[1]);
    const float half_turns = fminf(radius * kPerPi, 1.0f);
#if defined(__CUDA_ARCH__)
    const float sine = sinpif(half_turns), cosine = cospif(half_turns);
#else
    const float sine = std::sin(half_turns / kPerPi), cosine = std::cos(half_turns / kPerPi);
#endif
    const float scale = radius > 0.0f ? sine / radius : 1.0f;
    return {scale * ideal[0], scale * ideal[1], cosine};
  }

  // Sets the point that the formula gives for a ray. The lens does not image rays behind a perspective camera or beyond
  // the fold; only ray_through() determines whether it images the ray at that point.
  VOXELFIELD_HOST_DEVICE void point_of(const CameraRay& ray, float (&point)[2]) const {
    const float across = std::sqrt(ray.right * ray.right + ray.down * ray.down);
    float scale = 1.0f / ray.forward;
    if (fisheye) scale = across > 0.0f ? std::atan2(across, ray.forward) / across : 0.0f;
    const Shown shown = show(scale * ray.right, scale * ray.down);
    point[0] = shown.x;
    point[1] = shown.y;
  }

 private:
  // The image position of an ideal point, and the derivative there, a symmetric matrix.
  struct Shown {
    float x, y, dxx, dxy, dyy;
  };

  VOXELFIELD_HOST_DEVICE Shown show(float x, float y) const {
    const float* k = coefficients;
    const float p1 = k[4], p2 = k[5], square = x * x + y * y;
    const float radial = 1.0f + square * (k[0] + square * (k[1] + square * (k[2] + square * k[3])));
    const float slope = 2.0f * (k[0] + square * (2.0f * k[1] + square * (3.0f * k[2] + square * 4.0f * k[3])));
    const float cross = 2.0f * x * y;
    return {
        x * radial + p1 * cross + p2 * (square + 2.0f * x * x), y * radial + p1 * (square + 2.0f * y * y) + p2 * cross,
        radial + slope * x * x + 2.0f * p1 * y + 6.0f * p2 * x, 0.5f * slope * cross + 2.0f * p1 * x + 2.0f * p2 * y,
        radial + slope * y * y + 6.0f * p1 * y + 2.0f * p2 * x};
  }

  // Newton's iteration, starting from the point itself. It stays in the region around the optical axis in which the
  // lens does not fold: a step across the fold is halved, and later steps are no longer than the halved one.
  VOXELFIELD_HOST_DEVICE void ideal_point(float x, float y, float (&ideal)[2]) const {
    constexpr int kSteps = 48;            // three to five suffice where a ray exists
    constexpr float kFold = 1e-4f;        // the lens folds where the determinant of its derivative is smaller
    constexpr float kOverflow = 1e18f;    // larger values would overflow
    constexpr float kConverged = 1e-10f;  // squared step below which the error is less than rounding
    float at[2] = {x, y}, longest = 1.0f;
    ideal[0] = ideal[1] = 0.0f;
    for (int step = 0; step < kSteps; ++step) {
      const Shown shown = show(at[0], at[1]);
      const float determinant = shown.dxx * shown.dyy - shown.dxy * shown.dxy;
      // The condition is written so that NaN counts as beyond the fold.
      if (!(determinant > kFold && determinant < kOverflow && shown.dxx + shown.dyy > 0.0f)) {
        at[0] = 0.5f * (at[0] + ideal[0]);
        at[1] = 0.5f * (at[1] + ideal[1]);
        const float right = at[0] - ideal[0], down = at[1] - ideal[1];
        longest = std::sqrt(right * right + down * down);
        continue;
      }
      ideal[0] = at[0];
      ideal[1] = at[1];
      const float lack_x = x - shown.x, lack_y = y - shown.y;
      float right = (shown.dyy * lack_x - shown.dxy * lack_y) / determinant;
      float down = (shown.dxx * lack_y - shown.dxy * lack_x) / determinant;
      const float square = right * right + down * down;
      if (square > longest * longest) {
        const float shorter = longest / std::sqrt(square);
        right *= shorter;
        down *= shorter;
      }
      at[0] += right;
      at[1] += down;
      if (square > kConverged) continue;
      ideal[0] = at[0];
      ideal[1] = at[1];
      return;
    }
  }
};

}  // namespace voxelfield
