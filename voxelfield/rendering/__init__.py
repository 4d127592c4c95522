"""Rendering, from cameras to images: rays, occupied space, samples along rays, compositing."""
