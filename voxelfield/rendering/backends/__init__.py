"""Ways of rendering whole images: one that every field allows, and kernels for some kinds of field."""
