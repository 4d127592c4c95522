"""Recipes for fields: one file per kind, looked up by name."""
