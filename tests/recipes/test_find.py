"""Recipes are found by name or path, laid over their base, overridden, and refused with one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.recipes.find import (
    find_recipe,
    list_recipes,
    load_recipe,
    recipe_digest,
    recipe_text,
    resolved_yaml,
    shipped_files,
    with_limit,
)
from halfbyte.records.errors import UserError

WHOLE = """\
name: mine
description: A recipe for the tests.
model: {id: some/model}
quantize:
  preset: FP8_DEFAULT_CFG
  calibration: {sources: [{dataset: texts.txt}]}
evaluate:
  tasks: [{task: arc_easy}, {task: gsm8k, num_fewshot: 5}]
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "folder" / "mine.yaml"
    path.parent.mkdir()
    path.write_text(WHOLE, encoding="utf-8")
    return path


def refusal(name: str | Path, *overrides: str) -> UserError:
    with pytest.raises(UserError) as caught:
        load_recipe(str(name), overrides)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", shipped_files())
def test_every_shipped_recipe_is_valid_and_says_how_to_run_it(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe_text(name).startswith(f"# halfbyte run {name} ")


def test_shipped_names_are_unique_across_the_folders() -> None:
    root = Path(str(next(iter(shipped_files().values())).parent.parent))
    stems = [path.stem for kind in ("llm", "image") for path in (root / kind).glob("*.yaml")]
    assert sorted(stems) == list(shipped_files())
    assert [name for name, _ in list_recipes()] == list(shipped_files())


def test_the_shipped_demo_recipes_bring_their_texts() -> None:
    recipe = load_recipe("demo-nvfp4")
    assert recipe.evaluate.fidelity is not None
    calibration = Path(recipe.quantize.calibration.sources[0].dataset)
    fidelity = Path(recipe.evaluate.fidelity.source.dataset)
    lines = calibration.read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines) >= recipe.quantize.calibration.sources[0].samples
    assert not set(lines) & set(fidelity.read_text(encoding="utf-8").splitlines())


def test_a_copy_of_a_shipped_recipe_finds_its_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(recipe_text("demo-fp8"), encoding="utf-8")
    assert load_recipe(str(copy)) == load_recipe("demo-fp8")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo-calibration.txt").write_text("My own.", encoding="utf-8")
    (own,) = load_recipe(str(copy)).quantize.calibration.sources
    assert own.dataset == str(tmp_path / "demo-calibration.txt")


def test_a_recipe_does_not_take_the_description_of_its_base(tmp_path: Path) -> None:
    over = tmp_path / "over.yaml"
    over.write_text("base: demo-fp8\nname: over\nquantize: {preset: nvfp4}\n", encoding="utf-8")
    assert load_recipe(str(over)).description == "demo-fp8 with quantize.preset nvfp4."


def test_a_name_is_found_with_and_without_its_folder() -> None:
    assert find_recipe("demo-fp8") == find_recipe("llm/demo-fp8")
    with pytest.raises(UserError, match="unknown recipe 'image/demo-fp8'"):
        find_recipe("image/demo-fp8")


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    error = refusal("demo-fp9")
    assert error.message == "unknown recipe 'demo-fp9'"
    assert error.hint is not None
    assert error.hint.startswith("did you mean 'demo-fp8'? known: ")
    assert ", demo-fp8, " in error.hint


