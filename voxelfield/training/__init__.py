"""Fitting a radiance field to photographs."""
