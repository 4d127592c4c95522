"""Radiance fields: features on grids, the decoders that read them, and the recipes of whole fields."""
