"""The policy: one YAML file that says which losses are tolerable, on which tasks, at which error, and the waivers."""

from __future__ import annotations

from datetime import date
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from halfbyte.records.errors import UserError, unknown_name
from halfbyte.reports.metrics import SHARE, Bounds, refuse_bounds

Allowed = Literal[
    "chat_template", "system_prompt", "bos_per_prompt", "max_length", "backend", "engine", "dtype", "seeds", "prompts",
    "generation", "num_fewshot", "version",
]  # fmt: skip


LARGEST_MARGIN = 0.25
"""Of the distance between a metric's bounds; more is a misunderstanding, such as 1 for one point."""


class Waiver(BaseModel):
    """A person's decision to let one task's verdict pass for a while; printed in every report."""

    model_config = ConfigDict(extra="forbid")

    task: str = Field(min_length=1)
    reason: str = Field(min_length=10)
    by: str = Field(min_length=2)
    """Who answers for it."""
    granted: date
    expires: date
    """The last day on which it holds."""
    candidate: str | None = Field(default=None, min_length=8)
    """Beginning of the digest of the only candidate it is for; None for any."""

    @model_validator(mode="after")
    def _ends_after_it_began(self) -> Waiver:
        if self.expires < self.granted:
            raise ValueError(f"expires {self.expires} before it was granted {self.granted}")
        return self


