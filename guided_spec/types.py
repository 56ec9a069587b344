"""The records that travel between the layers: frozen, and validated when they are made.

Letters, the same everywhere: B requests, K draft tokens, V target vocabulary,
D draft vocabulary, W = ceil(V / 32) mask words, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from torch import Tensor

from guided_spec.errors import ConfigError

if TYPE_CHECKING:
    from guided_spec.grammar.spec import GrammarSpec

__all__ = ["DRAFT_POLICIES", "Accepted", "Draft", "DraftPolicy", "Noise", "SamplingParams"]

DraftPolicy = Literal["mask", "topk_walk", "validate"]
DRAFT_POLICIES: tuple[str, ...] = get_args(DraftPolicy)

MAX_SEED = 2**63 - 1


class Draft(NamedTuple):
    """What a proposer hands to the verifier.

    token_ids: [B, K] int64, target-vocabulary ids; entries at or past ``num_tokens`` are padding
        but must still be valid ids (0 will do), because the target reads them.
    num_tokens: [B] int64 in [0, K]: rows may be shorter than K.
    probs: [B, K, V] float, the distribution each token was sampled from, after mask and warp;
        None: the draft is deterministic, which the verifier treats as one-hot.
    """

    token_ids: Tensor
    num_tokens: Tensor
    probs: Tensor | None = None


class Noise(NamedTuple):
    """The randomness of one rejection step; drawn outside so that the sampler is a function.

    accept: [B, K] float32, uniform on [0, 1).
    sample: [B, V] float32, exponential(1), strictly positive.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one request is sampled.

    max_tokens: tokens to generate at most, at least 1.
    temperature: 0 is greedy.
    top_k: keep the k most probable tokens; 0 keeps all.
    top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
    min_p: drop tokens below min_p times the largest probability, in [0, 1].
    seed: in [0, 2**63); None draws one, which the output's stats report.
    stop: strings that end the text; they are not part of it.
    stop_token_ids: token ids that end the text, besides the model's own end-of-text tokens.
    ignore_eos: keep going past the end-of-text token; a grammar still ends where it ends.
    n: samples of the same prompt, which is prefilled once.
    grammar: what the text must match; None leaves it free.
    draft_policy: how a drafter with a model keeps to the grammar: "mask", "topk_walk" or
        "validate" (see ``guided_spec.proposers.draft_loop``); None leaves it to the proposer. It
        changes the speed, never the text's distribution.

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
    grammar: GrammarSpec | None = None
    draft_policy: DraftPolicy | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        _require_int("max_tokens", self.max_tokens, low=1)
        _require_int("top_k", self.top_k, low=0)
        _require_int("n", self.n, low=1)
        if self.seed is not None:
            _require_int("seed", self.seed, low=0, high=MAX_SEED)
        _require_range("temperature", self.temperature, low=0.0, high=100.0)
        _require_range("top_p", self.top_p, low=0.0, high=1.0)
        _require_range("min_p", self.min_p, low=0.0, high=1.0)
        if self.top_p == 0.0:
            raise ConfigError("top_p", self.top_p, "must be above 0; 1.0 keeps every token")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ConfigError("stop", text, "each stop string must be a non-empty str")
        for token in self.stop_token_ids:
            _require_int("stop_token_ids", token, low=0)
        _require_grammar(self.grammar)
        if self.draft_policy is not None and self.draft_policy not in DRAFT_POLICIES:
            fix = f"must be one of {', '.join(DRAFT_POLICIES)}, or None"
            raise ConfigError("draft_policy", self.draft_policy, fix)


def _require_int(name: str, value: object, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(name, value, "must be an int")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ConfigError(name, value, f"must be {bound}")


def _require_range(name: str, value: object, *, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(name, value, "must be a number")
    if not low <= value <= high:  # also refuses NaN
        raise ConfigError(name, value, f"must be between {low:g} and {high:g}")


def _require_grammar(grammar: object) -> None:
    if grammar is not None and not hasattr(grammar, "kind"):
        fix = "must be a GrammarSpec, such as GrammarSpec.json_schema(schema), or None"
        raise ConfigError("grammar", grammar, fix)
