"""Importing upstream libraries fast: garbage is looked for again afterwards, and models can be freed."""

from __future__ import annotations

import gc
import importlib.metadata
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import yaml

from halfbyte.quant.upstream import importing


class Cycle:
    """Garbage that only a collection finds."""

    def __init__(self) -> None:
        self.itself = self


def test_garbage_is_looked_for_again_after_an_import_and_after_an_error() -> None:
    with importing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), importing():
        raise ImportError
    assert gc.isenabled()


def test_who_collects_no_garbage_still_does_not() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_model_in_a_cycle_is_freed_where_transformers_was_there_before() -> None:
    import transformers  # noqa: F401

    before = gc.get_freeze_count()
    model = Cycle()
    found = weakref.ref(model)
    with importing():
        pass
    del model
    gc.collect()
    assert found() is None
    assert gc.get_freeze_count() == before


def test_the_first_import_of_transformers_is_never_searched() -> None:
    code = (
        "import gc\nfrom halfbyte.quant.upstream import importing\n"
        "with importing():\n    import transformers\n"
        "assert gc.get_freeze_count() > 10_000 and gc.isenabled()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_is_replaced_for_an_import_is_put_back() -> None:
    before = yaml.safe_load_all, importlib.metadata.packages_distributions
    with importing():
        assert importlib.metadata.packages_distributions() is importlib.metadata.packages_distributions()
        assert (yaml.safe_load_all, importlib.metadata.packages_distributions) != before
    assert (yaml.safe_load_all, importlib.metadata.packages_distributions) == before


def test_modelopts_files_are_read_as_before() -> None:
    from modelopt.torch.opt.config_loader import BUILTIN_CONFIG_ROOT

    texts = [path.read_text(encoding="utf-8") for path in Path(str(BUILTIN_CONFIG_ROOT)).rglob("*.y*ml")]
    expected = [list(yaml.safe_load_all(text)) for text in texts]
    assert len(expected) > 50
    with importing():
        assert [list(yaml.safe_load_all(text)) for text in texts] == expected
