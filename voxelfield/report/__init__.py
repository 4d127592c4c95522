"""The report of a run: one HTML file with figures, curves, pictures and advice."""
