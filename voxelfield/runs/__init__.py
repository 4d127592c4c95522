"""Whole runs: load, train, evaluate and write results as a configuration says."""
