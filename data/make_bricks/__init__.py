"""Builds and renders ``bricks``, the scene that comes with the repository: a toy-brick harbour of our own design.

Geometry, printed pictures, light and cameras are all made here, so no one else's licence applies to the scene. Mitsuba
3 path-traces it. The images and their transforms are written in the NeRF-synthetic (Blender) layout.

Lengths are in studs (the distance between two neighbouring studs is 1); `rendering.scene` turns them into world units.

- `geometry`: outlines, solids, and structures of bricks or bars
- `harbour`: the places that make up the harbour
- `materials`, `pictures`: colours and finishes, and what is printed on panels
- `cameras`: poses of the training and test cameras
- `rendering`: the scene in Mitsuba's terms, and its views as pixels
- `dataset`: the files that are written
"""
