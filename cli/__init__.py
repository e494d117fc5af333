"""halfbyte: from a model and a recipe to an FP4 or FP8 checkpoint, an accuracy-loss table and a verdict."""

__version__ = "0.1.0"
