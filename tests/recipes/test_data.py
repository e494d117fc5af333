"""A data root whose files are not as on the hub is told of in one line."""

from __future__ import annotations

from pathlib import Path

import datasets
import pytest

from halfbyte.recipes.data import find_dataset, loading
from halfbyte.records.errors import UserError


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        ("---\nconfigs: [\n---\n", "data set 'owner/questions' cannot be read: while parsing"),
        ("", "'gpqa_diamond' not found.*README.md on the hub names its configurations"),
    ],
)
def test_a_readme_that_names_no_configurations_is_told_of(
    readme: str, expected: str, tmp_path: Path, cache: Path
) -> None:
    folder = tmp_path / "root" / "owner" / "questions"
    folder.mkdir(parents=True)
    (folder / "gpqa_diamond.csv").write_text("question,answer\na,b\n", encoding="utf-8")
    if readme:
        (folder / "README.md").write_text(readme, encoding="utf-8")
    root = tmp_path / "root"
    with pytest.raises(UserError, match=expected) as caught, loading("owner/questions", root):
        datasets.load_dataset(find_dataset("owner/questions", root), "gpqa_diamond", cache_dir=str(cache))
    assert "\n" not in str(caught.value)
