"""Calibrating a pipeline's transformer: prompts with fixed seeds are drawn, and it sees every step of each of them.

ModelOpt's own examples draw without a seed, so that each run finds other scales. Here the n-th prompt has seed + n, and
its first latents come from a CPU generator, which gives the same numbers on every device.
"""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from halfbyte.quant.calibration_progress import Progress
from halfbyte.quant.pipelines import CONTROL, quiet_diffusers
from halfbyte.recipes.images import DrawnSpec
from halfbyte.recipes.prompts import Prompt, load_prompts, prompts_digest, shown
from halfbyte.recipes.schema import CalibrationSpec, TextSource
from halfbyte.recipes.texts import load_texts
from halfbyte.records.errors import UserError
from halfbyte.records.manifest import calibration_name
from halfbyte.records.progress import progress_bar

logger = logging.getLogger(__name__)

PASSES = {"max": 1, "mse": 1, "svdquant": 3}
"""How often each algorithm has all prompts drawn: SVDQuant to see the inputs, to search scales, and to measure anew."""


def drawn(spec: CalibrationSpec) -> DrawnSpec:
    """How a calibration draws; a recipe of a model that draws says so."""
    assert spec.images is not None
    return spec.images


def calibration_prompts(
    spec: CalibrationSpec, *, control: bool, data_root: Path | None = None
) -> tuple[list[Prompt], dict[str, str]]:
    """The prompts of a calibration and what the manifest says of them.

    Args:
        spec: The block.
        control: Whether each needs a control image; else those that a file names are not looked at.
        data_root: See recipes.data.data_root.

    Raises:
        UserError: for a source that is missing or holds none, a prompt that is there twice, or one without the control
            image that it needs.
    """
    prompts: list[Prompt] = []
    data: dict[str, str] = {}
    for entry in spec.sources:
        if _is_prompt_file(entry):
            found = load_prompts(entry.dataset, control_images=drawn(spec).control_images)
            if entry.samples < len(found):
                found = random.Random(spec.seed).sample(found, entry.samples)
        else:
            texts = load_texts(entry, seed=spec.seed, data_root=data_root).texts
            found = [Prompt(text.strip(), number) for number, text in enumerate(texts, start=1)]
        prompts += found
        data[calibration_name(entry.dataset, entry.name, entry.split)] = prompts_digest(found)
    lacking = [one for one in prompts if control and one.control is None]
    if lacking:
        raise UserError(
            f"the calibration prompt {shown(lacking[0].text)} has no control image, and a {CONTROL} draws from one",
            'give a .jsonl file with lines {"prompt": "...", "control_image": "file.png"}',
        )
    return (prompts if control else [replace(one, control=None) for one in prompts]), data


def _is_prompt_file(entry: TextSource) -> bool:
    path = Path(entry.dataset).expanduser()
    return path.suffix in (".txt", ".jsonl") or path.is_file()


def encoded(pipeline: Any, prompts: Sequence[Prompt], spec: DrawnSpec, device: torch.device) -> list[dict[str, Any]]:
    """What the pipeline is called with for each prompt; its text encoders are let go of when all are encoded.

    Args:
        pipeline: On the CPU.
        prompts: What to draw.
        spec: How.
        device: Where the text encoders compute.
    """
    encoders = [name for name in ("text_encoder", "text_encoder_2") if getattr(pipeline, name, None) is not None]
    for name in encoders:
        getattr(pipeline, name).to(device)
    calls = []
    with torch.no_grad(), quiet_diffusers(), progress_bar(total=len(prompts), unit="prompt", desc="encode") as bar:
        for prompt in prompts:
            embeds, pooled, _ = pipeline.encode_prompt(
                prompt=prompt.text, prompt_2=None, device=device, max_sequence_length=spec.max_sequence_length
            )
            calls.append({"prompt_embeds": embeds.cpu(), "pooled_prompt_embeds": pooled.cpu()})
            bar.update()
    pipeline.register_modules(**dict.fromkeys(encoders))
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    for call, prompt in zip(calls, prompts, strict=True):
        if prompt.control is not None:
            call["control_image"] = prompt.control
    return calls


class DrawingLoop:
    """The loop that mtq.quantize calls with the transformer, once for each pass of its algorithm.

    Args:
        pipeline: Without text encoders and transformer, where it computes.
        calls: What it is called with for each prompt.
        spec: How it draws.
        seed: Of the first prompt.
        progress: Where each prompt's result is kept.
        passes: How many the algorithm takes, for the bar.
        batch: Prompts drawn together; the kernels of another number may round otherwise.
    """

    def __init__(
        self,
        pipeline: Any,
        calls: Sequence[dict[str, Any]],
        spec: DrawnSpec,
        *,
        seed: int,
        progress: Progress,
        passes: int = 1,
        batch: int = 1,
    ) -> None:
        self.pipeline, self.calls, self.spec, self.seed = pipeline, calls, spec, seed
        self.progress, self.passes, self.batch = progress, passes, batch
        self.index = 0

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Draws the prompts that this pass has not seen yet.

        Raises:
            UserError: when the transformer was not called in every step.
        """
        index, self.index = self.index, self.index + 1
        device = next(model.parameters()).device
        self.pipeline.register_modules(transformer=model)
        done = self.progress.resume(index, model)
        if done:
            logger.info("calibration: %d of %d prompts of pass %d are done already", done, len(self.calls), index + 1)
        # A batch is drawn whole, so that a loop that goes on gives the bits of one that was not interrupted.
        begin = done - done % self.batch
        what = "calibrate" if self.passes == 1 else f"calibrate, pass {index + 1} of {self.passes}"
        steps = self.spec.steps
        seen = 0

        def step(*_: Any) -> None:
            nonlocal seen
            seen += 1
            bar.update(len(numbers))

        handle = model.register_forward_hook(step)
        try:
            with progress_bar(total=len(self.calls) * steps, initial=begin * steps, unit="step", desc=what) as bar:
                for first in range(begin, len(self.calls), self.batch):
                    seen = 0
                    numbers = range(first, min(first + self.batch, len(self.calls)))
                    self._draw(numbers, device)
                    if seen < steps:
                        raise UserError(f"the transformer saw {seen} of {steps} steps", "use another scheduler")
                    self.progress.save(index, numbers.stop, model)
        finally:
            handle.remove()
            self.pipeline.register_modules(transformer=None)

    def _draw(self, numbers: range, device: torch.device) -> None:
        calls = [self.calls[number] for number in numbers]
        joined = {name: _joined([call[name] for call in calls], device) for name in calls[0]}
        with quiet_diffusers():
            self.pipeline(
                **joined,
                num_inference_steps=self.spec.steps,
                guidance_scale=self.spec.guidance,
                height=self.spec.size[0],
                width=self.spec.size[1],
                generator=[torch.Generator("cpu").manual_seed(self.seed + number) for number in numbers],
                max_sequence_length=self.spec.max_sequence_length,
                output_type="latent",
            )


def _joined(values: Sequence[Any], device: torch.device) -> Any:
    """The prompts' embeddings as one batch where it is needed, or the control images of their files."""
    if isinstance(values[0], Path):
        return [_control_image(path) for path in values]
    return torch.cat([value.to(device) for value in values])


def _control_image(path: Path) -> Any:
    from PIL import Image

    try:
        return Image.open(path).convert("RGB")
    except OSError as error:
        raise UserError(f"control image {path} cannot be read: {error}", "give a PNG or JPEG file") from None
