"""A diffusers text-to-image pipeline run stage by stage, its parts all in memory or each only while it is needed.

The three stages do the same in both ways, so that the images are the same: the text encoders' output, what the denoiser
hands to the VAE, and the image are taken out of the pipeline's own call, whatever its class.
"""

from __future__ import annotations

import gc
import inspect
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from halfbyte.eval.memory import DevicePeak
from halfbyte.eval.pipeline_parts import Parts, quiet, weight_bytes
from halfbyte.records.digests import value_digest
from halfbyte.records.errors import Anomaly, UserError

if TYPE_CHECKING:
    from PIL import Image

STAGES = ("text encoders", "transformer", "VAE")
"""In their order: prompts to embeddings, embeddings to latents, latents to pixels."""
_TEXT, _DENOISE, _DECODE = STAGES


@dataclass(frozen=True, slots=True)
class Request:
    """One image."""

    prompt: str
    seed: int
    steps: int
    guidance: float
    height: int
    width: int
    """Pixels."""
    max_sequence_length: int
    control: Image.Image | None = None


class _Captured(Exception):
    def __init__(self, value: Any) -> None:
        self.value = value


class _Placeholder:
    """Stands in a pipeline for a part that is not in memory: its configuration is there, and no weights."""

    def __init__(self, empty: nn.Module, device: torch.device) -> None:
        self._empty = empty
        self.device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(self._empty, name)


class _Undecoded(_Placeholder):
    """The VAE's place while the denoiser runs: takes the latents it is given and ends the call."""

    def __init__(self, empty: nn.Module, device: torch.device, opened: Callable[[], nn.Module]) -> None:
        super().__init__(empty, device)
        self._opened = opened

    def encode(self, *arguments: Any, **options: Any) -> Any:
        """A control image goes through the VAE before the first step."""
        return cast(Any, self._opened()).encode(*arguments, **options)

    def decode(self, latents: torch.Tensor, *_: Any, **__: Any) -> Any:
        """Hands out the latents as the VAE would get them."""
        raise _Captured(latents)


def needed(stage: str, parts: Iterable[str]) -> list[str]:
    """The parts of a pipeline that a stage needs."""
    texts = [name for name in parts if name.startswith("text_encoder")]
    if stage == _TEXT:
        return texts
    return ["vae"] if stage == _DECODE else [name for name in parts if name not in (*texts, "vae")]


