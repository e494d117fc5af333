"""Measuring: lm-eval tasks, backends, fidelity."""
