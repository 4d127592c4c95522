"""Backends that render whole images: a general one for every field, and kernels for some kinds of field."""
