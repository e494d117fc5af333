"""Importing upstream libraries fast and calling them quietly: what they print and warn goes to the debug log."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.metadata
import io
import logging
import sys
import warnings
from collections.abc import Iterator

logger = logging.getLogger(__name__)

_NOISY = ("modelopt", "transformers")


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Within the block Python looks for no garbage; what the first import of transformers leaves is never looked at.

    Importing ModelOpt and transformers makes 600,000 objects that stay to the end. Python would search through them
    again and again meanwhile, and would free them one by one when the process ends: a quarter of the time, and two
    seconds. Where transformers is there already, so may be models, which must be found to be garbage one day.

    What transformers and diffusers each ask of the names of all installed packages is found once, and the hundreds of
    small YAML files that ModelOpt reads are parsed by libyaml where it is there.
    """
    import yaml

    collects, first = gc.isenabled(), "transformers" not in sys.modules
    distributions, load_all = importlib.metadata.packages_distributions, yaml.safe_load_all
    gc.disable()
    importlib.metadata.packages_distributions = functools.cache(distributions)
    if hasattr(yaml, "CSafeLoader"):
        yaml.safe_load_all = functools.partial(yaml.load_all, Loader=yaml.CSafeLoader)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions, yaml.safe_load_all = distributions, load_all
        if first:
            gc.freeze()
        if collects:
            gc.enable()


@contextlib.contextmanager
def quiet_upstream() -> Iterator[None]:
    """Silences ModelOpt's prints and warnings and transformers' bars within the block; --quiet has no part in it.

    Everything is kept at level DEBUG, and nothing is caught: an error passes through.
    """
    from transformers.utils import logging as transformers_logging

    text = io.StringIO()
    levels = {name: logging.getLogger(name).level for name in _NOISY}
    bars = transformers_logging.is_progress_bar_enabled()
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(text):
            warnings.simplefilter("always")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]
        for warning in caught:
            logger.debug("upstream warns: %s", warning.message)
        for line in text.getvalue().splitlines():
            logger.debug("upstream prints: %s", line)
