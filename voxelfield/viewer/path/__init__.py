"""Camera paths: key frames, what lies between them, and the files that hold them."""
