"""A new proposer in one file: draft what followed the last token's previous occurrence."""

from collections.abc import Sequence

import guided_spec as gs
from guided_spec.proposers.drafting import host_draft


class Echo:
    """A smaller relative of proposers/ngram.py."""

    aux_hidden_layers: tuple[int, ...] = ()

    def __init__(self, context: gs.ProposerContext) -> None:
        self.longest = context.config.num_draft_tokens

    def propose(self, batch: gs.DecodeBatch, lookahead: gs.Lookahead) -> gs.Draft:
        """``extend`` cuts every draft at the first token that the grammar forbids."""
        return host_draft(batch, lookahead.extend([self.echo(c) for c in batch.contexts]))

    def release(self, slots: Sequence[int]) -> None:
        """Nothing is kept between steps."""

    def echo(self, context: Sequence[int]) -> Sequence[int]:
        """Up to K tokens behind the last earlier occurrence of the last token."""
        for index in range(len(context) - 2, -1, -1):
            if context[index] == context[-1]:
                return context[index + 1 : index + 1 + self.longest]
        return []


gs.register_proposer("echo", Echo)

if __name__ == "__main__":
    with gs.LLM(proposer="echo") as llm:
        params = gs.SamplingParams(grammar=gs.GrammarSpec.regex(r"(ab){12}"))
        (output,) = llm.generate("ab ab ab", params)
        print(output.text, output.stats.steps < output.stats.output_tokens)
