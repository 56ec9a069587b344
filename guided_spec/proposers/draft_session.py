"""One step's draft of a model or head: which requests draft, under which masks, what was drawn.

A request drafts under one of two policies:

- ``mask``: each token is drawn under the grammar's mask, so that every draft token is legal.
- ``validate``: the model drafts freely. The host checks the draft afterwards; the first illegal
  token stays in it, and the verifier refuses it exactly.

Which one changes how much is accepted, never the distribution of the text: a draft sampled under a
mask is verified with its masked probabilities, and one sampled freely with those.

Masks come from one of two sources. ``HostMasks`` launches a draft token by token, each under a mask
that the host uploads. ``DeviceMasks`` are those of a draft that is one CUDA graph: the graph waits
for the host's masks while it runs, or takes them from tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from guided_spec.core import DecodeBatch, DraftInFlight, FinishedDraft, LaunchCarry, TargetOutput
from guided_spec.masks.lookahead import Lookahead
from guided_spec.masks.rows import TabledTexts
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.ops.host import Download, to_device
from guided_spec.ops.sampling.noise import DraftNoise
from guided_spec.proposers.drafting import draft_ends, no_draft, used_policies
from guided_spec.types import Accepted, Draft, DraftPolicy


class DraftRows(NamedTuple):
    """Which requests of a batch draft in a session, and how far.

    starts: [B] tokens that each draft holds before. ends: [B] tokens that it holds after it at
    most. masked_ends: [B] the same of the requests that draft under masks, ``starts`` of the
    others, whose tokens the host accepts once all are drawn. masked: the requests that draft under
    masks.
    """

    batch: DecodeBatch
    lookahead: Lookahead
    starts: list[int]
    ends: list[int]
    masked_ends: list[int]
    masked: list[int]

    @classmethod
    def from_batch(
        cls,
        batch: DecodeBatch,
        lookahead: Lookahead,
        policy: DraftPolicy,
        rows: Sequence[int] | None = None,
    ) -> DraftRows:
        """policy: of the requests that ask for none. rows: that draft, if open; None: all."""
        starts = [len(drafted) for drafted in lookahead.drafted]
        ends = draft_ends(batch, lookahead, range(len(batch)) if rows is None else rows)
        masked_ends, masked = list(starts), list[int]()
        used = zip(used_policies(batch, policy), batch.constraints, strict=True)
        for row, (own, constraint) in enumerate(used):
            if own == "mask" and constraint is not None and ends[row] > starts[row]:
                masked_ends[row] = ends[row]
                masked.append(row)
        return cls(batch, lookahead, starts, ends, masked_ends, masked)

    def tables(self) -> TabledTexts | None:
        """The texts that draft under masks and have tables on the device; None for none."""
        given = (start for start, end in zip(self.starts, self.ends, strict=True) if end > start)
        if any(given) or not self.masked:
            return None
        return self.lookahead.tabled(self.masked, self.batch.num_draft_tokens)

    def noise(self, starts: Sequence[int]) -> DraftNoise | None:
        """The noise that draws the token after ``starts`` [B] draft tokens; None where all are
        greedy."""
        batch = self.batch
        if batch.sampling.all_greedy:
            return None
        pairs = zip(batch.contexts, starts, strict=True)
        positions = [len(context) + start for context, start in pairs]
        return batch.draft_keys(to_device(positions, batch.device))


class DrawnTokens(NamedTuple):
    """All that was drawn, on the host.

    token_ids, starved: [K] of [B] each, as of ``Lookahead.accept_ids``. starts: [B] the position in
    each draft of the first of them.
    """

    token_ids: Sequence[Sequence[int]]
    starved: Sequence[Sequence[int]]
    starts: Sequence[int]


class DrawnFrom(NamedTuple):
    """What tokens were drawn from: probs float32 [B, K, D]. rescued: int64 [B, K], see
    ``DraftChoice``; None without a reduced vocabulary."""

    probs: Tensor
    rescued: Tensor | None


class MaskSource(Protocol):
    """Where the masks of a session come from, and what was drawn under them."""

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        """Fills the masks that the device waits for, see ``DraftInFlight``; None: it waits for
        none."""
        ...

    @property
    def ids(self) -> Tensor:
        """What was drawn, int64 [B, K] target ids, 0 where there is none."""
        ...

    @property
    def drawn_from(self) -> DrawnFrom | None:
        """None where every request is greedy."""
        ...

    def begin_report(self) -> None:
        """Begin to copy to the host what ``report`` returns."""
        ...

    def accept_masked(self) -> None:
        """Have the lookahead accept what was drawn under the host's masks, to the last token."""
        ...

    def report(self) -> DrawnTokens:
        """Wait for all that was drawn."""
        ...


class DraftSession:
    """A draft that is drawn, or being drawn; a ``DraftInFlight``.

    vocabulary: what the logits score; None: the target's own V tokens. launch_carry: see
    ``FinishedDraft``.
    """

    is_advanced = False

    def __init__(
        self,
        rows: DraftRows,
        masks: MaskSource,
        vocabulary: DraftVocabulary | None,
        launch_carry: LaunchCarry | None = None,
    ) -> None:
        self._rows, self._masks, self._vocabulary = rows, masks, vocabulary
        self._launch_carry = launch_carry
        ids = masks.ids
        pairs = zip(rows.starts, rows.ends, strict=True)
        self.most = tuple(min(end - start, ids.shape[1]) for start, end in pairs)
        self.draft = Draft(ids, to_device(self.most, ids.device))
        masks.begin_report()

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        """Fills masks while the device waits, see ``DraftInFlight``."""
        return self._masks.serve_mailbox

    def finish(self) -> Draft:
        """Accept what was drawn; the draft with the lengths that the grammars leave it.

        An illegal token that was sampled stays at a draft's end: to drop it would bias the text.
        """
        rows, lookahead = self._rows, self._rows.lookahead
        lookahead.keep_sources()
        with lookahead.until(rows.masked_ends):
            self._masks.accept_masked()
        with lookahead.until(rows.ends):
            if lookahead.can_draft(1):  # the others, and those whose masks came from tables
                lookahead.accept_drawn(*self._masks.report())
        parts = zip(lookahead.lengths, rows.starts, rows.ends, strict=True)
        lengths = [now - start if end > start else 0 for now, start, end in parts]
        ids = self.draft.token_ids
        draft = Draft(ids, to_device(lengths, ids.device))
        drawn_from = self._masks.drawn_from
        return draft if drawn_from is None else self._with_probs(draft, drawn_from)

    def carry(self, accepted: Accepted, output: TargetOutput, packed: Download) -> object | None:
        """State for the next step's draft, from ``launch_carry``; None where there is none."""
        return None if self._launch_carry is None else self._launch_carry(accepted, output, packed)

    def _with_probs(self, draft: Draft, drawn_from: DrawnFrom) -> Draft:
        probs, rescued = drawn_from
        columns = None if self._vocabulary is None else self._vocabulary.columns
        is_certain = None if rescued is None else rescued >= 0
        return draft._replace(probs=probs, columns=columns, is_certain=is_certain)


def no_draft_in_flight(
    batch: DecodeBatch, launch_carry: LaunchCarry | None = None
) -> DraftInFlight:
    """A draft without tokens. launch_carry: see ``FinishedDraft``."""
    return FinishedDraft(no_draft(batch), (0,) * len(batch), launch_carry)
