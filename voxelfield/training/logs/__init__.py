"""Records of a run: scalars, histograms, previews and the progress bar."""
