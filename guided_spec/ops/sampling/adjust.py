"""Changes to the logits before they are warped: bias, bans and penalties.

Order: (grammar mask, applied before) -> logit_bias, bad_words, allowed_token_ids, min_tokens ->
repetition, frequency and presence penalties. Each keeps -inf at -inf and looks at one token alone,
so the mask may as well follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from guided_spec.ops.host import to_device
from guided_spec.ops.sampling.token_rules import ANY, Bans, Penalties, RuleTable

__all__ = ["Adjustments"]

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Adjustments:
    """The rules of a batch at one place in the requests' texts.

    table: the rules of U of the B requests. Everything else has a row for each of these.
    num_output: int64 [U] tokens of output so far.
    tails: int64 [U, P] the last tokens of prompt and output, right-aligned behind ``NO_TOKEN``.
    in_prompt: bool [U, V], counts: float32 [U, V]: which tokens stand in the prompt, and how often
        each stands in the output; None without penalties.
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
        places = rows.unsqueeze(-1) + torch.arange(depth, device=rows.device)
        windows = texts.gather(1, places.flatten(1)).view(places.shape)  # [U, R, P]
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
    """[U, V] each: which tokens stand in the prompt, and how often each stands in the output."""
    # Only texts with a penalty need to be uploaded and counted.
    texts = [text if one.has_penalty else () for text, one in zip(texts, table.rules, strict=True)]
    width = max(map(len, texts))
    padded = [[*text, *[NO_TOKEN] * (width - len(text))] for text in texts]
    ids = to_device(padded, table.device)
    is_token = (ids >= 0) & (ids < table.vocab_size)
    starts = to_device(prompts, table.device).unsqueeze(1)
    is_output = torch.arange(width, device=table.device) >= starts
    ids = ids.clamp(0, table.vocab_size - 1)
    zeros = torch.zeros(len(texts), table.vocab_size, device=table.device)
    in_prompt = zeros.scatter_add(1, ids, (is_token & ~is_output).float()) > 0
    return in_prompt, zeros.scatter_add(1, ids, (is_token & is_output).float())
