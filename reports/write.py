"""Writing: all reports on one or several comparisons into one folder.

write_reports([compare(baseline, fp8, policy), compare(baseline, nvfp4, policy)], Path("report"))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from halfbyte.records.files import dumps, write_text
from halfbyte.reports.card import CARD_FILE, EVAL_RESULTS_FILE, eval_results, model_card
from halfbyte.reports.comparison import COMPARISON_FILE, Comparison
from halfbyte.reports.html import render_html
from halfbyte.reports.junit import junit
from halfbyte.reports.methods import comparison_file
from halfbyte.reports.tables import check_one_baseline
from halfbyte.reports.text import render_markdown

VERDICT_FILE = "verdict.json"
HTML_FILE = "report.html"
MARKDOWN_FILE = "report.md"
JUNIT_FILE = "junit.xml"


def write_reports(comparisons: Sequence[Comparison], output: Path) -> list[Path]:
    """Writes comparison.json, report.md, report.html and model-card.md, and with a policy junit.xml and verdict.json.

    A report on one candidate has eval_results.yaml as well, for .eval_results/ of its repository.

    Each file is written atomically, the verdict last. Without a policy a verdict of earlier comparisons is removed
    from the folder: it would speak for other numbers than those beside it.

    Returns:
        The paths written.

    Raises:
        UserError: when there is no comparison, when they have different baselines, or the disk is full.
    """
    check_one_baseline(comparisons)
    whole = comparison_file(comparisons)
    contents = {
        CARD_FILE: model_card(comparisons),
        **({EVAL_RESULTS_FILE: eval_results(comparisons[0])} if len(comparisons) == 1 else {}),
        MARKDOWN_FILE: render_markdown(comparisons),
        HTML_FILE: render_html(comparisons),
        COMPARISON_FILE: dumps(whole.model_dump(mode="json")),
    }
    if whole.verdict is not None:
        contents[JUNIT_FILE] = junit(comparisons)
        contents[VERDICT_FILE] = dumps(
            {
                "schema_version": 1,
                "verdict": whole.verdict,
                "exit_code": whole.exit_code,
                "sentence": whole.sentence,
                "candidates": [one.verdict.model_dump(mode="json") for one in comparisons if one.verdict],
            }
        )
    for name, content in contents.items():
        write_text(output / name, content)
    for name in {VERDICT_FILE, JUNIT_FILE, EVAL_RESULTS_FILE} - contents.keys():
        (output / name).unlink(missing_ok=True)
    return [output / name for name in contents]
