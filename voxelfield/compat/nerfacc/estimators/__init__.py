"""Estimators of where along a ray samples are needed."""
