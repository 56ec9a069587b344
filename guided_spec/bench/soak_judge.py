"""Whether a completion of the soak is what its case asks for: the first thing that is wrong."""

from __future__ import annotations

from guided_spec.bench.soak_requests import Case
from guided_spec.bench.validity import is_valid
from guided_spec.engine.outputs import Completion
from guided_spec.errors import RequestCancelledError
from guided_spec.grammar.vocabulary import Vocabulary

__all__ = ["find_wrong"]


def find_wrong(case: Case, completion: Completion, vocabulary: Vocabulary) -> str | None:
    """What is wrong, None if nothing is. Texts are judged by jsonschema and re."""
    error = completion.error
    if case.is_cancelled and isinstance(error, RequestCancelledError):
        return _wrong_counts(case, completion)
    expected = case.error
    if type(error) is not (type(None) if expected is None else expected):
        wanted = "no error" if expected is None else expected.__name__
        return f"{wanted} was expected, not {type(error).__name__}: {error}"
    if error is not None:
        is_error = completion.finish_reason == "error"
        return None if is_error else f"an error with finish_reason={completion.finish_reason}"
    # A text that was steered to its end has reached it, though by its length.
    ended_by = "stop" if completion.is_complete else completion.finish_reason
    if ended_by not in case.reasons:
        return f"it ended by {ended_by}"
    return _wrong_counts(case, completion) or _wrong_text(case, completion, vocabulary)


def _wrong_counts(case: Case, completion: Completion) -> str | None:
    params, tokens = case.params, completion.token_ids
    if len(tokens) > params.max_tokens:
        return f"{len(tokens)} tokens of at most {params.max_tokens}"
    if len(tokens) != completion.stats.output_tokens:
        return f"{len(tokens)} tokens, {completion.stats.output_tokens} in the statistics"
    if (completion.logprobs is None) != (params.logprobs is None):
        return "logprobs are missing, or nobody asked for them"
    if completion.logprobs is not None:
        if [entry.token_id for entry in completion.logprobs] != tokens:
            return "logprobs of other tokens"
        if not all(entry.logprob <= 1e-6 for entry in completion.logprobs):
            return "a logprob above 0"
    return None


def _wrong_text(case: Case, completion: Completion, vocabulary: Vocabulary) -> str | None:
    text = completion.text
    if case.params.echo and isinstance(case.prompt, str):
        if not text.startswith(case.prompt):
            return "no echo of the prompt"
        text = text[len(case.prompt) :]
    if any(stop in text for stop in case.params.stop):
        return f"a stop string stands in {text!r}"
    has_ended = completion.token_ids[-1:] and completion.token_ids[-1] in vocabulary.stop_token_ids
    if completion.finish_reason == "stop" and not has_ended and not case.params.stop:
        return "it stopped without an end-of-text token"
    if has_ended and not is_valid(text, case.judged_by):
        return f"{text!r} does not match {case.judged_by}"
    return None
