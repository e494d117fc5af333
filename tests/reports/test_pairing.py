"""Claims about pairing: what is not comparable is refused, and the first difference is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from record_factory import Edit, digest, model, write_record

from halfbyte.records.errors import UserError
from halfbyte.reports.differences import Incomparable
from halfbyte.reports.pairing import pair

VALUES = [1.0, 0.0, 1.0, 1.0, 0.0, 1.0]


def both(tmp_path: Path, baseline: dict[str, Any] | None = None, candidate: dict[str, Any] | None = None) -> Any:
    """Pairs two records of the same questions, with changes."""
    first = {"values": VALUES, **(baseline or {})}
    second = {"values": VALUES, "format": "NVFP4", **(candidate or {})}
    write_record(tmp_path / "baseline", first.pop("values"), **first)
    write_record(tmp_path / "candidate", second.pop("values"), **second)
    return pair(tmp_path / "baseline", tmp_path / "candidate")


def refused(tmp_path: Path, baseline: dict[str, Any] | None = None, candidate: dict[str, Any] | None = None) -> str:
    with pytest.raises(UserError) as error:
        both(tmp_path, baseline, candidate)
    return str(error.value)


def test_questions_are_paired_by_doc_id_whatever_their_order_in_the_file(tmp_path: Path) -> None:
    pairs = both(tmp_path, candidate={"values": [0.0, *VALUES[1:]], "edit": lambda lines: lines[::-1]})
    assert pairs.baseline_values.tolist() == VALUES
    assert pairs.candidate_values.tolist() == [0.0, *VALUES[1:]]
    assert [key[2] for key in pairs.keys] == list(range(6))
    assert not pairs.same_model


def test_the_answers_of_flipped_questions_are_kept_and_no_others(tmp_path: Path) -> None:
    pairs = both(tmp_path, candidate={"values": [0.0, *VALUES[1:]]})
    assert list(pairs.lines) == [("colours", "none", 0)]
    ours, theirs = pairs.answers(("colours", "none", 0))
    assert (ours.question, ours.target.strip()) == ("colours 0?", "red")
    assert (ours.given.strip(), theirs.given.strip()) == ("red", "green")


def test_a_record_may_be_compared_with_itself_and_it_is_said(tmp_path: Path) -> None:
    assert both(tmp_path, candidate={"format": "bfloat16"}).same_model


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("num_fewshot", 0, 5),
        ("generation", {"temperature": 0.0, "until": ["\n"]}, {"temperature": 0.6, "until": ["\n"]}),
        ("version", "1.0", "2.0"),
        ("repeats", 1, 16),
        ("output_type", "multiple_choice", "generate_until"),
    ],
)
def test_different_settings_of_a_subtask_are_refused_by_name(
    tmp_path: Path, field: str, ours: Any, theirs: Any
) -> None:
    message = refused(tmp_path, {"subtask": {field: ours}}, {"subtask": {field: theirs}})
    assert f"{field} of colours is {ours!r} in the baseline and {theirs!r} in the candidate" in message


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("chat_template", None, "3f2a"),
        ("system_prompt", "aa", "bb"),
        ("limit", 6, None),
        ("bos_per_prompt", [0], [1]),
        ("max_length", 2048, 4096),
        ("backend", "hf", "vllm"),
        ("dtype", "float32", "bfloat16"),
        ("seeds", {"fewshot": 1234}, {"fewshot": 4321}),
    ],
)
def test_different_settings_of_the_run_are_refused_by_name(tmp_path: Path, field: str, ours: Any, theirs: Any) -> None:
    message = refused(tmp_path, {field: ours}, {field: theirs})
    assert f"not comparable: {field} is {ours!r} in the baseline and {theirs!r} in the candidate" in message


def test_settings_are_named_before_the_prompts_they_change(tmp_path: Path) -> None:
    message = refused(
        tmp_path, candidate={"subtask": {"num_fewshot": 5}, "questions": lambda i: f"five examples first, colours {i}?"}
    )
    assert "num_fewshot" in message


def test_different_questions_with_equal_indices_are_refused_with_the_first_shown(tmp_path: Path) -> None:
    long = "The same long beginning of a question, " * 20
    message = refused(
        tmp_path,
        {"questions": lambda i: f"{long}{i}?"},
        {"questions": lambda i: f"{long}{i}?" if i < 3 else f"{long}{i} another end?"},
    )
    assert "document of question 3 of colours" in message
    assert "another end" in message
    assert len(message) < 700


def test_a_different_target_alone_is_refused(tmp_path: Path) -> None:
    def wrong(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        lines[4] |= {"target": "2", "target_hash": digest("2")}
        return lines

    assert "the target of question 4 of colours is '0' in the baseline and '2'" in refused(
        tmp_path, candidate={"edit": wrong}
    )


def test_a_record_without_questions_is_refused(tmp_path: Path) -> None:
    assert "no answers to colours" in refused(tmp_path, {"values": []}, {"values": []})


def test_a_missing_samples_file_is_refused(tmp_path: Path) -> None:
    write_record(tmp_path / "baseline", VALUES)
    folder = write_record(tmp_path / "candidate", VALUES, format="NVFP4")
    next(folder.glob("samples_*.jsonl")).unlink()
    with pytest.raises(UserError, match="is missing from the record"):
        pair(tmp_path / "baseline", folder)


def test_a_reported_figure_that_is_not_the_mean_of_its_questions_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, candidate={"reported": 0.67})  # the mean is .6667: rounding is not allowed either
    assert "reported as 0.67, but the mean of its questions is 0.666667" in message


def test_a_metric_without_a_number_for_each_question_is_refused(tmp_path: Path) -> None:
    def pairs_of_numbers(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [line | {"acc": [-12.0, 5]} for line in lines]

    assert "no number for the metric acc" in refused(tmp_path, {"edit": pairs_of_numbers})


def test_a_group_is_paired_over_all_its_subtasks(tmp_path: Path) -> None:
    values = {"mmlu_anatomy": [1.0, 0.0], "mmlu_law": [1.0, 1.0, 0.0]}
    pairs = both(tmp_path, {"values": values, "task": "mmlu"}, {"values": values, "task": "mmlu"})
    assert [key[0] for key in pairs.keys] == ["mmlu_anatomy"] * 2 + ["mmlu_law"] * 3


def test_a_group_that_lost_a_subtask_is_refused(tmp_path: Path) -> None:
    message = refused(
        tmp_path, {"values": {"a": [1.0], "b": [1.0]}, "task": "mmlu"}, {"values": {"a": [1.0]}, "task": "mmlu"}
    )
    assert "the list of subtasks is ['a', 'b'] in the baseline and ['a'] in the candidate" in message


def test_different_primary_metrics_are_refused(tmp_path: Path) -> None:
    assert "different metrics" in refused(tmp_path, {"metric": "acc"}, {"metric": "acc_norm"})


def test_a_metric_with_opposite_directions_is_refused(tmp_path: Path) -> None:
    assert "different metrics" in refused(tmp_path, candidate={"higher_is_better": False})


def test_generated_answers_are_read_from_lm_evals_lines(tmp_path: Path) -> None:
    def generated(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            line["arguments"] = {"gen_args_0": {"arg_0": "Q: 1+1?\nA:", "arg_1": {"until": ["\n"]}}}
            line["target"] = "#### 2"
            line["resps"], line["filtered_resps"] = [["It is 2."]], ["2" if line["acc"] else "[invalid]"]
        return lines

    pairs = both(tmp_path, {"edit": generated}, {"values": [0.0, *VALUES[1:]], "edit": generated})
    ours, theirs = pairs.answers(("colours", "none", 0))
    assert (ours.target, ours.given, theirs.given) == ("#### 2", "2", "[invalid]")


def test_letters_are_shown_with_the_choices_they_stand_for(tmp_path: Path) -> None:
    def lettered(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:
            for letter, request in zip("ABCD", line["arguments"].values(), strict=True):
                request["arg_1"] = f" {letter}"
        return lines

    pairs = both(tmp_path, {"edit": lettered}, {"values": [0.0, *VALUES[1:]], "edit": lettered})
    ours, theirs = pairs.answers(("colours", "none", 0))
    assert ours.question == "colours 0?\nA. red\nB. green\nC. blue\nD. yellow"
    assert (ours.target, theirs.given) == ("A", "B")


def test_the_likeliest_choice_per_character_is_the_answer_under_acc_norm(tmp_path: Path) -> None:
    def scored(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for line in lines:  # red: -3 / 3 characters; yellow: -4 / 6 characters
            line["filtered_resps"] = [["-3.0", "False"], ["-9.0", "False"], ["-9.0", "False"], ["-4.0", "False"]]
        return lines

    sides: dict[str, Any] = {"edit": scored, "metric": "acc_norm"}
    pairs = both(tmp_path, sides, {"values": [0.0, *VALUES[1:]], **sides})
    assert pairs.answers(("colours", "none", 0))[0].given == "yellow"


def test_another_model_under_the_same_name_is_not_the_same_model(tmp_path: Path) -> None:
    other = model("NVFP4").model_copy(update={"digest": digest("other"), "name": model().name})
    assert not both(tmp_path, candidate={"of": other}).same_model


def test_settings_are_shown_side_by_side(tmp_path: Path) -> None:
    with pytest.raises(Incomparable) as error:
        both(tmp_path, {"dtype": "float32"}, {"dtype": "bfloat16", "subtask": {"num_fewshot": 5}})
    rows = str(error.value.details).splitlines()
    assert rows[0].split() == ["setting", "baseline", "candidate"]
    assert ["*", "dtype", "'float32'", "'bfloat16'"] in [row.split() for row in rows]
    assert ["*", "num_fewshot", "of", "colours", "0", "5"] in [row.split() for row in rows]
    assert ["backend", "'hf'", "'hf'"] in [row.split() for row in rows]


def test_the_first_differing_prompt_is_shown_as_a_diff(tmp_path: Path) -> None:
    def asked(ending: str) -> Edit:
        def edit(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
            for line in lines[2:]:
                prompt = f"First line\nSecond line{ending}\nThird line"
                line["arguments"] = {"gen_args_0": {"arg_0": prompt, "arg_1": " red"}}
                line["prompt_hash"] = digest(prompt)
            return lines

        return edit

    with pytest.raises(Incomparable, match="prompt of question 2 of colours") as error:
        both(tmp_path, {"edit": asked("")}, {"edit": asked(" with a system prompt")})
    rows = str(error.value.details).splitlines()
    assert rows[:2] == [
        "--- baseline: prompt of question 2 of colours",
        "+++ candidate: prompt of question 2 of colours",
    ]
    assert "-Second line" in rows
    assert "+Second line with a system prompt" in rows
    assert " Third line" in rows


def test_a_named_difference_may_be_allowed_and_is_kept_for_the_report(tmp_path: Path) -> None:
    write_record(tmp_path / "baseline", VALUES)
    write_record(
        tmp_path / "candidate",
        VALUES,
        format="NVFP4",
        backend="vllm",
        chat_template="3f2a",
        edit=lambda lines: [line | {"prompt_hash": digest(f"templated {line['doc_id']}")} for line in lines],
    )
    folders = tmp_path / "baseline", tmp_path / "candidate"
    with pytest.raises(UserError, match="chat_template"):
        pair(*folders, ["backend"])
    with pytest.raises(UserError, match="backend"):
        pair(*folders, ["chat_template"])
    found = pair(*folders, ["backend", "chat_template"])
    assert sorted(one.field for one in found.allowed) == ["backend", "chat_template"]


def test_other_documents_and_targets_are_never_allowed(tmp_path: Path) -> None:
    write_record(tmp_path / "baseline", VALUES)
    write_record(tmp_path / "candidate", VALUES, format="NVFP4", questions=lambda i: f"another {i}?")
    with pytest.raises(UserError, match="document of question 0"):
        pair(tmp_path / "baseline", tmp_path / "candidate", ["prompts", "documents", "targets"])


def test_lengths_of_generated_texts_are_counted_over_all_samples(tmp_path: Path) -> None:
    def generated(tokens: list[int | None]) -> Edit:
        return lambda lines: [line | {"generated": [{"tokens": count} for count in tokens]} for line in lines]

    def lengths(ours: list[int | None], theirs: list[int | None]) -> tuple[float | None, float | None]:
        sides = ({"edit": generated(tokens), "subtask": {"repeats": 2}} for tokens in (ours, theirs))
        return both(tmp_path, next(sides), next(sides)).lengths

    assert lengths([10, 20], [30, 31]) == (15.0, 30.5)
    assert lengths([10, None], [30, 31]) == (None, 30.5)
    with pytest.raises(UserError, match="has 3 samples, and its record speaks of 2"):
        lengths([10, 20], [30, 31, 32])


def test_a_line_whose_texts_hold_our_own_keys_is_read_whole(tmp_path: Path) -> None:
    def confusing(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
        trap = {"filter": "x", "metrics": ["acc"], "doc_hash": "1", "prompt_hash": "2", "target_hash": "3", "acc": 0.0}
        return [
            line | {"doc": {**line["doc"], "question": '", "filter": "none", "acc": 0.0', "trap": trap}}
            for line in lines
        ]

    pairs = both(tmp_path, {"edit": confusing}, {"edit": confusing})
    assert pairs.baseline_values.tolist() == VALUES


def test_lines_of_another_writer_are_read_too(tmp_path: Path) -> None:
    """lm-eval's order of keys is ours; another order only takes longer."""
    pairs = both(tmp_path, candidate={"edit": lambda lines: [dict(sorted(line.items())) for line in lines]})
    assert pairs.candidate_values.tolist() == VALUES
