"""Texts: seeded, identified by a digest, and a clear line for whatever is wrong with a source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.recipes import data
from halfbyte.recipes.schema import TextSource
from halfbyte.recipes.texts import load_rows, load_texts, require_local
from halfbyte.records.errors import UserError


def jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def source(path: Path, samples: int = 512, field: str | None = None) -> TextSource:
    return TextSource(dataset=str(path), samples=samples, field=field)


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    return jsonl(tmp_path / "numbered.jsonl", [{"id": i, "text": f"text {i}"} for i in range(50)])


def test_without_a_seed_the_first_texts_are_taken_in_order(numbered: Path) -> None:
    assert load_texts(source(numbered, 3)).texts == ["text 0", "text 1", "text 2"]


def test_a_seed_decides_the_sample(numbered: Path) -> None:
    one, again, other = (load_texts(source(numbered, 10), seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one.texts != other.texts
    assert one.digest != other.digest
    assert len(set(one.texts)) == 10


def test_blank_texts_are_left_out_of_samples_and_kept_in_the_whole(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "blank.jsonl", [{"text": " "}, {"text": "a"}, {"text": None}, {"text": "b"}])
    assert load_texts(source(path)).texts == ["a", "b"]
    assert load_texts(source(path), whole=True).texts == [" ", "a", "", "b"]


def test_a_text_file_holds_one_text_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("eins\n\nzwei mit ü\n", encoding="utf-8")
    assert load_texts(source(path)).texts == ["eins", "zwei mit ü"]


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "separator.jsonl", [{"text": "one\u2028still one"}])
    assert load_texts(source(path)).texts == ["one\u2028still one"]


def test_the_column_is_found_or_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "columns.jsonl", [{"answer": "4", "question": "2 + 2?"}])
    assert load_texts(source(path)).texts == ["2 + 2?"]
    assert load_texts(source(path, field="answer")).texts == ["4"]
    with pytest.raises(UserError, match=r"no column 'body' \(set field to one of its columns: answer, question\)"):
        load_texts(source(path, field="body"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("absent.txt", None, "does not exist"),
        ("empty.txt", b"", "is empty"),
        ("empty.jsonl", b"\n\n", "is empty"),
        ("blank.jsonl", b'{"text": "  "}\n', "holds no text"),
        ("latin.txt", "größe".encode("latin-1"), "not UTF-8: byte 2 is 0xf6"),
        ("half.jsonl", b'{"text": "a"}\n{"text": "\\ud800 b"}\n', r"half.jsonl:2 holds half of a surrogate pair"),
        ("broken.jsonl", b'{"text": "a"}\n{"text": \n', "broken.jsonl:2 is not JSON"),
        ("list.jsonl", b'["a"]\n', "list.jsonl:1 is not a JSON object"),
        ("number.jsonl", b'{"text": 3}\n', "holds int, not text"),
        ("uneven.jsonl", b'{"text": "a"}\n{"question": "b"}\n', "uneven.jsonl:2 has no column 'text'"),
    ],
)
def test_a_bad_file_is_named_with_its_fault(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_texts(source(path))


@pytest.fixture
def hub_copy(tmp_path: Path) -> Path:
    jsonl(tmp_path / "owner" / "poems" / "train.jsonl", [{"text": "a poem"}])
    return tmp_path


def test_a_hub_data_set_is_looked_up_below_the_data_root(hub_copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poems = TextSource(dataset="owner/poems")
    assert load_texts(poems, data_root=hub_copy).texts == ["a poem"]
    monkeypatch.setenv("HALFBYTE_DATA", str(hub_copy))
    assert load_texts(poems).texts == ["a poem"]


def test_an_unknown_split_or_configuration_is_named(hub_copy: Path) -> None:
    with pytest.raises(UserError, match=r"owner/poems.*dev.*train"):
        load_texts(TextSource(dataset="owner/poems", split="dev"), data_root=hub_copy)
    with pytest.raises(UserError, match=r"owner/poems.*songs.*default"):
        load_texts(TextSource(dataset="owner/poems", name="songs"), data_root=hub_copy)


def test_a_folder_without_data_and_one_that_is_not_json_are_named(hub_copy: Path) -> None:
    (hub_copy / "owner" / "bare").mkdir()
    with pytest.raises(UserError, match="'owner/bare' holds no data"):
        load_texts(TextSource(dataset="owner/bare"), data_root=hub_copy)
    (hub_copy / "owner" / "bare" / "train.jsonl").write_text("no json\n", encoding="utf-8")
    with pytest.raises(UserError, match="'owner/bare' cannot be read"):
        load_texts(TextSource(dataset="owner/bare"), data_root=hub_copy)


def test_an_unreachable_hub_is_said_at_once_with_the_place_to_put_it(
    hub_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "hub_is_reachable", lambda: False)
    with pytest.raises(UserError, match=r"'owner/songs'.*cannot be reached.*put its files into .*/owner/songs"):
        load_texts(TextSource(dataset="owner/songs"), data_root=hub_copy)
    monkeypatch.delenv("HALFBYTE_DATA", raising=False)
    with pytest.raises(UserError, match=r"a folder owner/songs below the folder that \$HALFBYTE_DATA names"):
        load_texts(TextSource(dataset="owner/songs"))


def test_a_gated_data_set_says_how_to_get_access(tmp_path: Path) -> None:
    from datasets.exceptions import DatasetNotFoundError

    expected = r"gated: its owners grant access on https://huggingface.co/datasets/owner/gated.*hf auth login"
    with pytest.raises(UserError, match=expected), data.loading("owner/gated", tmp_path):
        raise DatasetNotFoundError("Dataset 'owner/gated' is a gated dataset on the Hub.")


def test_a_data_root_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        data.data_root(tmp_path / "absent")


def test_modelopts_names_go_through_modelopt(tmp_path: Path) -> None:
    jsonl(tmp_path / "abisee" / "cnn_dailymail" / "3.0.0" / "train.jsonl", [{"article": f"news {i}"} for i in range(9)])
    readme = "---\nconfigs:\n- config_name: 3.0.0\n  data_files:\n  - split: train\n    path: 3.0.0/train.jsonl\n---\n"
    (tmp_path / "abisee" / "cnn_dailymail" / "README.md").write_text(readme, encoding="utf-8")
    texts = load_texts(TextSource(dataset="cnn_dailymail", samples=2), seed=5, data_root=tmp_path)
    assert texts.texts == ["news 0", "news 1"]


def test_a_field_of_a_plain_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("one\n", encoding="utf-8")
    with pytest.raises(UserError, match="field 'body' would have no effect"):
        load_texts(TextSource(dataset=str(tmp_path / "texts.txt"), field="body"))


def test_a_changed_file_in_the_data_root_gives_its_new_text(tmp_path: Path, cache: Path) -> None:  # noqa: ARG001
    """`datasets` caches a local folder by its README alone."""
    folder = tmp_path / "root" / "owner" / "set"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n    path: a.jsonl\n---\n"
    )
    for word in ("old", "new"):
        (folder / "a.jsonl").write_text(json.dumps({"text": word * 3}) + "\n")
        assert load_texts(TextSource(dataset="owner/set"), data_root=tmp_path / "root").texts == [word * 3]


def test_a_local_file_of_pairs_is_looked_at_by_its_columns(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "pairs.jsonl", [{"q": "one", "a": "two"}])
    require_local(source(path), {"prompt_field": "q", "response_field": "a"})
    with pytest.raises(UserError, match=r"no column 'b' \(set response_field to one of its columns: q, a\)"):
        require_local(source(path), {"prompt_field": "q", "response_field": "b"})
    with pytest.raises(UserError, match="no column 'text' or 'question'"):
        require_local(source(path))


def test_rows_are_read_as_they_are(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    path = jsonl(tmp_path / "chats.jsonl", [{"id": 1, "chat": chat, "n": None}])
    assert load_rows(source(path), {"messages_field": "chat", "other_field": "n"}) == [(chat, None)]