@dataclass
class Pipeline:
    """A pipeline that draws one image at a time, in three stages.

    Args:
        parts: Where its parts come from.
        device: Where it computes.
        low_vram: Whether the parts of a stage are loaded when it begins and freed when it ends.
    """

    parts: Parts
    device: torch.device
    low_vram: bool = False
    peaks: dict[str, int] = field(default_factory=dict)
    """Peak memory of each stage so far, in bytes, all that is loaded included."""

    def __post_init__(self) -> None:
        self._pipe = self.parts.skeleton
        self._pipe.set_progress_bar_config(disable=True)
        self._scheduler = self._pipe.scheduler
        self._empty = {name: getattr(self._pipe, name) for name in self.parts.openers}
        self._accepted = set(inspect.signature(type(self._pipe).__call__).parameters)
        self._held: dict[str, nn.Module] = {}
        self._inside = False
        for name in self._empty:
            self._put(name, _Placeholder(self._empty[name], self.device))

    @property
    def kind(self) -> str:
        """The class of the pipeline."""
        return type(self._pipe).__name__

    @property
    def scheduler(self) -> str:
        """The class of the scheduler."""
        return type(self._scheduler).__name__

    @property
    def scheduler_digest(self) -> str:
        """Of the scheduler's class and configuration, without what only says who wrote it."""
        config = {name: value for name, value in self._scheduler.config.items() if not name.startswith("_")}
        return value_digest([self.scheduler, json.loads(json.dumps(config, default=str))])

    @property
    def takes_control(self) -> bool:
        """Whether the pipeline needs a control image beside the prompt."""
        return "control_image" in self._accepted

    @property
    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name."""
        found = {name: getattr(self._pipe, name, None) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")}
        return {name: one for name, one in found.items() if one is not None}

    def stage_bytes(self) -> dict[str, int]:
        """Of the weights that each stage needs."""
        return {stage: sum(self.parts.bytes[name] for name in self._names(stage)) for stage in STAGES}

    def plain_transformer_bytes(self) -> int:
        """Of the transformer's weights in the type it computes in."""
        return sum(weight_bytes(self._empty[name]) for name in self._names(_DENOISE))

    @property
    def loaded(self) -> bool:
        """Whether parts are in memory already."""
        return bool(self._held)

    def _names(self, stage: str) -> list[str]:
        return needed(stage, self._empty)

    def _put(self, name: str, part: Any) -> None:
        vars(self._pipe)[name] = part  # around diffusers' own, which would look for the part's library

    def _open(self, name: str) -> nn.Module:
        if name not in self._held:
            self._held[name] = self.parts.openers[name]()
        return self._held[name]

    def _free(self, names: list[str]) -> None:
        for name in names:
            self._held.pop(name, None)
            self._put(name, _Placeholder(self._empty[name], self.device))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def load(self) -> None:
        """Loads all parts, where they stay: what is not low VRAM does at its first stage."""
        for name in self._empty:
            self._open(name)

    def free(self) -> None:
        """Frees whatever is loaded."""
        self._free(list(self._empty))

    @contextmanager
    def stage(self, stage: str) -> Iterator[None]:
        """Has the parts of a stage in memory, for any number of images, and watches the peak of memory."""
        peak = DevicePeak(self.device)
        if not self.low_vram:
            self.load()
        names = self._names(stage)
        for name in names:
            self._put(name, self._open(name))
        try:
            with torch.no_grad():
                yield
        finally:
            self.peaks[stage] = max(self.peaks.get(stage, 0), peak.bytes())
            if self.low_vram:
                self._free(list(self._held))
            else:
                for name in names:
                    self._put(name, _Placeholder(self._empty[name], self.device))

    def _arguments(self, request: Request, **more: Any) -> dict[str, Any]:
        every = {
            "prompt": request.prompt,
            "num_inference_steps": request.steps,
            "guidance_scale": request.guidance,
            "height": request.height,
            "width": request.width,
            "max_sequence_length": request.max_sequence_length,
            "control_image": request.control,
            # on the CPU whatever the device: the same initial latent everywhere
            "generator": torch.Generator("cpu").manual_seed(request.seed),
            **more,
        }
        return {name: value for name, value in every.items() if name in self._accepted}

    def _call(self, **arguments: Any) -> Any:
        self._pipe.scheduler = type(self._scheduler).from_config(self._scheduler.config)  # none keeps another's steps
        try:
            with quiet():  # what is cut of a prompt is counted and said once
                self._pipe(**arguments)
        except _Captured as captured:
            return captured.value
        raise UserError(f"{self.kind} does not draw by text encoders, denoiser and VAE", "it cannot be evaluated here")

    def encode(self, request: Request) -> Any:
        """The text encoders' output for a prompt, on the CPU; inside of stage "text encoders"."""
        encode_prompt = type(self._pipe).encode_prompt

        def recorded(*arguments: Any, **options: Any) -> None:
            raise _Captured(encode_prompt(self._pipe, *arguments, **options))

        vars(self._pipe)["encode_prompt"] = recorded
        try:
            return _moved(self._call(**self._arguments(request)), torch.device("cpu"))
        finally:
            del vars(self._pipe)["encode_prompt"]

    def denoise(self, request: Request, encoded: Any, on_step: Callable[[torch.Tensor], None] | None = None) -> Any:
        """The latents that the VAE would be given, on the CPU; inside of stage "transformer".

        Args:
            request: The image.
            encoded: What encode gave for its prompt.
            on_step: Called with the latents after each step.

        Raises:
            Anomaly: when they are no numbers.
        """
        more: dict[str, Any] = {}
        if on_step is not None:
            if "callback_on_step_end" not in self._accepted:
                raise UserError(f"{self.kind} does not show its latents", "set evaluate.images.latents to false")

            def called(_: Any, __: int, ___: Any, values: dict[str, Any]) -> dict[str, Any]:
                on_step(values["latents"])
                return values

            more["callback_on_step_end"] = called
        vars(self._pipe)["encode_prompt"] = lambda *_, **__: _moved(encoded, self.device)
        self._put("vae", _Undecoded(self._empty["vae"], self.device, lambda: self._open("vae")))
        try:
            latents = self._call(**self._arguments(request, **more)).cpu()
        finally:
            del vars(self._pipe)["encode_prompt"]
            self._put("vae", _Placeholder(self._empty["vae"], self.device))
        if not torch.isfinite(latents).all():
            raise _broken(request, "the latents hold NaN or infinite values")
        return latents

    def decode(self, request: Request, latents: torch.Tensor) -> Image.Image:
        """The image of latents that denoise gave; inside of stage "VAE".

        Raises:
            Anomaly: when pixels are no numbers.
            UserError: when the pipeline draws in another size than asked for.
        """
        vae: Any = self._held["vae"]
        pixels = vae.decode(latents.to(device=self.device, dtype=vae.dtype), return_dict=False)[0]
        if not torch.isfinite(pixels).all():
            raise _broken(request, "the VAE gives NaN or infinite pixels")
        image = self._pipe.image_processor.postprocess(pixels, output_type="pil")[0]
        if image.size != (request.width, request.height):
            raise UserError(
                f"{self.kind} draws {image.height} x {image.width} pixels where {request.height} x {request.width} "
                "were asked for",
                "set evaluate.images.size to what it can draw",
            )
        return cast("Image.Image", image)


def _broken(request: Request, what: str) -> Anomaly:
    return Anomaly(
        f"the pipeline is broken, not a bit worse: {what} for seed {request.seed} of prompt {request.prompt[:60]!r}",
        "verify the checkpoint with `halfbyte verify`",
    )


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, lists and dicts on another device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {name: _moved(one, device) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(one, device) for one in value)
    return value
