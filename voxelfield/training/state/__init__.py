"""What a run stores: checkpoints, their checks, and the run directory."""
