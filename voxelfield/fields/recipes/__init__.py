"""Kinds of fields: one file each, found by name."""
