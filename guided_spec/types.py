"""The records that travel between the layers: frozen, and validated when they are made.

Letters, the same everywhere: B requests, K draft tokens, V target vocabulary,
D draft vocabulary, W = ceil(V / 32) mask words, H hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from guided_spec.errors import ConfigError, UnknownOptionError
from guided_spec.kinds import nearest_names, require_kind, require_known, require_one_of

if TYPE_CHECKING:
    from torch import Tensor  # specs are read where torch is not loaded

    from guided_spec.grammar.spec import GrammarSpec

OnShort = Literal["error", "return"]
LogprobsMode = Literal["raw", "masked", "processed"]
Verifier = Literal["rejection", "coupled"]

DraftPolicy = Literal["mask", "validate"]
DRAFT_POLICIES: tuple[str, ...] = get_args(DraftPolicy)

MAX_SEED = MAX_INTEGER = 2**63 - 1  # what a tensor of integers holds
MAX_COUNT = 2**31 - 1  # of tokens, samples and ids: sums of them stay within 64 bits
MAX_BIAS = 1e9  # nothing a model or a penalty does to it leaves float32
MAX_LOGPROBS = 20

# What one request may name: all of it is read in a thread, and used in steps, that others share.
MAX_STOP_STRINGS, MAX_STOP_LETTERS = 64, 1024
MAX_STOP_TOKENS = 1024
MAX_BAD_WORDS, MAX_BAD_LETTERS = 1024, 2**14  # letters, or tokens, of all of them
MAX_BAD_WORD = 64  # letters of one, or tokens
MAX_BIASED = 2**20  # tokens: no vocabulary has more


class Draft(NamedTuple):
    """What a proposer hands to the verifier.

    token_ids: [B, K] int64, target-vocabulary ids; entries at or past ``num_tokens`` are padding
        but must still be valid ids (0 will do), because the target reads them.
    num_tokens: [B] int64 in [0, K]: rows may be shorter than K.
    probs: [B, K, D] float, the distribution each token was sampled from, after mask and warp;
        None: the draft is deterministic, which the verifier treats as one-hot.
    columns: int32 [V], each target token's column in ``probs``, -1 for one that is never drawn;
        None: D is V, and every token has its id as column.
    is_certain: bool [B, K], tokens that are one-hot whatever ``probs`` says; None: no token is.
    """

    token_ids: Tensor
    num_tokens: Tensor
    probs: Tensor | None = None
    columns: Tensor | None = None
    is_certain: Tensor | None = None

    def cut(self, width: int) -> Draft:
        """The first ``width`` positions; ``num_tokens`` stays."""
        probs, is_certain = self.probs, self.is_certain
        return self._replace(
            token_ids=self.token_ids[:, :width],
            probs=None if probs is None else probs[:, :width],
            is_certain=None if is_certain is None else is_certain[:, :width],
        )


class Noise(NamedTuple):
    """The randomness of one step; drawn outside so that the verifiers are functions.

    accept: [B, K] float32, uniform on [0, 1).
    sample: float32, exponential(1), strictly positive: [B, V] for the rejection sampler, which
        draws one token a row, [B, K + 1, V] for coupled verification: one at each position.
    """

    accept: Tensor
    sample: Tensor


class Accepted(NamedTuple):
    """What the verifier decided.

    token_ids: [B, K + 1] int64: the accepted draft tokens, then one token drawn from the target,
        then -1. The drawn token is -1 itself when no token had any probability (a dead end).
    num_accepted: [B] int64 in [0, K]: accepted draft tokens.
    """

    token_ids: Tensor
    num_accepted: Tensor


class TopLogprob(NamedTuple):
    """One of the likeliest tokens at some position.

    token_id, logprob: the token and its log-probability.
    """

    token_id: int
    logprob: float


class TokenLogprobs(NamedTuple):
    """What was known about one generated token when it was chosen.

    token_id, logprob: of the token itself; at most 0.
    top: the likeliest tokens there, in descending order, the token itself among them if it is one;
        of equals the lower id comes first. Tokens without any probability are left out.
    """

    token_id: int
    logprob: float
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    max_tokens: tokens to generate at most, at least 1.
    temperature: 0 is greedy.
    top_k: keep the k most probable tokens; 0 keeps all, as does -1, which is kept as 0. More than
        2**31 - 1 is kept as that, which is above the size of any vocabulary.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens below min_p times the largest probability, in [0, 1].
    cache_salt: prompts take from the prefix cache what texts with the same salt left there, so that
        callers with different ones learn nothing of each other's prompts from the time it takes.
    seed: in [0, 2**63); None draws one, which the output's stats report. What one promises:
        docs/exactness.md.
    stop: strings that end the text; they are not part of it. At most 64 of 1,024 letters.
    stop_token_ids: token ids that end the text, besides the model's own end-of-text tokens; 1,024
        at most.
    ignore_eos: keep going past the end-of-text token; a grammar still ends where it ends.
    n: samples of the same prompt, which is prefilled once.
    grammar: what the text must match: a GrammarSpec, or what ``GrammarSpec.of`` takes, such as a
        pydantic model. It is kept as a GrammarSpec. None leaves the text free.
    complete: whether a text with a grammar always ends within ``max_tokens``. Near the limit,
        tokens that would make it impossible to finish are masked out. None does so while a path to
        the end is known, as it is for nearly all grammars, and refuses nothing where none is; True
        raises an error there. False cuts the text off at ``max_tokens``.
    on_short: what becomes of a text under a grammar that ``max_tokens`` or the context ended:
        "return" gives it as it is, and its output says so; "error" is a TextCutShortError in its
        place. Free text is returned.
    logit_bias: what to add to the logits of some tokens, from -1e9 to 1e9; -inf forbids one. Kept
        as a sorted tuple of pairs.
    bad_words: what the text must not contain, after the end of the prompt or across it. A str
        stands for its tokens at the start of a text and after a space; other splits of the same
        letters into tokens are not covered. Token ids stand for themselves. At most 1,024 words of
        64 letters or tokens, and 16,384 in all.
    allowed_token_ids: the only tokens that may be generated, those that end the text among them if
        they are listed; None allows all.
    min_tokens: tokens to generate before any token that ends the text. Stop strings and max_tokens
        end it all the same.
    repetition_penalty: divides the positive logits of tokens that stand in the prompt or the output
        and multiplies the negative ones, in [0.01, 100]; 1 changes nothing.
    frequency_penalty: what a token's logit loses for each occurrence in the output, in [-2, 2].
    presence_penalty: what it loses for standing there at all, in [-2, 2].
    draft_policy: how a drafter with a model keeps to the grammar: "mask" or "validate" (see
        ``guided_spec.proposers.draft_session``); None leaves it to the proposer. It changes the
        speed, never the text's distribution.
    logprobs: report each token's log-probability and those of that many likeliest tokens, 0 to 20;
        None reports nothing.
    logprobs_mode: of which distribution: "raw" is the model's own, "masked" the one that the
        grammar leaves of it, "processed" the one that the token was drawn from.
    echo: the text begins with that of the prompt; stop strings are not searched in it.
    lora: the adapter that writes the text, one of those of the LLM; None is the model alone.
    return_routed_experts: report the experts of each token, of a model that has any; such a request
        reads its whole prompt itself, and takes nothing from the prefix cache.

    Raises ConfigError for a value out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    grammar: GrammarSpec | Any = None
    complete: bool | None = None
    on_short: OnShort = "return"
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    draft_policy: DraftPolicy | None = None
    cache_salt: str | None = None
    logprobs: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    echo: bool = False
    lora: str | None = None
    return_routed_experts: bool = False

    def __new__(cls, *args: object, **given: object) -> SamplingParams:
        """Raise UnknownOptionError, with the nearest names, for a field that there is not."""
        if args:
            fix = "SamplingParams takes its values by name, such as max_tokens=64"
            raise ConfigError("params", args[0], fix)
        for name in given.keys() - cls.__dataclass_fields__.keys():
            require_known(name, given[name], cls.__dataclass_fields__)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _read_stop(self.stop))
        stops = _read_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS)
        object.__setattr__(self, "stop_token_ids", stops)
        routed = self.return_routed_experts
        require_switches(ignore_eos=self.ignore_eos, echo=self.echo, return_routed_experts=routed)
        require_kind("complete", self.complete, bool | None)
        require_one_of("on_short", self.on_short, get_args(OnShort))
        require_int("max_tokens", self.max_tokens, low=1, high=MAX_COUNT)
        if not isinstance(self.top_k, int) or self.top_k <= MAX_COUNT:
            require_int("top_k", self.top_k, low=-1)
        # -1 is how vLLM and SGLang say "all".
        object.__setattr__(self, "top_k", min(max(self.top_k, 0), MAX_COUNT))
        require_int("n", self.n, low=1, high=MAX_COUNT)
        if self.seed is not None:
            require_int("seed", self.seed, low=0, high=MAX_SEED)
        _require_range("temperature", self.temperature, low=0.0, high=100.0)
        _require_range("top_p", self.top_p, low=0.0, high=1.0)
        _require_range("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p", self.top_p, "must be above 0; 1.0 keeps every token")
        if self.grammar is not None:
            object.__setattr__(self, "grammar", _read_grammar(self.grammar))
        if self.complete and self.grammar is None:
            raise ConfigError("complete", self.complete, "needs a grammar; pass None without one")
        self._read_token_rules()
        require_kind("lora", self.lora, str | None)
        _require_cache_and_policy(self.cache_salt, self.draft_policy)
        _require_logprobs(self.logprobs, self.logprobs_mode)

    @property
    def kin(self) -> tuple[str | None, str | None]:
        """Equal for requests that may take what is kept of each other's: cache salt and adapter."""
        return self.cache_salt, self.lora

    @classmethod
    def from_model(cls, model: Any, **overrides: Any) -> SamplingParams:
        """The sampling that a model's generation config recommends, unless overridden.

        model: an ``LLM``, a model of transformers, or its ``GenerationConfig``. Of that are read
            temperature, top_k, top_p, min_p and repetition_penalty, and max_new_tokens as
            max_tokens; what it leaves open stays at the default here. Without ``do_sample`` it asks
            for greedy decoding, as in transformers.
        overrides: fields of this record, which come first.

        Raises ConfigError for a value out of range, and for what has no generation config.
        """
        holder = model if hasattr(model, "generation_config") else getattr(model, "model", model)
        config = getattr(holder, "generation_config", holder)
        if config is None:  # of a model that was made without one
            return cls(**overrides)
        if not hasattr(config, "do_sample"):
            fix = "must be an LLM, a model of transformers, or a GenerationConfig"
            raise ConfigError("model", model, fix)
        names = {"repetition_penalty": "repetition_penalty", "max_new_tokens": "max_tokens"}
        if config.do_sample:
            names |= {name: name for name in ("temperature", "top_k", "top_p", "min_p")}
        found = {field: getattr(config, name, None) for name, field in names.items()}
        fields = {field: value for field, value in found.items() if value is not None}
        if config.do_sample:
            fields.setdefault("temperature", 1.0)
        return cls(**{**fields, **overrides})

    def _read_token_rules(self) -> None:
        object.__setattr__(self, "logit_bias", _read_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _read_words(self.bad_words))
        if self.allowed_token_ids is not None:
            tokens = _read_ids("allowed_token_ids", self.allowed_token_ids, MAX_BIASED)
            allowed = tuple(sorted(set(tokens)))
            if not allowed:
                raise ConfigError("allowed_token_ids", (), "allow a token, or pass None for all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        require_int("min_tokens", self.min_tokens, low=0, high=MAX_COUNT)
        if self.min_tokens > self.max_tokens:
            fix = f"must be at most max_tokens, which is {self.max_tokens}"
            raise ConfigError("min_tokens", self.min_tokens, fix)
        if self.complete and self.min_tokens == self.max_tokens:
            fix = "with complete=True must be below max_tokens: one more token ends the text"
            raise ConfigError("min_tokens", self.min_tokens, fix)
        _require_range("repetition_penalty", self.repetition_penalty, low=0.01, high=100.0)
        _require_range("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _require_range("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)


# That of ``__new__`` says nothing.
_OWN = inspect.signature(SamplingParams.__init__).parameters
SamplingParams.__signature__ = inspect.Signature(list(_OWN.values())[1:])  # type: ignore[attr-defined]


def require_no_sampling(name: str, value: object) -> None:
    """Raise UnknownOptionError for an option that is one of ``SamplingParams``, by any name."""
    known = [one.name for one in fields(SamplingParams)]
    near = [name] if name in known else nearest_names(name, known)
    if near:
        fix = f"belongs to a request: pass params=SamplingParams({near[0]}=...)"
        raise UnknownOptionError(name, value, fix)


def require_int(name: str, value: object, *, low: int, high: int = MAX_INTEGER) -> None:
    """Raise ConfigError, naming the argument, for what is no int from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(name, value, "must be an int")
    if value < low and high in (MAX_COUNT, MAX_INTEGER):
        raise ConfigError(name, value, f"must be at least {low}")
    if not low <= value <= high:
        raise ConfigError(name, value, f"must be between {low} and {high}")


def require_switches(**switches: object) -> None:
    """Raise ConfigError, naming the argument, for what is no bool."""
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConfigError(name, value, "must be True or False")


def _read_list(name: str, values: Iterable[Any], most: int) -> tuple[Any, ...]:
    try:
        found = tuple(islice(values, most + 1))
    except TypeError:
        raise ConfigError(name, values, "must be a list") from None
    if len(found) > most:
        raise ConfigError(name, f"{len(found)} of them, or more", f"must be at most {most}")
    return found


def _read_ids(name: str, values: Iterable[Any], most: int) -> tuple[int, ...]:
    found = _read_list(name, values, most)
    if set(map(type, found)) != {int} or min(found) < 0 or max(found) > MAX_COUNT:
        for token in found:
            require_int(name, token, low=0, high=MAX_COUNT)
    return found


def _read_stop(given: str | Iterable[Any]) -> tuple[str, ...]:
    if isinstance(given, bytes) or not isinstance(given, str | Iterable):
        raise ConfigError("stop", given, "must be a str, or a list of them")
    found = _read_list("stop", [given] if isinstance(given, str) else given, MAX_STOP_STRINGS)
    for text in found:
        if not isinstance(text, str) or not text:
            raise ConfigError("stop", text, "each stop string must be a non-empty str")
        if len(text) > MAX_STOP_LETTERS:
            fix = f"each stop string must have at most {MAX_STOP_LETTERS} letters"
            raise ConfigError("stop", f"{len(text)} letters", fix)
    return found


def _require_range(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, value, "must be a number")
    if not low <= value <= high:  # also refuses NaN
        raise ConfigError(name, value, f"must be between {low:g} and {high:g}")


def _require_cache_and_policy(salt: object, policy: object) -> None:
    require_kind("cache_salt", salt, str | None)
    require_kind("draft_policy", policy, DraftPolicy | None)


def _require_logprobs(logprobs: object, mode: object) -> None:
    if logprobs is not None:
        require_int("logprobs", logprobs, low=0, high=MAX_LOGPROBS)
    require_one_of("logprobs_mode", mode, get_args(LogprobsMode))


def _read_grammar(grammar: Any) -> GrammarSpec:
    from guided_spec.grammar.spec import GrammarSpec  # only here: it stands above

    return GrammarSpec.of(grammar)


def _read_bias(bias: object) -> tuple[tuple[int, float], ...]:
    try:
        pairs = dict(bias)  # type: ignore[call-overload]  # which is what is tried
    except (TypeError, ValueError):
        raise ConfigError("logit_bias", bias, "must map token ids to numbers") from None
    _read_ids("logit_bias", pairs, MAX_BIASED)
    kinds = set(map(type, pairs.values()))
    if not kinds <= {int, float} or not all(-MAX_BIAS <= x <= MAX_BIAS for x in pairs.values()):
        for token, value in pairs.items():
            if value != float("-inf"):
                _require_range(f"logit_bias[{token}]", value, low=-MAX_BIAS, high=MAX_BIAS)
    return tuple(sorted(zip(pairs, map(float, pairs.values()), strict=True)))


def _read_words(words: object) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(words, str):
        words = (words,)
    if not isinstance(words, Sequence):
        raise ConfigError("bad_words", words, "must be a list of strings or of lists of token ids")
    num_letters = 0
    for word in _read_list("bad_words", words, MAX_BAD_WORDS):
        if not isinstance(word, Sequence) or not word:
            raise ConfigError("bad_words", word, "each must be a non-empty str or token ids")
        require_word_length(word)
        num_letters += len(word)
        if not isinstance(word, str):
            _read_ids("bad_words", word, MAX_BAD_WORD)
    if num_letters > MAX_BAD_LETTERS:
        fix = f"all together must have at most {MAX_BAD_LETTERS}"
        raise ConfigError("bad_words", f"{num_letters} letters or tokens", fix)
    return tuple(word if isinstance(word, str) else tuple(word) for word in words)


def sample_seed(seed: int, index: int) -> int:
    """The seed of one of the samples of a request; that of the first is the request's own."""
    return (seed + index) % (MAX_SEED + 1)


def require_word_length(word: Sequence[Any]) -> None:
    """Raise ConfigError for a bad word of too many letters, or tokens."""
    if len(word) > MAX_BAD_WORD:
        kind = "letters" if isinstance(word, str) else "tokens"
        fix = f"each must have at most {MAX_BAD_WORD}"
        raise ConfigError("bad_words", f"{len(word)} {kind}", fix)
