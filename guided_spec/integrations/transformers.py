"""transformers' own generate, run by this engine: grammars, drafts and batches, exactly.

    model.generate(
        **inputs, custom_generate=guided_spec.generate, tokenizer=tokenizer, grammar=grammar
    )

transformers prepares the call and hands it over. Tested with transformers 5.17 to 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from guided_spec.engine.llm import LLM
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.transformers_call import check_call, find_left_out, read_prompts
from guided_spec.integrations.transformers_engines import Wanted, release, using_engine
from guided_spec.integrations.transformers_params import Asked
from guided_spec.integrations.transformers_processor import (
    GrammarLogitsProcessor,
    Grammars,
    list_grammars,
)
from guided_spec.types import SamplingParams

__all__ = ["GrammarLogitsProcessor", "generate", "release"]


def generate(  # noqa: PLR0913 - transformers hands on those keywords that are named here
    model: Any,
    input_ids: Tensor,
    *,
    grammar: Grammars | None = None,
    proposer: str | None = None,
    draft: Any = None,
    num_draft_tokens: int = 5,
    complete: bool | None = None,
    engine_options: Mapping[str, Any] | None = None,
    **call: Any,
) -> Tensor | GenerateDecoderOnlyOutput:
    """The callable for ``model.generate(**inputs, custom_generate=guided_spec.generate, ...)``.

    grammar: what the texts must match: one for all prompts, or a list with one for each, None for
        free text.
    proposer, draft, num_draft_tokens: who drafts, see ``LLM``.
    complete: see ``SamplingParams``: texts with a grammar end within ``max_new_tokens`` where that
        can be.
    engine_options: further settings of the engine, see ``EngineConfig``. Its ``kernels`` are
        "stock" unless told: others move the model's weights.
    call: what transformers prepared. The settings of generate are followed: lengths, end and
        padding tokens, ``do_sample`` with temperature, top_k, top_p and min_p, repetition_penalty,
        biases and bans of tokens, num_return_sequences, streamer, return_dict_in_generate. With
        ``tokenizer=``, as of generate itself; None is the one of the model's folder.

    Returns int64 [R, T] as generate does: the prompts with their padding, the new tokens, padding
    on the right; or ``GenerateDecoderOnlyOutput`` with these ``sequences``.

    Sampling takes its seeds from torch's own generator of the CPU: after ``torch.manual_seed`` it
    repeats itself. The model is as it was. Its engine stays for the next call; see ``release``.

    Raises ConfigError for what the engine cannot do, naming it, and the error of the first text
    that could not be written: UnsupportedSchemaError, GrammarDeadEndError, ...
    """
    left_out = find_left_out(model, call)
    check_call(model, call, left_out, len(input_ids))
    config, asked = call["generation_config"], Asked.read(call, input_ids.shape[1])
    prompts = read_prompts(input_ids, call)[:: asked.fields["n"]]
    specs = _one_each(grammar, len(prompts))
    if complete and grammar is None:
        raise ConfigError("complete", complete, "needs a grammar; pass None without one")
    wanted = Wanted(
        left_out.tokenizer,
        proposer,
        draft,
        {"num_draft_tokens": num_draft_tokens, **(engine_options or {})},
        num_tokens=max(map(len, prompts)) + asked.ends.max_tokens,
        num_texts=len(input_ids),
    )
    with using_engine(model, wanted) as llm:
        ends = llm.vocabulary.stop_token_ids
        params = [asked.params(spec, ends, complete=complete) for spec in specs]
        texts = _run(llm, prompts, params, left_out.streamer)
    pads = (config.pad_token_id, *asked.ends.eos_ids, ends[0])
    sequences = _join(input_ids, texts, next(pad for pad in pads if pad is not None))
    if config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences))
    return sequences


def _one_each(grammar: Grammars | None, num_prompts: int) -> list[GrammarSpec | None]:
    specs: list[GrammarSpec | None] = [None] if grammar is None else list_grammars(grammar)
    if len(specs) not in (1, num_prompts):
        fix = f"pass one for all prompts, or one for each of the {num_prompts}"
        raise ConfigError("grammar", f"{len(specs)} of them", fix)
    return specs * num_prompts if len(specs) == 1 else specs


def _run(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], streamer: Any
) -> list[list[int]]:
    """The new tokens of every text, the samples of a prompt behind one another."""
    if streamer is not None:
        return [_stream(llm, prompts[0], params[0], streamer)]
    texts = []
    for output in llm.generate(prompts, params):
        for completion in output.completions:
            if completion.error is not None:
                raise completion.error
            texts.append(completion.token_ids)
    return texts


def _stream(llm: LLM, prompt: list[int], params: SamplingParams, streamer: Any) -> list[int]:
    """The tokens come as those that log-probabilities are reported of: a chunk has text alone."""
    token_ids: list[int] = []
    for chunk in llm.stream([prompt], replace(params, logprobs=0)):
        new = [one.token_id for one in chunk.logprobs]
        if chunk.completion is not None:
            if chunk.completion.error is not None:
                raise chunk.completion.error
            new = chunk.completion.token_ids[len(token_ids) :]
        token_ids += new
        if new:
            streamer.put(torch.tensor([new]))
    streamer.end()
    return token_ids


def _join(input_ids: Tensor, texts: list[list[int]], pad: int) -> Tensor:
    """int64 [R, T]: the rows of ``input_ids`` and what follows them, padded on the right."""
    longest = max(map(len, texts))
    padded = torch.tensor([[*text, *[pad] * (longest - len(text))] for text in texts])
    return torch.cat([input_ids, padded.to(input_ids)], 1)
