"""Radiance fields: features on grids, the decoders that read them, and the models of whole fields."""
