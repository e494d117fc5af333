"""Trains the small Flux on captioned shapes, from nothing: first the VAE, then text encoders and transformer together.

On a GPU, in some minutes (an interrupted call goes on where it was):

    python tests/small_flux/train.py OUT --minutes 8

On a CPU, for a look at whether it works at all:

    python tests/small_flux/train.py OUT --drawn 200 --vae-steps 3 --flow-steps 3 --guidance-steps 2 --batch 4

The flow is FLUX's: between noise and latent on a straight line, the velocity learned at a sigma between 0 and 1. The
last steps distil guidance into the model as FLUX.1-dev has it (Meng et al. 2023, arXiv 2210.03142): the model so far,
with and without the caption, teaches one that is told the scale. OUT gets the pipeline in bfloat16 and scores.json, the
fulfilment of prompts for scenes that were not trained on, also while the training runs: what a stopped one leaves there
draws. OUT.work has what it goes on from.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from small_flux.model import PROMPT_TOKENS, make_pipeline
from small_flux.shapes import SIDE, caption, draw, make_scene

from halfbyte.eval.fulfilment import fulfilment
from halfbyte.records.files import atomic_folder, write_json

CAPTIONS_EACH = 4
"""Of every picture, so that the words vary."""
HELD_OUT = 10_000_000
"""Number of the first scene that is only asked for."""
DROPPED = 0.1
"""Part of the captions that is left out, so that the model knows what no caption means."""
SCALES = (1.0, 5.0)
"""Guidance scales that are distilled."""
DRAWN_AT = 3.5
"""The guidance scale of the scored images."""
SHARES = {"vae": 0.08, "flow": 0.72, "guidance": 0.17}
"""Of the time, where time is given; the rest is for drawing and scoring."""


@dataclass(frozen=True)
class Drawn:
    """Pictures and captions to learn from."""

    pictures: Tensor
    """uint8 of shape (pictures, 3, SIDE, SIDE)."""
    clip: Tensor
    """Token ids of shape (pictures, CAPTIONS_EACH, PROMPT_TOKENS); the last picture has the empty caption."""
    t5: Tensor
    """The same for T5."""


def main() -> None:
    """Trains, saves and scores."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    began = time.monotonic()
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "threads")}

    def keep(pipeline: Any, count: int, scale: float, finished: bool) -> None:
        save(pipeline, options.out)
        scores = score(options.out, count, options.seed, device, scale=scale)
        more = {"settings": settings, "device": device.type, "seconds": round(time.monotonic() - began)}
        write_json(options.out / "scores.json", {**scores, **more, "finished": finished})
        print(f"after {more['seconds']} s: {scores}", flush=True)

    pipeline = make_pipeline(options.seed)
    drawn = draw_all(pipeline, options.drawn, options.seed)
    print(f"{options.drawn} pictures drawn in {time.monotonic() - began:.0f} s; on {device.type}", flush=True)
    work = options.out.with_name(options.out.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    train_vae(pipeline.vae.to(device), drawn, options, work, device)
    latents = encode(pipeline.vae, drawn.pictures, device)
    train_flow(pipeline, latents, drawn, options, work, device, lambda *state: keep(state[0], 64, state[1], False))
    keep(pipeline, options.scored, DRAWN_AT, True)
    print(options.out, flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drawn", type=int, default=100_000, help="pictures to learn from")
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--minutes", type=float, help="of training, instead of steps")
    parser.add_argument("--vae-steps", type=int, default=1000)
    parser.add_argument("--flow-steps", type=int, default=4000)
    parser.add_argument("--guidance-steps", type=int, default=600, help="at the end, to distil guidance")
    parser.add_argument(
        "--bf16", action="store_true", help="train the flow in bfloat16: on an H200 its first step failed in cuBLAS"
    )
    parser.add_argument("--compile", action="store_true", help="the flow by torch.compile: fewer passes over memory")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds between states that are kept")
    parser.add_argument("--scored", type=int, default=256, help="held-out prompts")
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def _picture(number: int, seed: int) -> tuple[Any, list[str]]:
    scene = make_scene(seed, number)
    texts = [caption(scene, seed, number * CAPTIONS_EACH + at) for at in range(CAPTIONS_EACH)]
    return np.asarray(draw(scene)), texts


def draw_all(pipeline: Any, count: int, seed: int) -> Drawn:
    """Draws `count` pictures with captions, by all processors."""
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(partial(_picture, seed=seed), range(count), chunksize=max(1, min(500, count // 8))))
    pictures = torch.from_numpy(np.stack([picture for picture, _ in found])).permute(0, 3, 1, 2).contiguous()
    texts = [text for _, group in found for text in group] + [""] * CAPTIONS_EACH
    numbers = {text: number for number, text in enumerate(dict.fromkeys(texts))}
    chosen = torch.tensor([numbers[text] for text in texts]).view(count + 1, CAPTIONS_EACH)
    clip, t5 = (
        torch.from_numpy(
            tokenizer(
                list(numbers), padding="max_length", max_length=PROMPT_TOKENS, truncation=True, return_tensors="np"
            ).input_ids
        )
        for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2)
    )
    return Drawn(pictures, clip[chosen], t5[chosen])


def _steps(
    options: argparse.Namespace,
    what: str,
    state: dict[str, Any],
    path: Path,
    saved: Callable[[], None] | None = None,
) -> Iterator[tuple[int, float]]:
    """The steps that are left, each with the part of the training that is behind it.

    What is in `state` is put back at first, and kept every so many seconds; then `saved` is called. Every step's random
    numbers are its own, so that a training of so many steps that was interrupted ends as one that was not.
    """
    total = getattr(options, f"{what}_steps")
    allowed = options.minutes and 60 * options.minutes * SHARES[what]
    step, spent = 0, 0.0
    if path.is_file():
        kept = torch.load(path, weights_only=True, map_location="cpu")
        step, spent = kept.pop("step"), kept.pop("spent")
        for name, one in state.items():
            one.load_state_dict(kept[name])
        print(f"{what}: goes on from step {step}", flush=True)
    last = began = time.monotonic()
    part = spent / allowed if allowed else step / total
    while part < 1:
        yield step, part
        step, now = step + 1, time.monotonic()
        part = (spent + now - began) / allowed if allowed else step / total
        if part >= 1 or now - last > options.save_every:
            partial_file = path.with_suffix(".partial")
            values = {name: one.state_dict() for name, one in state.items()}
            torch.save({"step": step, "spent": spent + now - began, **values}, partial_file)
            os.replace(partial_file, path)
            if saved is not None:
                saved()
            last = time.monotonic()
            began += last - now  # neither saving nor scoring is training


def _generator(seed: int, stage: int, step: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed((seed * 3 + stage) * 10_000_000 + step)


def _rate(step: int, part: float) -> float:
    """Warm-up, then a cosine to a hundredth."""
    return min(1.0, max((step + 1) / 200, 10 * part)) * (0.505 + 0.495 * math.cos(math.pi * part))


def _say(what: str, step: int, part: float, loss: Tensor) -> None:
    if step % 100 == 0:
        value = loss.item()
        print(f"{what} {step} ({part:.0%}): {value:.4f}", flush=True)
        if not math.isfinite(value):
            raise SystemExit(f"{what}: the loss is {value} at step {step}; begin again with a lower --learning-rate")


def train_vae(vae: Any, drawn: Drawn, options: argparse.Namespace, work: Path, device: torch.device) -> None:
    """Trains the VAE in place, and sets its scaling and shift so that latents have mean 0 and deviation 1."""
    optimizer = torch.optim.AdamW(vae.parameters(), lr=options.learning_rate, weight_decay=0.0)
    pictures = drawn.pictures.to(device)
    for step, part in _steps(options, "vae", {"vae": vae, "optimizer": optimizer}, work / "vae.pt"):
        generator = _generator(options.seed, 0, step, device)
        chosen = torch.randint(len(pictures), (min(256, options.batch),), generator=generator, device=device)
        images = _as_values(pictures[chosen])
        with _autocast(device):
            posterior = vae.encode(images).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator, device=device)
            shown = vae.decode(posterior.mean + posterior.std * noise).sample
        error = (shown.float() - images).abs().mean() + (shown.float() - images).square().mean()
        loss = error + 3e-4 * posterior.kl().mean() / posterior.mean[0].numel()
        _update(loss, optimizer, vae.parameters(), options.learning_rate * _rate(step, part))
        _say("vae", step, part, loss)
    latents = encode(vae, pictures[: min(len(pictures), 2000)], device)
    vae.register_to_config(scaling_factor=1 / float(latents.std()), shift_factor=float(latents.mean()))


@torch.no_grad()
def encode(vae: Any, pictures: Tensor, device: torch.device) -> Tensor:
    """The middle of each picture's latents, scaled, of shape (pictures, 4, SIDE / 4, SIDE / 4)."""
    found = []
    for batch in pictures.split(500):
        with _autocast(device):
            latents = vae.encode(_as_values(batch.to(device))).latent_dist.mean
        found.append((latents.float() - vae.config.shift_factor) * vae.config.scaling_factor)
    return torch.cat(found)


def _as_values(pictures: Tensor) -> Tensor:
    return pictures.float() / 127.5 - 1


def _autocast(device: torch.device, wanted: bool = True) -> Any:
    return torch.autocast(device.type, torch.bfloat16, enabled=wanted and device.type == "cuda")


def _attention(fused: bool) -> Any:
    """Without fused kernels of attention, unless they are wanted: a hundred tokens gain nothing from them."""
    return contextlib.nullcontext() if fused else sdpa_kernel(SDPBackend.MATH)


def _update(loss: Tensor, optimizer: torch.optim.Optimizer, parameters: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(list(parameters), 1.0)
    optimizer.step()


class Flow(nn.Module):
    """Text encoders and transformer as one: the velocity at noisy latents with a caption."""

    def __init__(self, pipeline: Any) -> None:
        super().__init__()
        self.clip, self.t5, self.transformer = pipeline.text_encoder, pipeline.text_encoder_2, pipeline.transformer

    def forward(self, noisy: Tensor, sigma: Tensor, scale: Tensor, clip: Tensor, t5: Tensor) -> Tensor:
        """Latents packed into patches (batch, tokens, 16), sigma and scale (batch,), token ids (batch, tokens)."""
        from diffusers import FluxPipeline

        side = math.isqrt(noisy.shape[1])
        text = self.t5(t5)[0]
        velocity: Tensor = self.transformer(
            hidden_states=noisy,
            timestep=sigma,
            guidance=scale,
            pooled_projections=self.clip(clip).pooler_output,
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=noisy.device),
            img_ids=FluxPipeline._prepare_latent_image_ids(1, side, side, noisy.device, torch.float32),
            return_dict=False,
        )[0]
        return velocity


def train_flow(
    pipeline: Any,
    latents: Tensor,
    drawn: Drawn,
    options: argparse.Namespace,
    work: Path,
    device: torch.device,
    saved: Callable[[Any, float], None] | None = None,
) -> None:
    """Trains text encoders and transformer in place: the flow, then guidance; what is kept is a running mean.

    `saved` is called with the pipeline so far, and the guidance scale that it draws by.
    """
    from diffusers import FluxPipeline

    count, channels, side, _ = latents.shape
    patches = FluxPipeline._pack_latents(latents, count, channels, side, side)
    clip, t5 = drawn.clip.to(device), drawn.t5.to(device)
    flow = Flow(pipeline).to(device)
    mean = copy.deepcopy(flow).requires_grad_(False)
    if options.compile:  # in place, so that the names of its weights stay as they are
        flow.compile()
    for stage, name, drawn_at in ((1, "flow", 1.0), (2, "guidance", DRAWN_AT)):
        teacher = None
        if stage == 2:
            flow.load_state_dict(mean.state_dict())
            teacher = copy.deepcopy(mean).eval()
            if options.compile:
                teacher.compile()
        top = options.learning_rate * (1.0 if stage == 1 else 0.3)
        optimizer = torch.optim.AdamW(flow.parameters(), lr=top, betas=(0.9, 0.99), weight_decay=0.01)
        state = {"flow": flow, "mean": mean, "optimizer": optimizer}
        tell = None if saved is None else partial(_tell, saved, pipeline, mean, drawn_at)
        for step, part in _steps(options, name, state, work / f"{name}.pt", tell):
            batch = _batch(patches, clip, t5, options, _generator(options.seed, stage, step, device))
            with _autocast(device, options.bf16), _attention(options.bf16):
                wanted = batch.velocity if teacher is None else _guided(teacher, batch, clip[-1, 0], t5[-1, 0])
                scale = torch.ones_like(batch.scale) if teacher is None else batch.scale
                loss = F.mse_loss(flow(batch.noisy, batch.sigma, scale, batch.clip, batch.t5).float(), wanted)
            _update(loss, optimizer, flow.parameters(), top * _rate(step, part))
            _follow(mean, flow, min(0.999, (step + 1) / (step + 10)))
            _say(name, step, part, loss)
    flow.load_state_dict(mean.state_dict())  # which are the pipeline's own modules


def _tell(saved: Callable[[Any, float], None], pipeline: Any, mean: Flow, scale: float) -> None:
    from diffusers import FluxPipeline

    parts = {"text_encoder": mean.clip, "text_encoder_2": mean.t5, "transformer": mean.transformer}
    saved(FluxPipeline(**{**pipeline.components, **parts}), scale)


def save(pipeline: Any, folder: Path) -> None:
    """Saves it in bfloat16; the given one stays as it is."""
    from diffusers import FluxPipeline

    whole: Any = FluxPipeline(**{name: copy.deepcopy(part) for name, part in pipeline.components.items()})
    with atomic_folder(folder) as partial_folder:
        whole.to(torch.bfloat16).save_pretrained(partial_folder)


@dataclass(frozen=True)
class _Batch:
    noisy: Tensor
    velocity: Tensor
    sigma: Tensor
    scale: Tensor
    clip: Tensor
    t5: Tensor


def _batch(
    patches: Tensor, clip: Tensor, t5: Tensor, options: argparse.Namespace, generator: torch.Generator
) -> _Batch:
    size, how = options.batch, {"generator": generator, "device": patches.device}
    chosen = torch.randint(len(patches), (size,), **how)
    words = torch.randint(CAPTIONS_EACH, (size,), **how)
    dropped = torch.rand(size, **how) < DROPPED
    sigma = torch.randn(size, **how).sigmoid()  # SD3's logit-normal
    low, high = SCALES
    scale = low + (high - low) * torch.rand(size, **how)
    clean = patches[chosen]
    noise = torch.randn(clean.shape, **how)
    noisy = torch.lerp(clean, noise, sigma[:, None, None])
    asked = torch.where(dropped, len(clip) - 1, chosen)
    return _Batch(noisy, noise - clean, sigma, scale, clip[asked, words], t5[asked, words])


@torch.no_grad()
def _guided(teacher: Flow, batch: _Batch, no_clip: Tensor, no_t5: Tensor) -> Tensor:
    """Classifier-free guidance of the teacher: away from what it would draw without a caption."""
    one = torch.ones_like(batch.scale)
    told = teacher(batch.noisy, batch.sigma, one, batch.clip, batch.t5).float()
    nothing = (ids.expand_as(batch.clip).contiguous() for ids in (no_clip, no_t5))  # as the told ones lie in memory
    untold = teacher(batch.noisy, batch.sigma, one, *nothing).float()
    return untold + batch.scale[:, None, None] * (told - untold)


@torch.no_grad()
def _follow(mean: nn.Module, model: nn.Module, kept: float) -> None:
    theirs = [value.detach() for value in model.parameters()]
    torch._foreach_lerp_(list(mean.parameters()), theirs, 1 - kept)


def score(
    folder: Path, count: int, seed: int, device: torch.device, steps: int = 16, scale: float = DRAWN_AT
) -> dict[str, Any]:
    """Fulfilment of held-out prompts by the saved pipeline, and chance: the same images with other prompts."""
    from diffusers import FluxPipeline

    pipeline: Any = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32).to(device)
    pipeline.set_progress_bar_config(disable=True)
    prompts = [caption(make_scene(seed, HELD_OUT + at), seed, at) for at in range(count)]
    images: list[Any] = []
    for start in range(0, count, 64):
        asked = prompts[start : start + 64]
        generators = [torch.Generator().manual_seed(start + at) for at in range(len(asked))]
        images += pipeline(
            asked, height=SIDE, width=SIDE, num_inference_steps=steps, guidance_scale=scale, generator=generators,
            max_sequence_length=PROMPT_TOKENS,
        ).images  # fmt: skip
    found = [fulfilment(image, prompt) for image, prompt in zip(images, prompts, strict=True)]
    others = [fulfilment(image, prompt).score for image, prompt in zip(images, prompts[1:] + prompts[:1], strict=True)]
    names = sorted({name for one in found for name in one.parts})
    parts = {name: float(np.mean([one.parts[name] for one in found if name in one.parts])) for name in names}
    return {
        "fulfilment": float(np.mean([one.score for one in found])),
        "exact": float(np.mean([one.score == 1.0 for one in found])),
        "chance": float(np.mean(others)),
        "parts": parts,
        "prompts": count,
        "steps": steps,
        "guidance_scale": scale,
    }


if __name__ == "__main__":
    main()
