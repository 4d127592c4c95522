"""Components of training: losses, corrections, weights and backgrounds, one file each."""
