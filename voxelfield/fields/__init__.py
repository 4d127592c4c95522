"""Radiance fields: grids with the decoders of their features, and fields made of plain functions."""
