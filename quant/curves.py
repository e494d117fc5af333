"""The curves of a training as it goes: curves.jsonl, a progress bar, and the stop of one that has diverged."""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from halfbyte.quant.batches import InOrder
from halfbyte.records.errors import UserError, disk_full_is_a_user_error
from halfbyte.records.files import write_text
from halfbyte.records.progress import progress_bar
from halfbyte.records.training import CURVES_FILE, MEASURES, Validation

EXPLODED = 2.0
"""Nats a token by which a loss may rise above its start: the perplexity is 7 times as high by then."""
RECENT = 8
"""Steps whose mean training loss is looked at."""


class Diverged(Exception):
    """Training has left what can be learned from; the message says what happened at which step."""


class TeacherBroken(Diverged):
    """The KL divergence is no number, and the loss of the model that learns is one."""


class Curves(TrainerCallback):
    """Writes the curves and watches them.

    Args:
        folder: The run's training/ folder.
        order: The rows of the training, for its tokens.
        steps: Optimizer steps of the training.
        resumed: The step it goes on from; later lines of an earlier process are dropped.
        metric: What the training loss is: loss (qat) or kl (qad).
        writes: Whether this process writes; one of several does.
    """

    def __init__(
        self, folder: Path, order: InOrder, steps: int, *, resumed: int, metric: str, writes: bool = True
    ) -> None:
        self.path, self.order, self.metric, self.writes = folder / CURVES_FILE, order, metric, writes
        kept = _lines(self.path, resumed) if resumed else []
        self.validations = [
            Validation(step=line["step"], loss=line["validation_loss"], kl=line["validation_kl"])
            for line in kept
            if "validation_loss" in line
        ]
        self.before = max((line["seconds"] for line in kept if "seconds" in line), default=0.0)
        self.began = time.monotonic()
        self.recent: deque[float] = deque(
            [line["loss"] for line in kept if line.get("loss") is not None][-RECENT:], maxlen=RECENT
        )
        if writes:
            write_text(self.path, "".join(json.dumps(line) + "\n" for line in kept))
            self.bar = progress_bar(total=steps, initial=resumed, unit="step", desc="train")

    @property
    def seconds(self) -> float:
        """Since training began, in all processes that had a part in it."""
        return self.before + time.monotonic() - self.began

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:  # noqa: ARG002
        """A logged step."""
        logs: dict[str, Any] = more["logs"]
        if "loss" not in logs:  # the summary at the end
            return
        step = int(state.global_step)
        norm = logs.get("grad_norm")
        self._write(
            {
                "step": step,
                "tokens": self.order.tokens(step),
                "loss": _number(logs["loss"]),
                "learning_rate": logs["learning_rate"],
                "grad_norm": None if norm is None else _number(float(norm)),
                "seconds": round(self.seconds, 3),
            }
        )
        if self.writes:
            self.bar.set_postfix({"loss": f"{logs['loss']:.4f}"}, refresh=False)
            self.bar.update(step - self.bar.n)
        self.recent.append(float(logs["loss"]))
        start = self._start()
        mean = sum(self.recent) / len(self.recent)
        if not math.isfinite(mean):
            raise Diverged(f"the training loss is {logs['loss']} at step {step}")
        if len(self.recent) == RECENT and start is not None and mean > start + EXPLODED:
            raise Diverged(f"the training loss is {mean:.2f} at step {step}, after {start:.2f} before training")

    def validated(self, step: int, loss: float, kl: float | None) -> None:
        """A validation."""
        line = {
            "step": step,
            "tokens": self.order.tokens(step),
            "validation_loss": _number(loss),
            "validation_kl": None if kl is None else _number(kl),
        }
        self._write(line)
        if not math.isfinite(loss):
            raise Diverged(f"the validation loss is {loss} at step {step}")
        if kl is not None and not math.isfinite(kl):
            raise TeacherBroken(f"the validation {MEASURES['kl']} is {kl} at step {step}")
        found = Validation(step=step, loss=loss, kl=kl)
        self.validations.append(found)
        # Who learns texts leaves the original, and the further the more there is to learn.
        for metric in dict.fromkeys(("loss", self.metric)):
            value, start = found.value(metric), self.validations[0].value(metric)
            if value is not None and start is not None and value > start + EXPLODED:
                what = f"{value:.2f} at step {step}, after {start:.2f} before training"
                raise Diverged(f"the validation {MEASURES[metric]} is {what}")

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
        """The last step is done."""
        self.close()

    def close(self) -> None:
        """Ends the progress bar."""
        if self.writes:
            self.bar.close()

    def flush(self) -> None:
        """Waits until all lines are on the disk; a checkpoint's lines are there before it is."""
        if self.writes:
            with self.path.open("rb") as file:
                os.fsync(file.fileno())

    def _start(self) -> float | None:
        return self.validations[0].value(self.metric) if self.validations else None

    def _write(self, line: dict[str, Any]) -> None:
        if self.writes:
            with disk_full_is_a_user_error(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _lines(path: Path, last: int) -> list[dict[str, Any]]:
    """The whole lines of an earlier process, up to a step; a step that was done twice counts once, the last time.

    Raises:
        UserError: when the file is missing or damaged.
    """
    found: dict[tuple[bool, int], dict[str, Any]] = {}
    hint = "restore the file, or --force to begin anew"
    if not path.is_file():
        raise UserError(f"{path} is missing, and its checkpoints are there", hint)
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), start=1):
        if not line.endswith("\n"):
            break
        try:
            content = json.loads(line)
            step = int(content["step"])
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number} is no line of a training curve", hint) from None
        if step <= last:
            found[("validation_loss" in content, step)] = content
    if (True, 0) not in found:
        raise UserError(f"{path} lacks the validation before training", hint)
    return list(found.values())
