"""Text that the grammar forces, drafted on the host in front of vLLM's own drafters.

Where a grammar leaves one text, that is the draft, spelled as the tokenizer spells it: a drafter
under a mask alone may begin it with another token. It stands in front of the drafter's tokens, and
behind each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from guided_spec.integrations.host_drafter import HostDrafter
from guided_spec.integrations.vllm.drafts.masks import Lead
from guided_spec.integrations.vllm.requests import GrammarRequests
from guided_spec.masks.constraint import Constraint

__all__ = ["FORCED", "ForcedLead"]

FORCED = "forced"  # what the feature is called


class ForcedLead:
    """The forced text of one drafter's requests.

    num_draft: K, the drafter's tokens. num_requests: of a batch, at most.
    """

    def __init__(self, requests: GrammarRequests, num_draft: int, num_requests: int) -> None:
        of = requests.grammars
        self._requests = requests
        self._drafter = HostDrafter(
            of.vocabulary, of.tokenizer, num_draft, num_requests, "grammar_forced"
        )
        requests.at_end(self._drafter.release)

    def of(
        self, names: Sequence[str], constraints: Sequence[Constraint | None], num_draft: int
    ) -> Lead:
        """The lead of one step; constraints: [B] as of ``GrammarRequests.commit``."""
        asked = self._requests.on_host(names, constraints, num_draft)
        return partial(self._drafter.extend, self._drafter.batch(asked))
