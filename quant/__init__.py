"""Quantizing: numerics, calibration, export and read-back of checkpoints."""
