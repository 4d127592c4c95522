"""Parts of training that belong to cameras: refinement of poses, lost cameras, exposure."""
