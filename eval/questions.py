"""A task's questions with a recipe's settings: asked of an LM through lm-eval, or looked at before anything is."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM

from halfbyte.eval.backend import sampling_of
from halfbyte.eval.resolve import find_manager, load_task, quiet_lm_eval
from halfbyte.recipes.schema import EvaluateSpec, TaskSpec
from halfbyte.records.errors import UserError, unknown_name

logger = logging.getLogger(__name__)


class Questions:
    """A task or group of lm-eval, loaded, with the settings of a recipe.

    Args:
        spec: The task.
        settings: What all tasks share.
        root: The data root, see recipes.data.data_root.

    Raises:
        UserError: for an unknown task or metric, data that is not to be had, and settings that lm-eval would drop
            without a word.
    """

    def __init__(self, spec: TaskSpec, settings: EvaluateSpec, root: Path | None) -> None:
        self.spec = spec
        self.settings = settings
        self.datasets: list[str] = []
        """The data sets the task was loaded from, by hub id."""
        self._loaded = load_task(spec.task, root, settings.seed, self.datasets, settings.include_path)
        self.tasks: dict[str, Any] = leaves(self._loaded)
        """lm-eval's task objects, by name."""
        self._require_metric()
        self._require_effect_of_shots()
        self._gen_kwargs = self._generation()
        self._set_samples()

    def ask(self, lm: LM) -> dict[str, Any]:
        """lm-eval's results, samples included.

        Raises:
            UserError: when the task has no question.
        """
        seed = self.settings.seed
        try:
            with quiet_lm_eval():
                results = simple_evaluate(
                    model=lm,
                    tasks=self._loaded,
                    num_fewshot=self.spec.num_fewshot,
                    batch_size=self.settings.batch_size,
                    device=str(lm.device),
                    limit=self.spec.limit,
                    log_samples=True,
                    system_instruction=self.settings.system_prompt,
                    apply_chat_template=self.settings.apply_chat_template,
                    fewshot_as_multiturn=self.settings.apply_chat_template,
                    gen_kwargs=self._gen_kwargs,
                    task_manager=find_manager(self.spec.task, self.settings.include_path),
                    random_seed=seed,
                    numpy_random_seed=seed,
                    torch_random_seed=seed,
                    fewshot_random_seed=seed,
                )
        except ValueError as error:
            if "did not find any docs" not in str(error):
                raise
            raise UserError(f"task '{self.spec.task}' has no question", "check its data set and --limit") from error
        return cast(dict[str, Any], results)

    def warn_of_a_missing_template(self, tokenizer: Any | None) -> None:
        """Warns where a task is put as a user's turn and the model's chat template, which makes it one, is not applied.

        Args:
            tokenizer: The model's; None where there is none here.
        """
        chats = any((task.config.metadata or {}).get("asks_in_chat") for task in self.tasks.values())
        if chats and not self.settings.apply_chat_template and getattr(tokenizer, "chat_template", None):
            logger.warning(
                "%s is asked as a user asks, and the model's chat template is not applied: its score will not be the "
                "one that chat models are known by; add --apply-chat-template (evaluate.apply_chat_template)",
                self.spec.task,
            )

    def requests(self, lm: LM) -> list[Instance]:
        """The requests that `ask` would put to an LM, in its order and without repetitions; nothing is answered.

        Args:
            lm: Renders the prompts: its chat template and the name of its tokenizer are what is asked of it.
        """
        with suppress(_Asked):
            self.ask(_Silent(lm))
        return [instance for task in self.tasks.values() for instance in task.instances]

    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics that the task may be judged by: the one that is named, else all it has."""
        if self.spec.metric_name is not None:
            return (self.spec.metric_name,)
        return tuple(dict.fromkeys(str(metric) for task in self.tasks.values() for metric in task.aggregation()))

    def _require_metric(self) -> None:
        known = {
            f"{metric},{entry.name}"
            for task in self.tasks.values()
            for metric in task.aggregation()
            for entry in task._filters
        }
        wanted = self.spec.metric
        if wanted is not None and not any(wanted in (name, name.partition(",")[0]) for name in known):
            raise unknown_name("metric", wanted, known)

    def _require_effect_of_shots(self) -> None:
        shots = self.spec.num_fewshot
        fixed = [name for name, task in self.tasks.items() if task.config.num_fewshot == 0]
        if shots and fixed:
            raise UserError(
                f"task '{fixed[0]}' is defined with no examples; num_fewshot {shots} would have no effect",
                "leave num_fewshot out for this task",
            )

    def _generating(self) -> list[Any]:
        return [task for task in self.tasks.values() if task.OUTPUT_TYPE == "generate_until"]

    def _generation(self) -> dict[str, Any] | None:
        """The generation settings to apply."""
        if self.spec.gen_kwargs is None:
            return None
        if not self._generating():
            raise UserError(
                f"task '{self.spec.task}' generates nothing; gen_kwargs would have no effect", "leave gen_kwargs out"
            )
        given = dict(self.spec.gen_kwargs)
        if float(given.get("temperature") or 0.0) > 0:
            given.setdefault("do_sample", True)  # else a task's own do_sample: false sets the temperature back to 0
        return given

    def _set_samples(self) -> None:
        wanted = self.spec.samples
        if wanted is None:
            return
        if len(self._generating()) < len(self.tasks):
            raise UserError(f"task '{self.spec.task}' draws nothing; samples would have no effect", "leave samples out")
        for name, task in self.tasks.items():
            settings = {**(task.config.generation_kwargs or {}), **(self._gen_kwargs or {})}
            if wanted > 1 and sampling_of(settings).temperature == 0:
                raise UserError(
                    f"{wanted} samples of task '{name}' would be one text {wanted} times: it generates greedily",
                    "set a temperature in gen_kwargs, or leave samples out",
                )
            task.set_config("repeats", wanted)


def leaves(loaded: list[Any]) -> dict[str, Any]:
    """The tasks in a list of tasks and groups, by name."""
    tasks: dict[str, Any] = {}
    for entry in loaded:
        for task in entry.get_all_tasks() if hasattr(entry, "get_all_tasks") else [entry]:
            tasks[task.task_name] = task
    return tasks


class _Asked(Exception):
    """Stops lm-eval once all requests are built."""


class _Silent(LM):
    """Renders prompts as another LM and answers nothing."""

    def __init__(self, lm: LM) -> None:
        super().__init__()
        self._lm = lm
        self._device = lm.device

    @property
    def tokenizer_name(self) -> str:
        """See JournaledLM."""
        return str(self._lm.tokenizer_name)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """See JournaledLM."""
        found: str | None = self._lm.chat_template(chat_template)
        return found

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """See JournaledLM."""
        return str(self._lm.apply_chat_template(chat_history, add_generation_prompt=add_generation_prompt))

    def loglikelihood(self, _requests: list[Instance]) -> list[tuple[float, bool]]:
        """Nothing."""
        raise _Asked

    def loglikelihood_rolling(self, _requests: list[Instance]) -> list[float]:
        """Nothing."""
        raise _Asked

    def generate_until(self, _requests: list[Instance]) -> list[str]:
        """Nothing."""
        raise _Asked
