"""Checks, errors and helpers of autograd and optimizers, on which every other package builds."""
