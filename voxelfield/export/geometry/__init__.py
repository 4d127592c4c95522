"""From a field to triangles and points: level sets, fused depth, what meshes look like, and their files."""