class Policy(BaseModel):
    """A gate's rules. All primary tasks must pass, so no correction for several tasks is needed."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1)
    description: str = Field(min_length=1)
    release_evidence: bool
    """Whether passing it speaks for a release; a smoke test's pass does not."""
    rule: Literal["non-inferior", "ratio", "two-sided"] = "non-inferior"
    """non-inferior: the loss is proven below the margin. two-sided: and the gain as well. ratio: the candidate's score
    is at least `ratio` of the baseline's, as a point estimate."""
    alpha: float = Field(default=0.05, gt=0, le=0.2)
    """Error of a pass: how often a loss as large as the margin passes."""
    fail_alpha: float = Field(default=0.01, gt=0, le=0.2)
    """Error of a fail: how often a loss no larger than the margin is called too large."""
    margin: PositiveFloat | None = None
    """Largest tolerable loss of a metric that is a share between 0 and 1; 0.01 is one point."""
    margins: dict[str, PositiveFloat] = Field(default_factory=dict)
    """Other margins, by task or by metric, in the metric's own units."""
    bounds: dict[str, Bounds] = Field(default_factory=dict)
    """Lowest and highest value of one question, by metric, for metrics of a user's own, as `right_order: [0, 1]`; a
    value outside is refused. Without them nothing is proven where no question changes."""
    noise_floor: float | None = Field(default=None, ge=1)
    """A margin is widened to what two evaluations of the baseline itself differ by, to at most so many times itself,
    since few noisy questions differ by a lot and are no reason to tolerate as much; None where it stays as it is."""
    ratio: float | None = Field(default=None, ge=0.5, le=1)
    """Smallest tolerable share of the baseline's score; of rule ratio."""
    length_ratio: tuple[float, float] | None = None
    """Bounds of the mean generated length over the baseline's."""
    primary: Literal["all"] | list[str] = "all"
    """The tasks that decide; the others are advisory."""
    allow_limit: bool = False
    """Whether a record cut by a limit may be judged."""
    allow: list[Allowed] = Field(default_factory=list)
    """Settings in which the sides may differ; each difference is printed."""
    allow_unknown: list[Allowed] = Field(default_factory=list)
    """Settings that a server need not tell, such as the chat_template it applied; printed where it does not."""
    perplexity_margin: float | None = Field(default=None, gt=0, lt=1)
    """Largest tolerable ratio of perplexities (candidate / baseline) minus 1; None when perplexity does not decide."""
    better_alpha: float | None = Field(default=0.001, gt=0, lt=0.5)
    """Error at which a candidate better than its baseline is an anomaly; None where it may be."""
    max_cap_hits: float = Field(default=0.2, gt=0, le=1)
    """Share of texts cut at the token limit, on either side, beyond which a score measures the limit."""
    max_unanswered_rise: float = Field(default=0.1, gt=0, le=1)
    """How far the candidate's share of texts without an answer may lie above the baseline's."""
    waivers: list[Waiver] = Field(default_factory=list)

    @model_validator(mode="after")
    def _says_what_its_rule_needs(self) -> Policy:
        if (self.rule == "ratio") != (self.ratio is not None):
            raise ValueError("rule ratio and a ratio belong together")
        if self.rule != "ratio" and self.margin is None and not self.margins:
            raise ValueError(f"rule {self.rule} needs a margin")
        if self.length_ratio is not None and not 0 < self.length_ratio[0] <= 1 <= self.length_ratio[1]:
            raise ValueError("the bounds of length_ratio must lie around 1")
        for metric, bounds in self.bounds.items():
            if (reason := refuse_bounds(metric, bounds)) is not None:
                raise ValueError(f"bounds of {metric}: {reason}")
        return self

    def margin_of(self, task: str, metric: str, bounds: Bounds | None) -> float:
        """The largest tolerable loss of a task, in its metric's own units.

        Raises:
            UserError: when none is named for a metric that is no share between 0 and 1.
        """
        named = self.margins.get(task, self.margins.get(metric))
        found = self.margin if named is None and bounds == SHARE else named
        if found is not None and bounds is not None and found > LARGEST_MARGIN * (bounds[1] - bounds[0]):
            raise UserError(
                f"policy '{self.name}' tolerates a loss of {found:g} {metric} of {task}, which lies between "
                f"{bounds[0]:g} and {bounds[1]:g}, so that it could not fail",
                "margins are in the metric's own units: 0.01 is one point of 100",
            )
        if found is not None:
            return found
        scale = "has no bounds" if bounds is None else f"lies between {bounds[0]:g} and {bounds[1]:g}"
        raise UserError(
            f"policy '{self.name}' has no margin for {metric} of {task}, which {scale}",
            f"name one in the policy: margins: {{{metric}: ...}}, in units of {metric}"
            + (
                f"; if no question is worth less than 0 or more than 1, say so as well: bounds: {{{metric}: [0, 1]}}"
                if bounds is None and refuse_bounds(metric, SHARE) is None
                else ""
            ),
        )

    def decides(self, task: str) -> bool:
        """Whether the task is a primary one; of images a policy names `images`, or a metric as `images/clip_score`."""
        if self.primary == "all":
            return True
        whole, _, _ = task.partition("/")
        return bool({task, whole} & set(self.primary)) or any(one.startswith(f"{task}/") for one in self.primary)

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

    def refuse_without_noise(self, task: str, noise: object | None, hint: str) -> None:
        """Call it before the candidate is made as well.

        Args:
            task: The task.
            noise: What two evaluations of its baseline differ by; None where there was one.
            hint: How to have it evaluated twice.

        Raises:
            UserError: when the policy decides on the task by its noise floor, and that was not measured.
        """
        if self.noise_floor is not None and self.decides(task) and noise is None:
            raise UserError(
                f"policy '{self.name}' takes the noise floor for its margin, and the baseline was evaluated once on "
                f"{task}",
                hint,
            )


def shipped_policies() -> dict[str, str]:
    """The YAML text of each policy that comes with halfbyte, by name."""
    folder = files("halfbyte.reports").joinpath("policies")
    found = {
        entry.name.removesuffix(".yaml"): entry.read_text(encoding="utf-8")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    }
    return dict(sorted(found.items()))


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


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice: people read the first, and YAML takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _parse(text: str, source: str) -> Policy:
    try:
        content: Any = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that is none
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
        given = "" if not where else f" (given: {first.get('input')!r})"
        raise UserError(f"policy {source}: {where}{': ' if where else ''}{first['msg']}{given}") from None
