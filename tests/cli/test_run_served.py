"""A run whose two models are served: it stops until the candidate is, and goes on with the same command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from brain import Brain
from fake_server import Faults, Server, serving
from line import write_recipe

from halfbyte.main import main
from halfbyte.quant.load import load_as_it_is
from halfbyte.records.record import find_records, load_record


def completions(server: Server) -> int:
    """The questions a server was asked."""
    return sum(path == "/v1/completions" for path, _ in server.asked)


@pytest.mark.usefixtures("cache")
def test_a_run_waits_for_its_candidate_to_be_served(
    tmp_path: Path, tiny_llama: Any, tiny_tokenizer: Any, tiny_model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = write_recipe(tmp_path / "recipe", tiny_model_folder)
    with serving(Brain(tiny_llama, tiny_tokenizer), Faults(owner="engine")) as baseline:
        command = ["run", str(recipe), "--output", str(tmp_path / "runs"), "--device", "cpu", "--quiet"]
        command += ["--set", "evaluate.fidelity=null", "--set", "evaluate.backend=server"]
        served = {"base_url": f"{baseline.url}/v1", "concurrency": "2", "retries": "0"}
        command += [part for name, value in served.items() for part in ("--set", f"evaluate.server.{name}={value}")]
        assert main(command) == 2
        assert "a run asks two models" in capsys.readouterr().err
        nobody = "http://127.0.0.1:9/v1"  # the port of the discard service
        assert main([*command, "--set", f"evaluate.server.candidate_url={nobody}"]) == 2
        assert f"no server answers at {nobody}/models" in capsys.readouterr().err
        asked = completions(baseline)
        run = tmp_path / "runs" / "tiny-nvfp4"
        candidate = load_as_it_is(str(run / "checkpoint"), device="cpu")
        with serving(Brain(candidate.model, candidate.tokenizer), Faults(owner="engine")) as other:
            assert main([*command, "--set", f"evaluate.server.candidate_url={other.url}/v1"]) in (0, 1, 3)
        assert completions(baseline) == asked, "the baseline's record was kept"
    records = [load_record(path) for folder in run.glob("evaluations/*") for path in find_records(folder).values()]
    assert {record.served for record in records} == {"engine 9.9: tiny"}
    assert {record.fingerprint.engine for record in records} == {"engine 9.9"}
    assert len({record.model.digest for record in records}) == 2
