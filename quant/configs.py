"""From a recipe's quantize block to the configuration that ModelOpt's mtq.quantize takes."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from halfbyte.quant.upstream import quiet_upstream
from halfbyte.recipes.schema import QuantizeSpec
from halfbyte.records.errors import UserError, unknown_name

logger = logging.getLogger(__name__)

ALGORITHMS = (
    None,
    "max",
    "mse",
    "local_hessian",
    "nvfp4_act_headroom",
    "awq_lite",
    "awq_clip",
    "awq_full",
    "svdquant",
    "gptq",
)
"""Calibration algorithms whose result can be exported and read back; None calibrates nothing."""
SMOOTHING = ("awq_lite", "awq_full", "svdquant")
"""Those that scale the inputs of a linear, and so need a place for that scale in the checkpoint."""

# Quantizers of the attention scores' operands: ModelOpt's export drops their scales, so that nobody can read them back.
_UNEXPORTED = ("*q_bmm_quantizer", "*p_bmm_quantizer", "*softmax_quantizer")
_NORMS = ("nn.LayerNorm", "nn.BatchNorm1d", "nn.BatchNorm2d", "nn.InstanceNorm1d", "nn.InstanceNorm2d")
"""Classes whose inputs a preset's '*input_quantizer' would round in memory, and no checkpoint does."""


def _listed_recipes() -> list[str]:
    from modelopt.torch.opt.config_loader import BUILTIN_CONFIG_ROOT

    root = Path(str(BUILTIN_CONFIG_ROOT))
    found = [path.relative_to(root).with_suffix("") for path in root.glob("general/ptq/*.yaml")]
    return sorted(path.as_posix() for path in found)


def _from_recipe(name: str) -> dict[str, Any]:
    from modelopt.recipe import load_recipe

    try:
        with quiet_upstream():
            recipe = load_recipe(name)
    except FileNotFoundError:
        raise unknown_name("ModelOpt recipe", name, _listed_recipes()) from None
    except ValueError as error:
        if "not a valid YAML file or directory" in str(error):
            raise unknown_name("ModelOpt recipe", name, _listed_recipes()) from None
        raise UserError(f"ModelOpt recipe '{name}' cannot be used: {_first_line(error)}") from None
    quantize = getattr(recipe, "quantize", None)
    if quantize is None:
        raise UserError(f"ModelOpt recipe '{name}' has no quantize section", "choose one below general/ptq/")
    return dict(quantize.model_dump(exclude_unset=True))


def _from_preset(name: str) -> dict[str, Any]:
    import modelopt.torch.quantization as mtq
    from modelopt.recipe.presets import QUANT_CFG_CHOICES

    if name in QUANT_CFG_CHOICES:
        return copy.deepcopy(QUANT_CFG_CHOICES[name])
    constant = name.upper()
    for candidate in (constant, f"{constant}_CFG", f"{constant}_CONFIG", f"{constant}_DEFAULT_CFG"):
        if candidate in mtq.config.choices:
            return copy.deepcopy(getattr(mtq, candidate))
    raise unknown_name("preset", name, [*QUANT_CFG_CHOICES, *mtq.config.choices])


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def quant_config(spec: QuantizeSpec, unexported: Sequence[str] = _UNEXPORTED) -> dict[str, Any]:
    """The ModelOpt configuration {"quant_cfg": [...], "algorithm": ...} that a quantize block stands for.

    Args:
        spec: The block.
        unexported: Quantizers whose work a checkpoint of this kind of model would not hold, which are switched off.

    Raises:
        UserError: for an unknown recipe or preset, or an inline configuration ModelOpt refuses.
    """
    from modelopt.recipe.presets import KV_QUANT_CFG_CHOICES
    from modelopt.torch.quantization.config import QuantizeConfig

    if spec.recipe is not None:
        config = _from_recipe(spec.recipe)
    elif spec.preset is not None:
        config = _from_preset(spec.preset)
    else:
        config = {"quant_cfg": copy.deepcopy(spec.quant_cfg), "algorithm": spec.algorithm or "max"}
    if spec.kv_cache is not None:
        config["quant_cfg"] = [*config["quant_cfg"], *copy.deepcopy(KV_QUANT_CFG_CHOICES[spec.kv_cache]["quant_cfg"])]
    for pattern in spec.keep:
        entries = [{"quantizer_name": name, "enable": False} for name in keep_patterns(pattern)]
        config["quant_cfg"] = [*config["quant_cfg"], *entries]
    try:
        QuantizeConfig(**config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"ModelOpt refuses the quantize block: {' '.join(str(error).split())[:300]}") from None
    require_supported_algorithm(config)
    return _exportable(config, unexported)


def keep_patterns(pattern: str) -> list[str]:
    """The patterns for the names of the quantizers that a pattern of quantize.keep switches off.

    They are those of linears and experts: the KV cache's quantizers belong to no layer that could be kept, and a
    checkpoint declares one format for the whole cache.
    """
    starts = [f"{pattern}.*", *([pattern] if pattern.endswith("*") else [])]
    return [f"{start}{side}_quantizer" for start in starts for side in ("weight", "input", "output")]


def methods(config: dict[str, Any]) -> list[str | None]:
    """The names of a configuration's calibration algorithms, in their order."""
    algorithm = config.get("algorithm")
    return [_method(entry) for entry in (algorithm if isinstance(algorithm, list) else [algorithm])]


def _method(algorithm: Any) -> str | None:
    return algorithm.get("method") if isinstance(algorithm, dict) else algorithm


def require_supported_algorithm(config: dict[str, Any]) -> None:
    """Refuses, before anything runs, a calibration algorithm whose result cannot be exported and read back.

    Raises:
        UserError: naming the algorithm.
    """
    for method in methods(config):
        if method not in ALGORITHMS:
            supported = ", ".join(name for name in ALGORITHMS if name)
            raise UserError(f"calibration algorithm {method!r} is not supported", f"supported: {supported}")


def _exportable(config: dict[str, Any], unexported: Sequence[str]) -> dict[str, Any]:
    """The configuration without what would leave no trace in the checkpoint, or traces outside the run."""
    for entry in config["quant_cfg"]:
        name = str(entry.get("quantizer_name"))
        if entry.get("cfg") and any(fnmatch(pattern.lstrip("*"), name) for pattern in unexported):
            logger.info("%s is left out: a checkpoint has no place for its scale", name)
    off = [{"quantizer_name": name, "enable": False} for name in unexported]
    off += [{"quantizer_name": "*input_quantizer", "parent_class": name, "enable": False} for name in _NORMS]
    config["quant_cfg"] = [*config["quant_cfg"], *off]
    algorithm = config.get("algorithm")
    for entry in algorithm if isinstance(algorithm, list) else [algorithm]:
        layerwise = entry.get("layerwise") if isinstance(entry, dict) else None
        if isinstance(layerwise, dict):
            layerwise.pop("checkpoint_dir", None)  # ModelOpt's recipes name a folder in the working directory
    return config
