"""Changes to the logits before they are warped: bias, bans and penalties.

Order: (grammar mask, applied before) -> logit_bias, bad_words, allowed_token_ids, min_tokens ->
repetition, frequency and presence penalties. Each keeps -inf at -inf and looks at one token alone,
so the mask may as well be applied last.

What the requests of a batch ask for is one table, which depends on them alone and not on their
texts: it is made once for as long as they run together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from guided_spec.errors import ConfigError
from guided_spec.ops.host import host_integers, pad_ids, to_device
from guided_spec.types import SamplingParams, require_word_length

ANY = -2  # in a ban's prefix: any token, or none
FOR_EVER = 2**62

Words = tuple[tuple[int, ...], ...]
"""Bad words as tokens."""


class OwnBans(NamedTuple):
    """The m bans of one request, on the host: see ``Bans``."""

    tokens: Tensor
    prefixes: Tensor
    until: Tensor


@dataclass(frozen=True)
class TokenRules:
    """One request's rules. Tensors are made of them once, for its first batch.

    params: of which ``logit_bias``, ``allowed_token_ids``, ``min_tokens`` and the penalties count.
    bad_words: every spelling of ``params.bad_words``, at least one token each.
    stop_ids: the tokens that would end the text, forbidden for ``params.min_tokens`` tokens.
    """

    params: SamplingParams
    bad_words: Words = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def is_used(self) -> bool:
        """Whether the request asks for anything at all."""
        return bool(self.has_bias or self.bad_words or self.params.min_tokens or self.has_penalty)

    @property
    def has_bias(self) -> bool:
        """Whether some tokens gain or lose the same everywhere."""
        return bool(self.params.logit_bias) or self.params.allowed_token_ids is not None

    @property
    def has_penalty(self) -> bool:
        """Whether tokens lose by standing in the text."""
        params = self.params
        return bool(
            params.repetition_penalty != 1 or params.frequency_penalty or params.presence_penalty
        )

    @cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """int64 [N], float32 [N]: the tokens of ``params.logit_bias``, and what they gain."""
        pairs = dict(self.params.logit_bias)
        return host_integers([*pairs]), torch.tensor([*pairs.values()], dtype=torch.float32)

    @cached_property
    def allowed(self) -> Tensor | None:
        """int64 [N]: ``params.allowed_token_ids``."""
        allowed = self.params.allowed_token_ids
        return None if allowed is None else host_integers(allowed)

    @cached_property
    def bans(self) -> OwnBans:
        """The bans of bad words, and of tokens that would end the text before ``min_tokens``."""
        early = self.stop_ids if self.params.min_tokens > 0 else ()
        depth = max((len(word) - 1 for word in self.bad_words), default=0)
        prefixes = [[ANY] * (depth + 1 - len(word)) + [*word[:-1]] for word in self.bad_words]
        prefixes += [[ANY] * depth] * len(early)
        until = [FOR_EVER] * len(self.bad_words) + [self.params.min_tokens] * len(early)
        tokens = [word[-1] for word in self.bad_words] + [*early]
        rows = host_integers(prefixes).view(len(tokens), depth)
        return OwnBans(host_integers(tokens), rows, host_integers(until))

    def bans_after(self, num_output: int) -> list[str]:
        """The parameters that may forbid a token after ``num_output`` tokens of output."""
        params = self.params
        found = {
            "logit_bias": float("-inf") in dict(params.logit_bias).values(),
            "bad_words": bool(self.bad_words),
            "allowed_token_ids": params.allowed_token_ids is not None,
            "min_tokens": num_output < params.min_tokens,
        }
        return [name for name, is_banning in found.items() if is_banning]


class Bans(NamedTuple):
    """M tokens that are forbidden, each to one request, after a prefix or up to a length.

    owners: int64 [M] rows of the table. tokens: int64 [M].
    prefixes: int64 [M, P], right-aligned after ``ANY``: what the text has to end with.
    until: int64 [M] output tokens from which on the ban is lifted.
    """

    owners: Tensor
    tokens: Tensor
    prefixes: Tensor
    until: Tensor


class Penalties(NamedTuple):
    """float32 [U, 1, 1] each, U rows of the table; 1, 0 and 0 change nothing."""

    repetition: Tensor
    frequency: Tensor
    presence: Tensor


@dataclass(frozen=True, slots=True)
class RuleTable:
    """The rules of the U of B requests that have any, on ``device``.

    rules: [U]; requests: [U] which of the B requests each row is, ``index`` the same on the device.
    bias: float32 [U, V], -inf for forbidden tokens; None when no row has one.
    bans, penalties: None when no row has any.
    """

    rules: tuple[TokenRules, ...]
    requests: tuple[int, ...]
    index: Tensor
    batch_size: int
    vocab_size: int
    bias: Tensor | None
    bans: Bans | None
    penalties: Penalties | None

    @classmethod
    def stack(
        cls, rules: Sequence[TokenRules | None], vocab_size: int, device: torch.device
    ) -> RuleTable | None:
        """Made from the rules of B requests; None where no request has any."""
        used = {row: one for row, one in enumerate(rules) if one is not None and one.is_used}
        if not used:
            return None
        listed = tuple(used.values())
        return cls(
            rules=listed,
            requests=tuple(used),
            index=to_device(list(used), device),
            batch_size=len(rules),
            vocab_size=vocab_size,
            bias=_stack_bias(listed, vocab_size, device),
            bans=_stack_bans(listed, device),
            penalties=_stack_penalties(listed, device),
        )

    @property
    def device(self) -> torch.device:
        """The device of its tensors."""
        return self.index.device

    @property
    def depth(self) -> int:
        """P, the last tokens of a text that its bans look at."""
        return 0 if self.bans is None else self.bans.prefixes.shape[1]


def _stack_bias(
    rules: Sequence[TokenRules], vocab_size: int, device: torch.device
) -> Tensor | None:
    if not any(one.has_bias for one in rules):
        return None
    bias = torch.zeros(len(rules), vocab_size)
    for row, one in zip(bias, rules, strict=True):
        if one.allowed is not None:
            row.fill_(float("-inf")).index_fill_(0, one.allowed, 0.0)
        row.index_add_(0, *one.bias)
    return bias.to(device, non_blocking=True)


def _stack_bans(rules: Sequence[TokenRules], device: torch.device) -> Bans | None:
    own = [one.bans for one in rules]
    counts = [len(bans.tokens) for bans in own]
    if not any(counts):
        return None
    depth = max(bans.prefixes.shape[1] for bans in own)
    prefixes = [pad(one.prefixes, (depth - one.prefixes.shape[1], 0), value=ANY) for one in own]
    parts = Bans(
        owners=torch.arange(len(own)).repeat_interleave(torch.tensor(counts)),
        tokens=torch.cat([bans.tokens for bans in own]),
        prefixes=torch.cat(prefixes),
        until=torch.cat([bans.until for bans in own]),
    )
    return Bans(*(part.to(device, non_blocking=True) for part in parts))


def _stack_penalties(rules: Sequence[TokenRules], device: torch.device) -> Penalties | None:
    if not any(one.has_penalty for one in rules):
        return None
    names = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    values = [[float(getattr(one.params, name)) for name in names] for one in rules]
    columns = to_device(values, device, torch.float32).view(len(rules), 3, 1, 1)
    return Penalties(*columns.unbind(1))


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Raises ConfigError for an id that the vocabulary does not have."""
    words = [word for word in params.bad_words if not isinstance(word, str)]
    named = {
        "stop_token_ids": max(params.stop_token_ids, default=0),
        "logit_bias": max(dict(params.logit_bias), default=0),
        "bad_words": max((max(word) for word in words), default=0),
        "allowed_token_ids": max(params.allowed_token_ids or (), default=0),
    }
    for name, token in named.items():
        if token >= vocab_size:
            fix = f"ids must be below the vocabulary's {vocab_size}"
            raise ConfigError(name, token, fix)


