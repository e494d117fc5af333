"""Writes the table of quant/FORMATS.md anew, out of what every preset does on a tiny model.

python tests/formats_table.py
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "support")]

from conftest import make_tokenizer  # noqa: E402
from presets import BEGIN, CASES, DOCS, END, HEAD, measure  # noqa: E402

from halfbyte.records.files import write_text  # noqa: E402


def main() -> None:
    """Replaces what stands between the marks."""
    rows = []
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(case, make_tokenizer(), Path(folder)))
        print(rows[-1], file=sys.stderr)
    text = DOCS.read_text(encoding="utf-8")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    write_text(DOCS, f"{before}{BEGIN}\n{HEAD}\n" + "\n".join(rows) + f"\n{END}{after}")


if __name__ == "__main__":
    main()
