"""Splats as USDZ with the schema ParticleField3DGaussianSplat, through OpenUSD."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from voxelfield.export.registry import FileFormat
from voxelfield.export.splat_file import Splats
from voxelfield.installed import import_optional

_EXTENT = 3.0  # standard deviations at which viewers may leave out the rest of a Gaussian


def _pxr(module: str) -> Any:
    return import_optional(f"pxr.{module}", "write an USDZ", "usd")


def _write(path: Path, splats: Splats, up_axis: str) -> None:
    usd, geometry, utils, values = (_pxr(name) for name in ("Usd", "UsdGeom", "UsdUtils", "Vt"))
    stage = usd.Stage.CreateInMemory()
    geometry.SetStageUpAxis(stage, up_axis.upper())
    geometry.SetStageMetersPerUnit(stage, 1.0)
    prim = _pxr("UsdVol").ParticleField3DGaussianSplat.Define(stage, "/Splats")
    stage.SetDefaultPrim(prim.GetPrim())
    usd.ColorSpaceAPI.Apply(prim.GetPrim()).CreateColorSpaceNameAttr(_pxr("Gf").ColorSpaceNames.SRGBRec709)

    def vectors(rows: torch.Tensor) -> Any:
        return values.Vec3fArray.FromNumpy(rows.contiguous().numpy())

    scales = splats.log_scales.exp()
    reach = _EXTENT * scales.amax(dim=-1, keepdim=True)
    bounds = torch.stack(((splats.means - reach).amin(dim=0), (splats.means + reach).amax(dim=0)))
    prim.CreateExtentAttr(vectors(bounds))
    prim.CreatePositionsAttr(vectors(splats.means))
    prim.CreateScalesAttr(vectors(scales))
    # A quaternion's real part is the last in memory.
    prim.CreateOrientationsAttr(values.QuatfArray.FromNumpy(splats.rotations.roll(-1, dims=-1).numpy()))
    prim.CreateOpacitiesAttr(values.FloatArray.FromNumpy(splats.opacity_logits.sigmoid().numpy()))
    prim.CreateRadianceSphericalHarmonicsDegreeAttr(3)
    prim.CreateRadianceSphericalHarmonicsCoefficientsAttr(vectors(splats.harmonics.flatten(0, 1)))
    with tempfile.TemporaryDirectory() as folder:
        layer = Path(folder, "splats.usdc")
        stage.Export(str(layer))
        if not utils.CreateNewUsdzPackage(_pxr("Sdf").AssetPath(str(layer)), str(path)):
            raise OSError(f"{path} cannot be written")


USDZ = FileFormat(of="splats", suffixes=(".usdz",), write=_write, up_axis="y", require=lambda: _pxr("UsdVol"))