def spell_bad_words(params: SamplingParams, tokenizer: Any, vocab_size: int) -> Words:
    """Every token sequence that ``params.bad_words`` stand for, each once.

    A str gives its tokens as they are at the start of a text and after a space; a spelling with a
    token that the model cannot write is left out. Raises ConfigError for a str without any tokens.
    """
    spelled: dict[tuple[int, ...], None] = {}
    written = [word for word in params.bad_words if isinstance(word, str)]
    for text in written:
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            fix = "it holds half of a surrogate pair, which no tokenizer can read; replace it"
            raise ConfigError("bad_words", text, fix)
    texts = [text for word in written for text in (word, f" {word}")]
    # All in one call, which costs as much as it has letters: most of a short one is the call.
    found = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    tokens_of = dict(zip(texts, found, strict=True))
    for word in params.bad_words:
        if not isinstance(word, str):
            spelled[tuple(word)] = None
            continue
        for text in (word, f" {word}"):
            token_ids = tuple(tokens_of[text])
            if not token_ids:
                raise ConfigError("bad_words", word, "it has no tokens; name at least a letter")
            require_word_length(token_ids)
            if max(token_ids) < vocab_size:
                spelled[token_ids] = None
    return tuple(spelled)


NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The rules of a batch at one position in the requests' texts.

    table: the rules of U of the B requests. Everything else has a row for each of these.
    num_output: int64 [U] tokens of output so far.
    tails: int64 [U, P] the last tokens of prompt and output, right-aligned after ``NO_TOKEN``.
    in_prompt: bool [U, V], counts: float32 [U, V]: which tokens the prompt has, and how often
        the output has each; None without penalties.
    """

    table: RuleTable
    num_output: Tensor
    tails: Tensor
    in_prompt: Tensor | None
    counts: Tensor | None

    @classmethod
    def stack(
        cls,
        table: RuleTable | None,
        contexts: Sequence[Sequence[int]],
        prompt_lengths: Sequence[int],
    ) -> Adjustments | None:
        """The rules of ``table`` after ``contexts``; None for None.

        contexts: [B] prompt and output tokens so far. prompt_lengths: [B] how many are the prompt.
        """
        if table is None:
            return None
        device, depth = table.device, table.depth
        texts = [contexts[request] for request in table.requests]
        prompts = [prompt_lengths[request] for request in table.requests]
        lengths = [len(text) - prompt for text, prompt in zip(texts, prompts, strict=True)]
        tails = [list(text[max(len(text) - depth, 0) :]) for text in texts]
        tails = [[NO_TOKEN] * (depth - len(tail)) + tail for tail in tails]
        in_prompt = counts = None
        if table.penalties is not None:
            in_prompt, counts = _count(table, texts, prompts)
        return cls(
            table=table,
            num_output=to_device(lengths, device),
            tails=to_device(tails, device).view(len(texts), depth),
            in_prompt=in_prompt,
            counts=counts,
        )

    def apply(self, logits: Tensor, drafted: Tensor, first: int | Tensor = 0) -> Tensor:
        """Logits [B, R, V] to float32 [B, R, V]; the argument is not changed.

        drafted: int64 [B, N], N >= first + R - 1. Row r, from ``first`` to ``first + R - 1``,
            follows the first r of these tokens. Ids outside the vocabulary count as none.
        first: one for all requests, or int64 [B].

        Rows of requests without rules keep their values to the bit, and -inf stays -inf. All on one
        device: words are matched there, so nothing waits for the host.
        """
        table, scores = self.table, logits.float()
        start = first.unsqueeze(1) if isinstance(first, Tensor) else first
        rows = start + torch.arange(logits.shape[1], device=logits.device)
        rows = rows.expand(table.batch_size, -1)  # [B, R]
        is_whole = len(table.rules) == table.batch_size
        used = scores
        if not is_whole:
            used, drafted, rows = (x.index_select(0, table.index) for x in (scores, drafted, rows))
        if table.bias is not None:
            used = used + table.bias.unsqueeze(1)
        if table.bans is not None:
            used = self._ban(used, table.bans, drafted, rows)
        if table.penalties is not None:
            used = self._penalize(used, table.penalties, drafted, rows)
        return used if is_whole else scores.index_copy(0, table.index, used)

    def bans_after(self, request: int, num_output: int) -> list[str]:
        """The parameters that may forbid a token to a request after its first output tokens."""
        rules = dict(zip(self.table.requests, self.table.rules, strict=True))
        return rules[request].bans_after(num_output) if request in rules else []

    def _ban(self, scores: Tensor, bans: Bans, drafted: Tensor, rows: Tensor) -> Tensor:
        """Scores [U, R, V] without the tokens that complete a ban's prefix; rows: int64 [U, R]."""
        depth = self.tails.shape[1]
        texts = torch.cat([self.tails, drafted], 1)
        steps = rows.unsqueeze(-1) + torch.arange(depth, device=rows.device)
        windows = texts.gather(1, steps.flatten(1)).view(steps.shape)  # [U, R, P]
        prefixes = bans.prefixes.unsqueeze(1)
        applies = ((windows[bans.owners] == prefixes) | (prefixes == ANY)).all(-1)
        lengths = self.num_output.unsqueeze(1) + rows
        applies &= lengths[bans.owners] < bans.until.unsqueeze(1)
        # Added, not assigned: two bans may name one token, and only one of them apply.
        change = torch.where(applies, float("-inf"), 0.0)
        columns = torch.arange(rows.shape[1], device=rows.device).expand_as(change)
        index = (bans.owners.unsqueeze(1).expand_as(change), columns)
        token = bans.tokens.unsqueeze(1).expand_as(change)
        return scores.index_put((*index, token), change, accumulate=True)

    def _penalize(
        self, scores: Tensor, penalties: Penalties, drafted: Tensor, rows: Tensor
    ) -> Tensor:
        """Scores [U, R, V] less what their tokens lose; rows: int64 [U, R]."""
        assert self.counts is not None
        assert self.in_prompt is not None
        size = scores.shape[-1]
        depth = torch.arange(drafted.shape[1], device=drafted.device)
        is_token = (drafted >= 0) & (drafted < size)
        counted = (depth < rows.unsqueeze(-1)) & is_token.unsqueeze(1)  # [U, R, N]
        index = drafted.clamp(0, size - 1).unsqueeze(1).expand_as(counted)
        counts = self.counts.unsqueeze(1).repeat(1, scores.shape[1], 1)
        counts.scatter_add_(2, index, counted.to(counts.dtype))
        used = counts > 0
        repeated = torch.where(
            scores > 0, scores / penalties.repetition, scores * penalties.repetition
        )
        scores = torch.where(used | self.in_prompt.unsqueeze(1), repeated, scores)
        scores = scores - penalties.frequency * counts
        return scores - penalties.presence * used.to(scores.dtype)


def _count(
    table: RuleTable, texts: Sequence[Sequence[int]], prompts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """[U, V] each: which tokens the prompt has, and how often the output has each."""
    # Only texts with a penalty need to be uploaded and counted.
    texts = [text if one.has_penalty else () for text, one in zip(texts, table.rules, strict=True)]
    width = max(map(len, texts))
    ids = pad_ids(texts, width, NO_TOKEN).to(table.device, non_blocking=True)
    is_token = (ids >= 0) & (ids < table.vocab_size)
    starts = to_device(prompts, table.device).unsqueeze(1)
    is_output = torch.arange(width, device=table.device) >= starts
    ids = ids.clamp(0, table.vocab_size - 1)
    zeros = torch.zeros(len(texts), table.vocab_size, device=table.device)
    in_prompt = zeros.scatter_add(1, ids, (is_token & ~is_output).float()) > 0
    return in_prompt, zeros.scatter_add(1, ids, (is_token & is_output).float())
