"""The small Flux before and while it is trained; none of these needs trained weights."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("diffusers")

from small_flux import train
from small_flux.model import PROMPT_TOKENS, captions, make_pipeline
from small_flux.shapes import SIDE, caption, make_scene

CPU = torch.device("cpu")


def options(**more: Any) -> argparse.Namespace:
    """A training of no time."""
    given = {
        "seed": 0, "drawn": 24, "batch": 4, "vae_steps": 3, "flow_steps": 3, "guidance_steps": 2,
        "learning_rate": 1e-3, "save_every": 0.0, "minutes": None, "bf16": False, "compile": False,
    }  # fmt: skip
    return argparse.Namespace(**{**given, **more})


@pytest.fixture(scope="module")
def untrained() -> Any:
    return make_pipeline(0)


@pytest.fixture(scope="module")
def drawn(untrained: Any) -> train.Drawn:
    return train.draw_all(untrained, 24, 0)


def test_it_is_at_most_12_mb_in_bfloat16_with_blocks_of_every_format(untrained: Any) -> None:
    parts = [untrained.transformer, untrained.vae, untrained.text_encoder, untrained.text_encoder_2]
    assert 3e6 < sum(value.numel() for part in parts for value in part.parameters()) < 5.7e6
    blocks = [*untrained.transformer.transformer_blocks, *untrained.transformer.single_transformer_blocks]
    linears = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 4 * 14 + 6 * 6
    assert all(module.in_features % 128 == 0 and module.out_features % 128 == 0 for module in linears)


def test_both_tokenizers_know_all_words_of_the_captions(untrained: Any) -> None:
    for text in captions(500):
        clip, t5 = untrained.tokenizer(text).input_ids, untrained.tokenizer_2(text).input_ids
        assert max(len(clip), len(t5)) < PROMPT_TOKENS
        assert untrained.tokenizer_2.unk_token_id not in t5
        assert len(clip) - 2 == len(text.replace(".", " .").split())
        assert t5[-1] == untrained.tokenizer_2.eos_token_id
    assert untrained.tokenizer("画").input_ids[1:-1]  # bytes


def test_it_draws_and_the_same_seed_draws_the_same(untrained: Any) -> None:
    untrained.set_progress_bar_config(disable=True)
    settings = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, "max_sequence_length": PROMPT_TOKENS}
    first, second = (
        untrained("a red circle", generator=torch.Generator().manual_seed(3), **settings).images[0] for _ in range(2)
    )
    assert first.size == (SIDE, SIDE)
    assert first.tobytes() == second.tobytes()


def test_the_vae_scales_its_latents_to_mean_0_and_deviation_1(tmp_path: Path, drawn: train.Drawn) -> None:
    vae = make_pipeline(0).vae
    train.train_vae(vae, drawn, options(), tmp_path, CPU)
    latents = train.encode(vae, drawn.pictures, CPU)
    assert latents.shape == (24, 4, SIDE // 4, SIDE // 4)
    assert abs(float(latents.mean())) < 1e-3
    assert float(latents.std()) == pytest.approx(1.0, abs=1e-3)


def trained(folder: Path, drawn: train.Drawn, **more: Any) -> dict[str, torch.Tensor]:
    """The weights after a whole training."""
    folder.mkdir(exist_ok=True)
    pipeline, given = make_pipeline(0), options(**more)
    train.train_vae(pipeline.vae, drawn, given, folder, CPU)
    latents = train.encode(pipeline.vae, drawn.pictures, CPU)
    train.train_flow(pipeline, latents, drawn, given, folder, CPU)
    parts = {"vae": pipeline.vae, "t5": pipeline.text_encoder_2, "transformer": pipeline.transformer}
    return {f"{part}.{name}": value for part, model in parts.items() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("at", [2, 5, 7])  # a step of the VAE, of the flow, of the guidance
def test_an_interrupted_training_ends_as_one_that_was_not(
    tmp_path: Path, drawn: train.Drawn, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    whole = trained(tmp_path / "whole", drawn)
    calls, update = 0, train._update

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == at + 1:
            raise KeyboardInterrupt
        update(*arguments)

    monkeypatch.setattr(train, "_update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "resumed", drawn)
    resumed = trained(tmp_path / "resumed", drawn)
    assert calls == 3 + 3 + 2 + 1  # nothing was done twice, but the step that was cut short
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_pipeline_draws_by_the_caption_what_the_flow_was_trained_on(tmp_path: Path) -> None:
    """Two pictures by heart: sigmas, patches and scales of the training are those that FluxPipeline draws by."""
    pipeline = make_pipeline(1)
    drawn = train.draw_all(pipeline, 2, 0)
    latents = torch.randn(2, 4, SIDE // 4, SIDE // 4, generator=torch.Generator().manual_seed(0))
    given = options(batch=4, flow_steps=240, guidance_steps=4, learning_rate=2e-3, save_every=1e9)
    train.train_flow(pipeline, latents, drawn, given, tmp_path, CPU)
    pipeline.set_progress_bar_config(disable=True)
    wanted = pipeline._pack_latents(latents, 2, 4, SIDE // 4, SIDE // 4)
    for number in range(2):
        found = pipeline(
            caption(make_scene(0, number), 0, number * train.CAPTIONS_EACH), height=SIDE, width=SIDE,
            num_inference_steps=16, guidance_scale=3.5, max_sequence_length=PROMPT_TOKENS,
            generator=torch.Generator().manual_seed(5), output_type="latent",
        ).images  # fmt: skip
        near = (found - wanted).square().mean(dim=(1, 2))
        assert near[number] < 0.4 * near[1 - number]