def test_a_path_ends_in_yaml_and_must_exist(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.yaml").message


def test_the_resolved_recipe_reads_back_to_an_equal_one(tmp_path: Path) -> None:
    recipe = load_recipe("smollm2-135m-nvfp4-kv-fp8", ["evaluate.seed=7"])
    path = tmp_path / "recipe.yaml"
    path.write_text(resolved_yaml(recipe), encoding="utf-8")
    assert load_recipe(str(path)) == recipe


def test_a_recipe_is_laid_over_its_base_and_the_base_of_that() -> None:
    recipe = load_recipe("smollm2-135m-nvfp4-kv-fp8")
    assert (recipe.quantize.preset, recipe.quantize.kv_cache) == ("NVFP4_DEFAULT_CFG", "fp8")
    assert recipe.evaluate == load_recipe("smollm2-135m-fp8").evaluate


def test_a_base_may_be_a_file_beside_the_recipe_with_paths_of_its_own(mine: Path) -> None:
    (mine.parent / "texts.txt").write_text("one\n", encoding="utf-8")
    other = mine.parent / "deeper" / "other.yaml"
    other.parent.mkdir()
    other.write_text("base: ../mine.yaml\nname: other\n", encoding="utf-8")
    recipe = load_recipe(str(other))
    assert recipe.quantize.calibration.sources[0].dataset == str(mine.parent / "texts.txt")


def test_recipes_that_are_each_others_base_are_refused(mine: Path) -> None:
    mine.write_text("base: mine.yaml\n", encoding="utf-8")
    assert "each other's base" in refusal(mine).message


def test_a_path_that_is_not_beside_the_recipe_is_left_to_the_current_folder(mine: Path) -> None:
    assert load_recipe(str(mine)).quantize.calibration.sources[0].dataset == "texts.txt"


def test_a_folder_beside_the_recipe_is_a_model_but_never_a_data_set_or_policy(mine: Path) -> None:
    for name in ("some/model", "release", "texts.txt"):
        (mine.parent / name).mkdir(parents=True)
    recipe = load_recipe(str(mine))
    assert recipe.model.id == str(mine.parent / "some" / "model")
    assert recipe.gate.policy == "release"
    assert recipe.quantize.calibration.sources[0].dataset == "texts.txt"


def test_overrides_reach_fields_and_list_elements(mine: Path) -> None:
    recipe = load_recipe(
        str(mine),
        [
            "evaluate.tasks.0.limit=100",
            "evaluate.tasks[1].num_fewshot=8",
            "evaluate.tasks.1.gen_kwargs={temperature: 6e-1}",
            "model.revision=a=b",
            "model.gguf_file=null",
            "quantize.calibration.sources=[{dataset: other.jsonl}]",
        ],
    )
    assert (recipe.evaluate.tasks[0].limit, recipe.evaluate.tasks[1].limit) == (100, None)
    assert recipe.evaluate.tasks[1].num_fewshot == 8
    assert recipe.evaluate.tasks[1].gen_kwargs == {"temperature": 0.6}
    assert recipe.model.revision == "a=b"
    assert [source.dataset for source in recipe.quantize.calibration.sources] == ["other.jsonl"]


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("evaluate.tsaks=3", "--set: unknown field 'evaluate.tsaks'", "did you mean 'tasks'?"),
        ("evaluate.tasks.0.limt=3", "--set: unknown field 'evaluate.tasks.0.limt'", "did you mean 'limit'?"),
        ("quantize.calibration.sources.0.sample=3", "--set: unknown field", "did you mean 'samples'?"),
        ("evaluate.tasks[0].limit=0", "--set: evaluate.tasks.0.limit is 0: it should be greater than or equal", ""),
        ("evaluate.dtype=bf16", "--set: evaluate.dtype is \"bf16\": it should be 'auto', 'bfloat16'", ""),
        ("evaluate.tasks.9.limit=1", "--set evaluate.tasks.9.limit=1 does not fit the recipe", ""),
        ("quantize.recipe=a/b", "--set: quantize: give exactly one of recipe, preset, quant_cfg", ""),
        ("model=null", "--set: model is null: it should be a mapping", ""),
        ("train={method: qat}", "--set: train: give exactly one of sources, sampled", ""),
        ("train={method: qap}", "--set: train.method is \"qap\": it should be 'qat' or 'qad'", ""),
        (
            "train={method: qad, learning_rte: 1}",
            "--set: unknown field 'train.learning_rte'",
            "did you mean 'learning_rate'",
        ),
        (
            "train={method: qad, sources: [{dataset: a.txt, promt_field: a}]}",
            "--set: unknown field 'train.sources.0",
            "",
        ),
        ("name=a/b", '--set: name is "a/b": it should match pattern', ""),
        ("model.id=[", "--set model.id=[: the value is not valid YAML", "quote"),
        ("model.id=${x}", "--set model.id=${x} does not fit the recipe", ""),
        ("evaluate", "--set evaluate is not of the form field=value", "for example"),
        ("=3", "--set =3 is not of the form field=value", "for example"),
    ],
)
def test_a_wrong_override_is_refused_in_one_line(mine: Path, override: str, message: str, hint: str) -> None:
    error = refusal(mine, override)
    assert error.message.startswith(message)
    assert (error.hint or "").startswith(hint)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no recipe"),
        ("- a\n- b\n", "holds no recipe"),
        ("just text\n", "unknown field 'just text'"),
        ("name: mine\nmodel: {id: x\n", ":3: not valid YAML"),
        ("name: mine\nname: mine\n", ":2: not valid YAML"),
        ("\tname: mine\n", ":1: not valid YAML"),
        ("name: ${\n", "mine.yaml: "),
        ("base: 3\n", "base is 3"),
        ("base: no-such\n", "unknown recipe 'no-such'"),
        (WHOLE.replace("evaluate:", "evalute:"), "unknown field 'evalute'"),
        (WHOLE.replace("model: {id: some/model}", ""), "field 'model' is missing"),
        (WHOLE.replace("arc_easy}", "arc_easy, limit: many}"), 'evaluate.tasks.0.limit is "many": it should be'),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(mine: Path, content: str, message: str) -> None:
    mine.write_text(content, encoding="utf-8")
    assert message in refusal(mine).message


