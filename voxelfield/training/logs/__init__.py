"""Records of a run: scalars, previews and the progress bar."""
