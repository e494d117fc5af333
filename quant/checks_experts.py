"""The check of a checkpoint's experts: is each there, and did calibration reach it.

An expert that no calibration token reached has no input scale, or one that is made up. vLLM reads a missing one as 0
and divides by it, which gives NaN for the prompts that reach the expert and for no others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from statistics import median

from halfbyte.quant.checks import Checkpoint, Rule
from halfbyte.quant.layouts import FORMATS, StoredLayer
from halfbyte.quant.numerics import E2M1_MAX, E4M3_MAX

_EXPERT = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<projection>\w+)$")
_EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
_FALLBACK = 0.5
"""The amax ModelOpt gives an expert's inputs when no expert was calibrated."""
# An expert with few tokens has a smaller input, one with a massive activation a larger one; weights vary less.
_APART = {"input_scale": (1e-3, 1e4), "weight_scale_2": (1 / 32, 32.0), "weight_scale": (1 / 32, 32.0)}


def _experts(at: Checkpoint) -> Iterator[str]:
    found: dict[tuple[str, str], dict[int, StoredLayer]] = defaultdict(dict)
    for module, layer in at.by_module.items():
        expert = _EXPERT.match(module)
        if expert is not None:
            found[expert["experts"], expert["projection"]][int(expert["index"])] = layer
    expected = next((at.text_config[key] for key in _EXPERT_COUNTS if at.text_config.get(key)), None)
    for (experts, projection), layers in found.items():
        count = expected if isinstance(expected, int) else max(layers) + 1
        for index in sorted(set(range(count)) - set(layers)):
            if f"{experts}.{index}.{projection}.weight" not in at.shards:
                yield f"{experts}.{index}.{projection} is missing"
        yield from _apart(at, layers.values())
    yield from _never_reached(at, found)


def _apart(at: Checkpoint, layers: Iterable[StoredLayer]) -> Iterator[str]:
    """Experts whose scale has nothing to do with that of the others of their block."""
    for suffix, (low, high) in _APART.items():
        values: dict[str, float] = {}
        missing = []
        for layer in layers:
            parts = {"input_scale": layer.input_scale, "weight_scale_2": layer.scale_2, "weight_scale": layer.scale}
            name, storage = parts[suffix], layer.storage
            if suffix == "weight_scale" and storage != "fp8":
                continue
            if name is None:
                missing.append(layer.module)
            else:
                values[name] = at.seen.scales[name].largest
        if values:
            yield from (f"{module} has no {suffix}, and other experts have one" for module in missing)
            middle = median(values.values())
            for name, value in values.items():
                if len(values) > 2 and middle > 0 and not low <= value / middle <= high:
                    yield f"{name} is {value:.3g}, that of the block's experts {middle:.3g}"


def _never_reached(at: Checkpoint, found: dict[tuple[str, str], dict[int, StoredLayer]]) -> Iterator[str]:
    """Experts all of whose inputs have the amax that ModelOpt falls back to without calibration tokens."""
    inputs: dict[tuple[str, int], list[bool]] = defaultdict(list)
    for (experts, _), layers in found.items():
        for index, layer in layers.items():
            value, expected = at.scalar(layer.input_scale), at.format_of(layer)
            if value is not None and expected is not None:
                divisor = E4M3_MAX * (E2M1_MAX if FORMATS[expected].activations == "nvfp4" else 1.0)
                inputs[experts, index].append(abs(value * divisor / _FALLBACK - 1) < 1e-5)
    for (experts, index), fallen in inputs.items():
        if len(fallen) > 1 and all(fallen):
            yield f"{experts}.{index} has an input_scale of {_FALLBACK} / maximum everywhere: no token ever reached it"


RULES = (Rule("experts", "every expert is there and was calibrated", _experts),)