def test_a_file_that_is_not_utf8_is_refused(mine: Path) -> None:
    mine.write_bytes(b"name: caf\xe9\n")
    assert "is not UTF-8" in refusal(mine).message


def test_the_number_of_further_problems_is_told(mine: Path) -> None:
    mine.write_text("name: mine\n", encoding="utf-8")
    assert "3 more after this one" in str(refusal(mine))


def test_with_limit_cuts_every_task(mine: Path) -> None:
    recipe = load_recipe(str(mine))
    assert [task.limit for task in with_limit(recipe, 5).evaluate.tasks] == [5, 5]
    assert with_limit(recipe, None) == recipe


def test_the_digest_follows_content_and_not_place_or_description(mine: Path, tmp_path: Path) -> None:
    (mine.parent / "texts.txt").write_text("one\n", encoding="utf-8")
    first = recipe_digest(load_recipe(str(mine)))
    copy = tmp_path / "elsewhere" / "copy.yaml"
    copy.parent.mkdir()
    copy.write_text(WHOLE.replace("A recipe for", "Another for"), encoding="utf-8")
    (copy.parent / "texts.txt").write_text("one\n", encoding="utf-8")
    assert recipe_digest(load_recipe(str(copy))) == first
    (copy.parent / "texts.txt").write_text("two!\n", encoding="utf-8")
    assert recipe_digest(load_recipe(str(copy))) != first
    assert recipe_digest(load_recipe(str(mine), ["evaluate.seed=1"])) != first


@pytest.mark.parametrize(
    "override",
    ["evaluate.tasks.0.limit=true", "evaluate.seed=-1", "evaluate.batch_size=8.0", "evaluate.tasks.0.task=a/b"],
)
def test_a_value_that_would_be_misread_is_refused(override: str) -> None:
    with pytest.raises(UserError, match=rf"--set: {override.partition('=')[0]} is "):
        load_recipe("demo-fp8", [override])


@pytest.mark.parametrize("value", [".inf", ".nan"])
def test_a_threshold_that_is_no_finite_number_is_refused(value: str, mine: Path) -> None:
    assert "evaluate.canary.max_kl" in refusal(mine, f"evaluate.canary.max_kl={value}").message


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("max_gen_toks: 0", "a whole number of at least 1"),
        ("max_gen_toks: 1.5", "a whole number of at least 1"),
        ("max_length: 100", "left out for max_gen_toks"),
        ("temperature: hot", "a number of at least 0"),
        ("temperature: -1", "a number of at least 0"),
        ("temperature: .nan", "no number"),
        ("top_p: 0", "a number above 0 and up to 1"),
        ("top_k: 2.5", "a whole number"),
        ("repetition_penalty: 0", "a number above 0"),
        ("do_sample: 'no'", "true or false"),
        ("until: 5", "a text or a list of texts"),
    ],
)
def test_generation_settings_that_would_be_dropped_or_replaced_are_refused(mine: Path, setting: str, what: str) -> None:
    name = setting.partition(":")[0]
    with pytest.raises(UserError, match=rf"gen_kwargs\.{name} is .*{what}"):
        load_recipe(str(mine), [f"evaluate.tasks.0.gen_kwargs={{{setting}}}"])
