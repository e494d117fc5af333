"""The documents are one site that holds together: figures and tables are current, links live, examples lint."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from documents import PAGES, ROOT

DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))

import figures  # noqa: E402
import inserts  # noqa: E402

OTHERS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "reports" / "measured").rglob("*.md")]


@pytest.mark.parametrize("name", figures.FIGURES)
def test_a_figure_is_what_the_numerics_draw_today(name: str) -> None:
    committed = (figures.FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert committed == figures.svg(figures.FIGURES[name]), "run `python docs/figures.py`"


def test_no_figure_is_left_over() -> None:
    assert {path.stem for path in figures.FOLDER.iterdir()} == set(figures.FIGURES)


def test_the_errors_in_the_text_are_those_that_are_measured() -> None:
    found = figures.errors()
    better = 1 - found["NVFP4"]["normal"] / found["MXFP4"]["normal"]
    assert 0.15 < better < 0.25  # "a fifth better"
    assert found["MXFP4"]["heavy tails"] / found["NVFP4"]["heavy tails"] > 1 / (1 - better)  # "by more"
    assert 0.08 < found["NVFP4"]["normal"] < 0.12  # "a tenth"
    assert found["E2M1, one scale a tensor"]["heavy tails"] > 0.5  # "useless"
    assert found["FP8, one scale a tensor"]["heavy tails"] < 1.2 * found["MXFP8"]["heavy tails"]


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent == DOCS], ids=lambda page: page.name)
def test_a_page_is_filled_in(page: Path) -> None:
    text = inserts.filled(page.read_text(encoding="utf-8"))
    assert "<!-- insert" not in text
    for row in re.findall(r"^\|.*\|$", inserts.filled(text), flags=re.MULTILINE):
        assert "None" not in row.split(" | "), row


@pytest.mark.parametrize(
    "wrong",
    ["<!-- insert: no-such -->", "<!-- insert: table README.md 999 -->", "<!-- insert: recipes no-such-kind extra -->"],
)
def test_an_insert_that_cannot_be_filled_in_is_an_error(wrong: str) -> None:
    with pytest.raises((ValueError, IndexError, TypeError)):
        inserts.filled(wrong)


def _kl(table: str) -> dict[str, float]:
    """The KL divergence of each row of a table of measured runs."""
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    at = next(i for i, cell in enumerate(head) if cell.startswith("KL to BF16"))
    return {row[0]: float(row[at].split(" ")[0]) for row in rows if row[at] != "–"}


def test_what_the_text_concludes_is_in_the_measured_tables() -> None:
    folder = ROOT / "reports" / "measured"
    smollm2, inhouse, *trained = map(_kl, inserts.tables_of(folder / "2026-11-30-smollm2-inhouse-h200/README.md")[:3])
    trained.append(_kl(inserts.tables_of(folder / "2026-12-01-inhouse-h200/README.md")[0]))
    for found in (smollm2, inhouse):
        four_bits = {name: kl for name, kl in found.items() if name.startswith("NVFP4") and "KV" not in name}
        assert sorted(four_bits, key=four_bits.__getitem__) == ["NVFP4-SVDQUANT", "NVFP4-AWQ", "NVFP4"]
        assert found["MXFP8"] < 1.05 * found["FP8"] < 0.2 * found["NVFP4"]
        assert found["NVFP4 + FP8 KV"] < 1.05 * found["NVFP4"]
    assert 2.5 < smollm2["MXFP4"] / smollm2["NVFP4"] < 3.5
    assert "MXFP4" not in inhouse
    shares = []
    for found in trained:
        qat, qad = (next(kl for name, kl in found.items() if method in name) for method in ("QAT", "QAD"))
        shares.append(f"{qad / found['NVFP4 PTQ']:.2f}".lstrip("0"))
        assert qat > found["NVFP4 PTQ"]
    assert f"({' and '.join(shares)} of it)" in (DOCS / "which-recipe.md").read_text(encoding="utf-8")
    assert all(float(share) < 0.5 for share in shares)


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    local = [target for target in targets if target and not re.match(r"[a-z]+:", target)]
    assert [target for target in local if not (page.parent / target).exists()] == []


class _References(HTMLParser):
    """What a page loads, where it links to, and which places in it can be linked to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.places: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given: dict[str, Any] = dict(attrs)
        if given.get("id"):
            self.places.add(given["id"])
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loads.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loads.append(given["href"])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.mark.slow
def test_the_site_builds_without_a_warning_needs_no_network_and_has_no_dead_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    pages: dict[Path, _References] = {}
    for path in (tmp_path / "site").rglob("*.html"):
        pages[path] = _References()
        pages[path].feed(path.read_text(encoding="utf-8"))
    assert {path.stem for path in pages} >= {page.stem for page in DOCS.glob("*.md")}
    for path, found in pages.items():
        assert [address for address in found.loads if re.match(r"(https?:)?//", address)] == [], path.name
        for link in found.links:
            if path.name == "404.html" or re.match(r"[a-z]+:|//", link):
                continue
            target, _, place = link.partition("#")
            file = (path.parent / target).resolve() if target else path
            file = file / "index.html" if file.is_dir() else file
            assert file.is_file(), f"{path.name}: {link}"
            assert not place or file not in pages or place in pages[file].places, f"{path.name}: {link}"
    index = (tmp_path / "site" / "search" / "search_index.json").read_text(encoding="utf-8")
    assert "quantize.keep" in index
    assert "exclude_modules" in index


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        ("github.yml", ["--builtin-schema", "vendor.github-workflows"]),
        ("gitlab.yml", ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"]),
    ],
)
def test_a_ci_example_fits_its_vendors_schema(file: str, schema: list[str], tmp_path: Path) -> None:
    check = [sys.executable, "-m", "check_jsonschema", *schema]
    done = subprocess.run([*check, str(DOCS / "ci" / file)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    damaged = tmp_path / file
    text = (DOCS / "ci" / file).read_text(encoding="utf-8")
    damaged.write_text(text.replace("runs-on:", "run-on:").replace("stage: gate", "stages: gate"), encoding="utf-8")
    assert subprocess.run([*check, str(damaged)], capture_output=True, check=False).returncode == 1


def test_the_github_example_passes_actionlint() -> None:
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        pytest.skip("actionlint is not installed")
    command = [actionlint, "-config-file", str(DOCS / "ci" / "actionlint.yaml"), str(DOCS / "ci" / "github.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
