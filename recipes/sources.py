"""The parts of a recipe that several of its blocks name: a model and a source of texts."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """A block of a recipe: unknown fields are errors, and so is a value of another type."""

    # strict: or `limit: true` would be a limit of 1
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ModelSpec(Strict):
    """Where the original model comes from."""

    id: str
    """Hub id, local folder, or a folder or hub id that holds `gguf_file`."""
    revision: str | None = None
    kind: Literal["causal-lm", "flux"] = "causal-lm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of the weights as loaded and of what stays unquantized in the checkpoint."""
    gguf_file: str | None = None
    """A GGUF file in the folder, opened by transformers and dequantized to `dtype`."""


class TextSource(Strict):
    """A collection of texts: one of ModelOpt's names, a hub data set, or a local file."""

    dataset: str
    """A name ModelOpt knows (cnn_dailymail), a hub id (openai/gsm8k), or a path to .jsonl or .txt."""
    name: str | None = None
    """Configuration of the hub data set."""
    split: str = "train"
    field: str | None = None
    """Column that holds the text; by default the first of text, question, prompt, content that exists."""
    samples: int = Field(default=512, ge=1)
