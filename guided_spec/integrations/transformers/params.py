"""What a user of transformers asks for: grammars, logits processors and stopping criteria."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.generation import logits_process as processing
from transformers.generation import stopping_criteria as stopping

from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import MAX_SEED, SamplingParams

Fields = dict[str, Any]
"""Of ``SamplingParams``."""

Grammars = GrammarSpec | Any | Sequence[GrammarSpec | Any | None]
"""One for all prompts, or one for each, None for free text."""

NEVER = float("-inf")
_WARPING = ("temperature", "top_k", "top_p", "min_p")

# Those that arguments of generate make, by the name of the argument.
_ARGUMENTS = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "MaxTimeCriteria": "max_time",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config",
    "TopHLogitsWarper": "top_h",
    "TypicalLogitsWarper": "typical_p",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WatermarkLogitsProcessor": "watermarking_config",
}


def list_grammars(grammar: object) -> list[GrammarSpec | None]:
    """One grammar or several, each as ``GrammarSpec.of`` takes it, as a list.

    Raises ConfigError for anything else.
    """
    listed = grammar if isinstance(grammar, list | tuple) else [grammar]
    if grammar is None or not listed:
        fix = "pass a GrammarSpec, such as GrammarSpec.json_schema(schema), or a list of them"
        raise ConfigError("grammar", grammar, fix)
    return [None if one is None else GrammarSpec.of(one) for one in listed]


class Asked(NamedTuple):
    """What a call asks of every text.

    fields: of ``SamplingParams``, without the grammar, the seed and what ends a text.
    """

    fields: Fields
    ends: Ends

    @classmethod
    def read(cls, call: Mapping[str, Any], prompt_width: int) -> Asked:
        """From what transformers prepared for prompts of ``prompt_width`` tokens with padding.

        Raises ConfigError for what the engine cannot do.
        """
        config = call["generation_config"]
        ends = _read_ends(call["stopping_criteria"], prompt_width)
        fields = _read_fields(call["logits_processor"], prompt_width)
        if not config.do_sample:  # what filters leave has the same largest score
            fields = {k: value for k, value in fields.items() if k not in _WARPING}
            fields["temperature"] = 0.0
        if fields.get("min_p") and fields.get("top_p", 1.0) < 1.0:
            fix = "with top_p their order counts, and the engine has another; leave one of them out"
            raise ConfigError("min_p", fields["min_p"], fix)
        return cls({**fields, "n": config.num_return_sequences or 1}, ends)

    def params(
        self, grammar: GrammarSpec | None, known_ends: Sequence[int], *, complete: bool | None
    ) -> SamplingParams:
        """Parameters of one prompt; sampled texts get a seed drawn from torch's generator.

        known_ends: the tokens after which a grammar's text is complete. complete: as of
            ``SamplingParams``; of no use without a grammar.

        Raises ConfigError where the call has other ends only, and for values out of range.
        """
        fields, ends = dict(self.fields), self.ends
        if fields["temperature"] > 0:
            fields["seed"] = int(torch.randint(MAX_SEED, (), device="cpu"))
        if grammar is not None:
            fields |= {"grammar": grammar, "complete": complete}
            wrong = set(known_ends) - set(ends.eos_ids) if ends.eos_ids else set()
            if wrong == set(known_ends):
                fix = f"texts with a grammar end with {_listed(known_ends)} here; name one of these"
                raise ConfigError("eos_token_id", _listed(ends.eos_ids), fix)
            fields["logit_bias"] = {**fields["logit_bias"], **dict.fromkeys(wrong, NEVER)}
        return SamplingParams(
            max_tokens=ends.max_tokens,
            stop=ends.stop,
            stop_token_ids=ends.eos_ids,
            ignore_eos=True,  # of the ends that the model names: the call has named its own
            **fields,
        )


class Ends(NamedTuple):
    """When texts end.

    max_tokens: new tokens at most. eos_ids: tokens that end a text. stop: strings that do.
    """

    max_tokens: int
    eos_ids: tuple[int, ...]
    stop: tuple[str, ...]


def _listed(token_ids: Sequence[int]) -> str:
    return ", ".join(map(str, token_ids))


def _read_fields(processors: Iterable[Any], prompt_width: int) -> Fields:
    """What the processors do, in the order in which the engine does it."""
    fields: Fields = {"temperature": 1.0, "logit_bias": {}, "bad_words": [], "min_tokens": 0}
    for processor in processors:
        read = _READERS.get(type(processor))
        if read is None:
            raise _unknown("logits_processor", processor)
        found = read(processor, prompt_width)
        biases = fields["logit_bias"]
        for token, bias in found.pop("logit_bias", {}).items():
            biases[token] = biases.get(token, 0.0) + bias
        fields["bad_words"] += found.pop("bad_words", [])
        fields["min_tokens"] = max(fields["min_tokens"], found.pop("min_tokens", 0))
        fields |= found
    return fields


def _read_ends(criteria: Iterable[Any], prompt_width: int) -> Ends:
    lengths: list[int] = []
    eos_ids: set[int] = set()
    stop: tuple[str, ...] = ()
    for criterion in criteria:
        kind = type(criterion)
        if kind is stopping.MaxLengthCriteria:
            lengths.append(criterion.max_length)
        elif kind is stopping.EosTokenCriteria:
            eos_ids.update(criterion.eos_token_id.flatten().tolist())
        elif kind is stopping.StopStringCriteria:
            stop += tuple(criterion.stop_strings)
        else:
            raise _unknown("stopping_criteria", criterion)
    if not lengths:
        raise ConfigError("max_new_tokens", None, "say how many tokens to generate at most")
    return Ends(min(lengths) - prompt_width, tuple(sorted(eos_ids)), stop)


def _unknown(argument: str, value: Any) -> ConfigError:
    name = type(value).__name__
    fix = (
        "the engine cannot run it: leave it out, or take GrammarLogitsProcessor and plain generate"
    )
    if name == "GrammarLogitsProcessor":
        fix = "the engine has grammars of its own: pass grammar= instead"
    if name == "PrefixConstrainedLogitsProcessor":
        fix = "the engine cannot call it: say by grammar= what is allowed"
    return ConfigError(_ARGUMENTS.get(name, argument), name, fix)


def _read_share(name: str, warper: Any, _: int) -> Fields:
    if warper.min_tokens_to_keep > 1:
        fix = f"with min_tokens_to_keep={warper.min_tokens_to_keep} it is none of the engine's"
        raise ConfigError(name, type(warper).__name__, f"{fix}; leave that at 1")
    return {name: float(getattr(warper, name))}


def _read_penalty(processor: Any, _: int) -> Fields:
    # A tensor says how long the padding is, which the engine does not see.
    if isinstance(processor.prompt_ignore_length, int):
        fix = "the engine counts prompts in; leave it out"
        raise ConfigError("prompt_ignore_length", processor.prompt_ignore_length, fix)
    return {"repetition_penalty": float(processor.penalty)}


def _read_biases(processor: Any, _: int) -> Fields:
    biases: dict[int, float] = {}
    words: list[tuple[int, ...]] = []
    for token_ids, bias in processor.sequence_bias.items():
        if len(token_ids) == 1:
            biases[token_ids[0]] = float(bias)
        elif bias == NEVER:
            words.append(tuple(token_ids))
        else:
            fix = "the engine biases single tokens; sequences it can only forbid, by bad_words_ids"
            raise ConfigError("sequence_bias", {token_ids: bias}, fix)
    return {"logit_bias": biases, "bad_words": words}


_READERS: dict[type, Callable[[Any, int], Fields]] = {
    processing.LogitNormalization: lambda _processor, _: {},  # changes no distribution
    processing.MinLengthLogitsProcessor: lambda p, width: {
        "min_tokens": max(0, p.min_length - width)
    },
    processing.MinNewTokensLengthLogitsProcessor: lambda p, _: {"min_tokens": p.min_new_tokens},
    processing.MinPLogitsWarper: partial(_read_share, "min_p"),
    processing.NoBadWordsLogitsProcessor: _read_biases,
    processing.RepetitionPenaltyLogitsProcessor: _read_penalty,
    processing.SequenceBiasLogitsProcessor: _read_biases,
    processing.SuppressTokensLogitsProcessor: lambda p, _: {
        "logit_bias": dict.fromkeys(p.suppress_tokens.tolist(), NEVER)
    },
    processing.TemperatureLogitsWarper: lambda p, _: {"temperature": float(p.temperature)},
    processing.TopKLogitsWarper: lambda p, _: {"top_k": int(p.top_k)},
    processing.TopPLogitsWarper: partial(_read_share, "top_p"),
}
