"""The policy: one YAML file that says which losses are tolerable, on which tasks, at which error."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError

from halfbyte.records.errors import UserError, unknown_name


class Policy(BaseModel):
    """A gate's rules. All primary tasks must be non-inferior, so no correction for several tasks is needed."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    release_evidence: bool
    """Whether passing it speaks for a release; a smoke test's pass does not."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Error of each one-sided bound: how often a loss as large as the margin passes."""
    margin: PositiveFloat
    """Largest tolerable loss of a task, in its metric's own units."""
    margins: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Other margins by task."""
    primary: Literal["all"] | list[str] = "all"
    """The tasks that decide."""
    allow_limit: bool = False
    """Whether a record cut by a limit may be judged."""
    perplexity_margin: PositiveFloat | None = None
    """Largest tolerable ratio of perplexities (candidate / baseline) minus 1; None when perplexity does not decide."""

    def margin_of(self, task: str) -> float:
        """The largest tolerable loss of a task."""
        return self.margins.get(task, self.margin)

    def decides(self, task: str) -> bool:
        """Whether the task is a primary one."""
        return self.primary == "all" or task in self.primary

    def refuse_limit(self, task: str, limit: int | None) -> None:
        """Call it before an evaluation as well, to save the hours.

        Raises:
            UserError: when the task is cut by a limit and the policy does not allow that.
        """
        if limit is not None and not self.allow_limit:
            raise UserError(
                f"policy '{self.name}' judges whole tasks only, and '{task}' was cut to {limit} questions",
                "evaluate without a limit, or take a policy that allows one, such as 'smoke'",
            )


def shipped_policies() -> dict[str, str]:
    """The YAML text of each policy that comes with halfbyte, by name."""
    folder = files("halfbyte.reports").joinpath("policies")
    return {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name)
        if entry.name.endswith(".yaml")
    }


def load_policy(name: str) -> Policy:
    """A policy by the name of a shipped one, or by the path of a YAML file.

    Raises:
        UserError: for an unknown name, a file that cannot be read, and a field that is unknown or wrong.
    """
    shipped = shipped_policies()
    if name in shipped:
        return _parse(shipped[name], name)
    path = Path(name)
    if path.suffix in (".yaml", ".yml") or "/" in name:
        try:
            return _parse(path.read_text(encoding="utf-8"), name)
        except FileNotFoundError:
            raise UserError(f"the policy file {name} does not exist", f"shipped: {', '.join(shipped)}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"the policy file {name} cannot be read: {error}") from None
    raise unknown_name("policy", name, shipped)


def _parse(text: str, source: str) -> Policy:
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"policy {source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"policy {source} is not a mapping of settings", "see the shipped policy 'release'")
    unknown = sorted(str(key) for key in content.keys() - Policy.model_fields.keys())
    if unknown:
        wrong = unknown_name("field of a policy", unknown[0], Policy.model_fields)
        raise UserError(f"policy {source}: {wrong.message}", wrong.hint)
    try:
        return Policy.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserError(f"policy {source}: {where}: {first['msg']} (given: {first.get('input')!r})") from None
