"""Maps of unbounded scenes into a box: nested boxes and normalised device coordinates."""
