"""halfbyte: from a model and a recipe to an FP4 or FP8 checkpoint, an accuracy-loss table and a verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfbyte.api import compare, evaluate, gate, load, quantize

__version__ = "0.1.0"
__all__ = ["compare", "evaluate", "gate", "load", "quantize"]


def __getattr__(name: str) -> Any:
    """The functions of halfbyte.api at their first use, so that `import halfbyte` stays light."""
    if name not in __all__:
        raise AttributeError(f"module 'halfbyte' has no attribute '{name}'")
    from halfbyte import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
