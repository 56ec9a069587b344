"""A new proposer in one file: draft what followed the last token's previous occurrence."""

from collections.abc import Sequence

import guided_spec as gs
from guided_spec.proposers.drafting import host_draft


class Echo:
    """A smaller relative of proposers/ngram.py."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: gs.ProposerContext) -> None:
        """Nothing is needed; weights would be loaded here."""

    def propose(self, batch: gs.DecodeBatch, lookahead: gs.Lookahead) -> gs.Draft:
        """``extend`` cuts every draft at the first token that the grammar forbids."""
        texts = [[*c, *d] for c, d in zip(batch.contexts, lookahead.drafted, strict=True)]
        drafts = [echo(text, batch.num_draft_tokens) for text in texts]
        return host_draft(batch, lookahead.extend(drafts))

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept between steps."""


def echo(text: list[int], length: int) -> list[int]:
    """Up to ``length`` tokens behind the last earlier occurrence of the last token."""
    behind = [i + 1 for i, token in enumerate(text[:-1]) if token == text[-1]]
    return text[behind[-1] : behind[-1] + length] if behind else []


gs.register_proposer("echo", Echo)

if __name__ == "__main__":
    with gs.LLM(proposer="echo") as llm:
        params = gs.SamplingParams(grammar=gs.GrammarSpec.regex(r"(ab){12}"))
        (output,) = llm.generate("ab ab ab", params)
        print(output.text, output.stats.steps < output.stats.output_tokens)
