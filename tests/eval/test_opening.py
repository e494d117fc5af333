"""Claims about evaluating through an engine that is not transformers: the same records, resumed, compared, refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_vllm
import pytest
from brain import Brain
from fake_server import Faults, Server, serving

from halfbyte.eval import vllm as vllm_module
from halfbyte.eval.evaluate import settings_key
from halfbyte.eval.opening import open_backend, require_two_endpoints
from halfbyte.main import main
from halfbyte.quant.load import describe_as_it_is
from halfbyte.recipes.schema import EvaluateSpec, ServerSpec, TaskSpec
from halfbyte.records.errors import UserError
from halfbyte.records.record import EvaluationRecord, load_record, read_samples
from halfbyte.reports.pairing import pair

ENGINES = ("vllm", "sglang", "vllm")
TASKS = "tiny_choice,tiny_generate,tiny_rolling"


@pytest.fixture
def server(tiny_llama: Any, tiny_tokenizer: Any) -> Iterator[Server]:
    """The fake server."""
    with serving(Brain(tiny_llama, tiny_tokenizer)) as running:
        yield running


def _eval(model: Path, output: Path, *options: str, tasks: str = TASKS) -> int:
    settings = [text for option in options for text in ("--set", option)]
    return main(
        ["eval", str(model), "--tasks", tasks, "--output", str(output), "--device", "cpu", "--quiet", *settings]
    )


def _on(server: Server) -> list[str]:
    return [
        "evaluate.backend=server", f"evaluate.server.base_url={server.url}/v1", "evaluate.server.concurrency=2",
        "evaluate.server.retries=0",
    ]  # fmt: skip


def _answers(folder: Path, record: EvaluationRecord) -> dict[Any, Any]:
    return {sample.key: (sample.metrics, sample.generated, sample.asked) for sample in read_samples(folder, record)}


@pytest.mark.usefixtures("tiny_tasks", "cache")
def test_hf_server_and_vllm_give_the_same_records(
    server: Server, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    tiny_llama: Any, tiny_tokenizer: Any,
) -> None:  # fmt: skip
    module, _ = fake_vllm.make(Brain(tiny_llama, tiny_tokenizer))
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_module, "version", lambda _: "9.9")
    length = "evaluate.max_length=500"
    assert _eval(tiny_model_folder, tmp_path / "hf", length) == 0
    assert _eval(tiny_model_folder, tmp_path / "server", length, *_on(server)) == 0
    assert _eval(tiny_model_folder, tmp_path / "vllm", length, "evaluate.backend=vllm") == 0
    for task in TASKS.split(","):
        records = {name: load_record(tmp_path / name / task) for name in ("hf", "server", "vllm")}
        hf = records.pop("hf")
        assert hf.fingerprint.engine is None
        for name, record in records.items():
            assert record.fingerprint.backend == name
            assert record.fingerprint.engine == "vllm 9.9"
            assert record.model == hf.model
            assert record.health == hf.health
            for field in ("subtasks", "bos_per_prompt", "max_length", "chat_template", "seeds"):
                assert getattr(record.fingerprint, field) == getattr(hf.fingerprint, field)
            ours, theirs = (_answers(tmp_path / side / task, one) for side, one in (("hf", hf), (name, record)))
            assert ours.keys() == theirs.keys()
            for key, (metrics, *proof) in theirs.items():
                assert proof == list(ours[key][1:])
                assert metrics == pytest.approx(ours[key][0], abs=1e-4)
            with pytest.raises(UserError, match="backend is 'hf'"):
                pair(tmp_path / "hf" / task, tmp_path / name / task)


@pytest.fixture
def cut(
    tiny_llama: Any, tiny_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path, tiny_tasks: Path, cache: Path
) -> Any:
    """Goes on, at a server with some faults, with an evaluation whose server failed near its end.

    Gives the completions that a whole evaluation asks for, and those that were still asked for.
    """
    assert tiny_tasks.is_dir()
    assert not cache.exists()
    brain = Brain(tiny_llama, tiny_tokenizer)

    def evaluate(server: Server, name: str, *options: str) -> int:
        return _eval(tiny_model_folder, tmp_path / name, *_on(server), *options, tasks="tiny_generate")

    def run(faults: Faults) -> tuple[int, int]:
        with serving(brain) as whole:
            assert evaluate(whole, "whole") == 0
        asked = _completions(whole)
        with serving(brain, Faults(fails_after=asked - 5)) as first:
            assert evaluate(first, "cut", "evaluate.seed=1") == 2
        with serving(brain, faults) as second:
            assert evaluate(second, "cut", "evaluate.seed=1") == 0
        return asked, _completions(second)

    return run


def test_an_evaluation_goes_on_when_the_server_is_back_at_another_address(
    cut: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked, still = cut(Faults())
    assert "answers 500: CUDA error" in capsys.readouterr().err
    assert 0 < still < asked - 8
    folders = [tmp_path / name / "tiny_generate" for name in ("whole", "cut")]
    one, two = (_answers(folder, load_record(folder)) for folder in folders)
    assert one == two


def test_answers_of_two_engines_do_not_meet_in_one_record(cut: Any) -> None:
    asked, still = cut(Faults(owner="sglang"))
    assert still == asked


@pytest.mark.usefixtures("tiny_tasks", "cache")
def test_a_cached_baseline_is_that_of_the_engine_which_answered(
    tiny_llama: Any, tiny_tokenizer: Any, tiny_model_folder: Path, tmp_path: Path
) -> None:
    brain = Brain(tiny_llama, tiny_tokenizer)

    def evaluate(server: Server, name: str) -> int:
        assert _eval(tiny_model_folder, tmp_path / name, *_on(server), tasks="tiny_generate") == 0
        return _completions(server)

    def served(name: str) -> str | None:
        return load_record(tmp_path / name / "tiny_generate").served

    with serving(brain) as one, serving(brain, Faults(owner="sglang")) as other, serving(brain) as same:
        asked = evaluate(one, "one")
        assert evaluate(other, "other") == asked
        assert evaluate(same, "same") == 0, "the first engine's record was there"
        assert evaluate(one, "again") == asked
    assert [served(name) for name in ("one", "other", "same")] == [f"{name} 9.9: tiny" for name in ENGINES]
    evaluate(one, "down")  # the server is gone, and the record is there
    never_up = Server("http://127.0.0.1:9", Faults())
    assert _eval(tiny_model_folder, tmp_path / "none", *_on(never_up), tasks="tiny_generate") == 2


def _completions(server: Server) -> int:
    return sum(path == "/v1/completions" for path, _ in server.asked)


@pytest.mark.usefixtures("tiny_tasks", "cache")
@pytest.mark.parametrize(("no_tokenize", "known"), [(False, True), (True, False)])
def test_the_template_a_server_applies_is_in_the_record_or_said_to_be_unknown(
    server: Server, tiny_model_folder: Path, tmp_path: Path, no_tokenize: bool, known: bool
) -> None:
    server.faults.no_tokenize = no_tokenize
    options = ["evaluate.apply_chat_template=true", "evaluate.server.api=chat", *_on(server)]
    for side in ("one", "two"):
        assert _eval(tiny_model_folder, tmp_path / side, *options, f"evaluate.seed={len(side)}",
                     tasks="tiny_generate") == 0  # fmt: skip
    hf = tmp_path / "hf"
    assert _eval(tiny_model_folder, hf, "evaluate.apply_chat_template=true", tasks="tiny_generate") == 0
    folders = [tmp_path / side / "tiny_generate" for side in ("one", "two")]
    ours, reference = load_record(folders[0]).fingerprint, load_record(hf / "tiny_generate").fingerprint
    assert (ours.chat_template == reference.chat_template) is known
    assert (ours.bos_per_prompt == reference.bos_per_prompt) is known
    if known:
        pair(*folders)
    else:
        assert ours.chat_template == "unknown"
        with pytest.raises(UserError, match="chat_template"):
            pair(*folders)


def test_where_a_model_is_served_is_no_part_of_a_records_key() -> None:
    spec = TaskSpec(task="any")
    keys = set()
    for server in (
        ServerSpec(base_url="http://a:1/v1"),
        ServerSpec(base_url="http://b:2/v1", model="x", concurrency=3, timeout=5, retries=0, api_key_env="KEY"),
    ):
        settings = EvaluateSpec(backend="server", server=server, tasks=[spec])
        keys.add(settings_key(spec, settings, "0", device="server", dtype="server", served="vllm 9.9: x"))
    assert len(keys) == 1
    settings = EvaluateSpec(
        backend="server",
        server=ServerSpec(base_url="http://a:1/v1", api="chat"),
        apply_chat_template=True,
        tasks=[spec],
    )
    assert settings_key(spec, settings, "0", device="server", dtype="server", served="vllm 9.9: x") not in keys


def test_a_run_needs_two_served_models() -> None:
    def settings(**server: Any) -> EvaluateSpec:
        spec = ServerSpec(base_url="http://localhost:1/v1", **server)
        return EvaluateSpec(backend="server", server=spec, tasks=[TaskSpec(task="any")])

    require_two_endpoints(EvaluateSpec(tasks=[TaskSpec(task="any")]))
    require_two_endpoints(settings(candidate_url="http://localhost:2/v1"))
    require_two_endpoints(settings(candidate_model="candidate"))
    with pytest.raises(UserError, match="a run asks two models"):
        require_two_endpoints(settings())


def test_the_candidate_is_asked_under_its_own_name(server: Server, tiny_model_folder: Path) -> None:
    server.faults.models = ("tiny", "tiny-fp8")
    spec = server.spec(model="tiny", candidate_model="tiny-fp8")
    settings = EvaluateSpec(backend="server", server=spec, tasks=[TaskSpec(task="any")])
    described = describe_as_it_is(str(tiny_model_folder))
    names = [open_backend(settings, described, candidate=side).served.model for side in (False, True)]  # type: ignore[union-attr]
    assert names == ["tiny", "tiny-fp8"]


def test_a_server_with_another_model_of_this_machine_is_refused(
    server: Server, tiny_model_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"other": 1}), encoding="utf-8")
    settings = EvaluateSpec(backend="server", server=server.spec(), tasks=[TaskSpec(task="any")])
    described = describe_as_it_is(str(tiny_model_folder))
    server.faults.path = str(tiny_model_folder)
    open_backend(settings, described)
    server.faults.path = str(other)
    with pytest.raises(UserError, match=r"serves .*other, which is not"):
        open_backend(settings, described)


@pytest.mark.usefixtures("tiny_tasks", "cache")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["evaluate.backend=server"], "backend server and a server block belong together"),
        (["evaluate.server.base_url=http://x/v1"], "backend server and a server block belong together"),
        (["evaluate.backend=server", "evaluate.server.base_url=localhost:8000"], "base_url"),
        (["evaluate.backend=server", "evaluate.server.base_url=http://me:secret@x/v1"], "holds a user or password"),
        (["evaluate.backend=server", "evaluate.server.base_url=me:secret@x/v1"], "holds a user or password"),
        (["evaluate.backend=server", "evaluate.server.url=http://x/v1"], "unknown field 'evaluate.server.url'"),
        (["evaluate.vllm.seed=1"], "arguments of vllm belong to backend vllm"),
        (["evaluate.backend=server", "evaluate.server={base_url: http://x/v1, api: chat}"], "set apply_chat_template"),
    ],
)  # fmt: skip
def test_a_backend_that_is_not_wholly_named_is_one_line(
    tiny_model_folder: Path, tmp_path: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _eval(tiny_model_folder, tmp_path / "out", *options) == 2
    message = capsys.readouterr().err
    assert reason in message
    assert "Traceback" not in message
    assert "secret" not in message
