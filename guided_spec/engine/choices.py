"""Classification: the exact probability of each of several choices after a prompt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from enum import EnumMeta
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from guided_spec.engine.outputs import ChoiceOutput, Chunk, cancel_all
from guided_spec.engine.prompt import Prompt, split_prompts
from guided_spec.engine.request import Job, Request, Scoring, State
from guided_spec.errors import ConfigError, PromptError
from guided_spec.grammar.text.choice_tree import ChoicePaths, ChoiceTree, TokenRow
from guided_spec.grammar.vocabulary import CanonicalTokens
from guided_spec.kinds import require_one_of
from guided_spec.types import SamplingParams

if TYPE_CHECKING:  # it loads transformers
    from guided_spec.engine.runner import Runner


class Chooser:
    """Scores choices on an engine's thread, among its other requests; see ``LLM.choose``."""

    def __init__(self, runner: Runner) -> None:
        self._setup = setup = runner.setup
        self._runner = runner
        self._spelling = CanonicalTokens(setup.spell, setup.vocabulary.token_bytes)

    def choose(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Any,
        paths: ChoicePaths,
        lora: str | None = None,
    ) -> ChoiceOutput | list[ChoiceOutput]:
        """One output for one prompt, a list for a list. Raises what ends the first that fails."""
        listed = split_prompts(prompts)
        asked = self._ask(listed, choices, paths, lora)
        try:
            outputs = [one.output.result() for one in asked]
        finally:
            cancel_all(asked)
        return outputs[0] if _is_one(prompts, listed) else outputs

    async def achoose(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Any,
        paths: ChoicePaths,
        lora: str | None = None,
    ) -> ChoiceOutput | list[ChoiceOutput]:
        """``choose`` for asyncio. Cancelling the task cancels the requests."""
        listed = split_prompts(prompts)
        asked = self._ask(listed, choices, paths, lora)
        try:
            outputs = [await asyncio.wrap_future(one.output) for one in asked]
        finally:
            cancel_all(asked)
        return outputs[0] if _is_one(prompts, listed) else outputs

    def _ask(
        self, listed: list[Prompt], choices: Any, paths: ChoicePaths, lora: str | None = None
    ) -> list[_Asked]:
        """Queue what every prompt needs."""
        require_one_of("paths", paths, get_args(ChoicePaths))
        values = _read_choices(choices)
        vocabulary, length = self._setup.vocabulary, self._setup.max_model_len
        spell = self._spelling.split if paths == "canonical" else None
        tree = ChoiceTree.of(list(values), vocabulary, spell)
        rows = tree.rows()
        # A slot for each row where there are enough: rows of one forward cost little.
        share = max(1, self._runner.load.num_slots // max(1, len(listed)))
        dealt = [rows[at::share] for at in range(min(share, len(rows)))]
        asked = []
        for prompt in listed:
            token_ids, pictures = self._setup.encoder.read(prompt)
            job = Job(token_ids, SamplingParams(lora=lora), length, pictures=pictures)
            _check_context(job, rows)
            one = _Asked(tuple(values.values()), tree, paths)
            for part in dealt:
                job = job._replace(scoring=Scoring(tree, part), is_streamed=False)
                self._runner.require(job)
                one.requests.append(Request(job, vocabulary, one.report))
            if not dealt:
                one.resolve()
            asked.append(one)
        self._runner.submit([request for one in asked for request in one.requests])
        return asked


class _Asked:
    """One prompt while its choices are scored. output: done once they are, or with an error."""

    def __init__(self, values: tuple[Any, ...], tree: ChoiceTree, paths: ChoicePaths) -> None:
        self.requests: list[Request] = []
        self.output: Future[ChoiceOutput] = Future()
        self.output.set_running_or_notify_cancel()  # a task that gives up leaves it as it is
        self._values, self._tree, self._paths = values, tree, paths

    def cancel(self) -> None:
        """The prompt's scores are not wanted any more."""
        cancel_all(self.requests)

    def report(self, chunk: Chunk) -> None:
        """One of the requests has ended; called from the engine's thread."""
        if chunk.completion is None or self.output.done():
            return
        if chunk.completion.error is not None:
            self.output.set_exception(chunk.completion.error)
        elif all(request.state is State.FINISHED for request in self.requests):
            self.resolve()

    def resolve(self) -> None:
        """Every row is scored."""
        rows = [row for request in self.requests for row in request.scores]
        scores = {node: found for row in rows for node, found in row.items()}
        found = self._tree.logprobs(scores)
        logprobs = dict(zip(self._values, found, strict=True))
        probabilities = {value: math.exp(logprob) for value, logprob in logprobs.items()}
        best = max(logprobs, key=logprobs.__getitem__)
        self.output.set_result(ChoiceOutput(best, probabilities, logprobs, self._paths))


def _read_choices(choices: Any) -> Mapping[str, Any]:
    """The text of each choice, and what stands for it in the output."""
    fix = "must be strings: a list of them, a Literal, or an Enum class whose values are strings"
    pairs: list[tuple[Any, Any]]
    if isinstance(choices, EnumMeta):
        members: Iterable[Any] = choices
        pairs = [(member.value, member) for member in members]
    elif get_origin(choices) is Literal:
        pairs = [(value, value) for value in get_args(choices)]
    elif isinstance(choices, Sequence) and not isinstance(choices, str | bytes):
        pairs = [(value, value) for value in choices]
    else:
        raise ConfigError("choices", choices, fix)
    for text, _ in pairs:
        if not isinstance(text, str):
            raise ConfigError("choices", text, fix)
        if not text:
            raise ConfigError("choices", text, "each must be a non-empty string")
        _check_text(text)
    if not pairs:
        raise ConfigError("choices", choices, "must hold at least one")
    return dict(pairs)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError("choices", text, "holds half of a surrogate pair; replace it") from None


def _check_context(job: Job, rows: Sequence[TokenRow]) -> None:
    needed = len(job.prompt_ids) + max((len(row.token_ids) for row in rows), default=0)
    if needed > job.max_length:
        raise PromptError(
            f"prompt and choices take {needed} tokens, but only {job.max_length} fit: shorten "
            "them, or raise max_model_len"
        )


def _is_one(prompts: Any, listed: list[Prompt]) -> bool:
    return len(listed) == 1 and listed[0] is prompts
