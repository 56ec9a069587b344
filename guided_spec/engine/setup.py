"""Putting an engine together: model, tokenizer, slots, proposer and grammars.

It decides how many KV slots fit the memory and how long a text they hold, and which proposer fits
the draft checkpoint, or the target's own. What an engine does before its first request is here too:
kernels are compiled, by many threads at once, and graphs captured, so that no step does either.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from guided_spec.bundled import BUNDLED, READER, bundled_asset, name_of, named_model
from guided_spec.config import EngineConfig
from guided_spec.core import Proposer, ProposerContext
from guided_spec.engine.chats.picture_reader import PictureReader
from guided_spec.engine.engine import Engine
from guided_spec.engine.options import Options, find_tokenizer
from guided_spec.engine.outputs import Chunk
from guided_spec.engine.parallel import agree_on_least, is_parallel
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.engine.request import Job, Request
from guided_spec.engine.target.pictures import PicturePlaces
from guided_spec.engine.target.prompts import MIN_PROMPT_TOKENS
from guided_spec.errors import ConfigError, ModelError
from guided_spec.grammar.backends.registry import require_grammar_backend
from guided_spec.grammar.pipeline import RequestGrammars
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.masks.rows import launch_table_rows
from guided_spec.models.causal_lm import CausalLM, largest_context, make_causal_lm, stock_lm
from guided_spec.models.checkpoint import ADAPTER_CONFIG, check_folder, looks_local
from guided_spec.models.gguf import find_gguf
from guided_spec.models.heads.loading import find_method
from guided_spec.models.loading import load_model
from guided_spec.models.lora.adapted_model import with_adapters
from guided_spec.models.packed.blocks import BLOCK, Blocks
from guided_spec.models.packed.decoder import PackedDecoder
from guided_spec.models.packed.graph_pool import SIZES, CaptureWindow, bucket
from guided_spec.models.packed_form import PACKED_DEVICES, PackedForm, is_packed_on
from guided_spec.models.pictures.vision import split_vision
from guided_spec.models.slot_lm import SlotLM
from guided_spec.models.text_lm import TextLM
from guided_spec.models.tokenizer import (
    TOKENIZER_CONFIG,
    check_size,
    end_of_text_ids,
)
from guided_spec.ops.attention.flash_attention import DTYPES, is_installed
from guided_spec.ops.attention.slot_attention import FP8
from guided_spec.ops.host import free_memory
from guided_spec.ops.linear.fp8_linear import can_read_fp8
from guided_spec.ops.mask_words import num_mask_words
from guided_spec.ops.sampling.warm_up import SAMPLINGS, Decisions, launch_all
from guided_spec.proposers import (
    build_proposer,
    require_draft,
    require_proposer,
    resolve_auto,
)

CPU_SHARE = 0.25  # of the machine's memory: other programs live there too
# Of what the weights left on a CUDA device: activations and graphs take the rest, and half of it is
# left to a draft model, which keeps as many tokens as the target does.
CUDA_SHARE, SHARE_WITH_DRAFT_MODEL = 0.7, 0.5
FP8_WITH_DRAFT_MODEL = 1 / 3  # whose tokens take twice the bytes of the target's: it keeps 16 bits
LEAST_REST = 6 * 2**30  # bytes; or half of what there is

LEAST_CONTEXT = 4096  # tokens; below that, longer texts are preferred to more slots
STEP = 256  # tokens that a context which memory limits is a multiple of

_FOR_MEMORY = (
    "the KV cache may take %d bytes, for max_batch_size=%d texts of %d bytes a token. Pass "
    "max_model_len for longer ones (there are fewer slots then, and requests queue), a smaller "
    "max_batch_size, or more kv_memory_bytes"
)
# What checkpoints call that they have scales: those of compressed-tensors, and of ModelOpt.
_SCALED = ("kv_cache_scheme", "kv_cache_quant_algo")
_WITHOUT_SCALES = (
    "kv_dtype=%r: the checkpoint's scales of keys and values (k_scale, v_scale; %s) are not used: "
    "these are rounded as they are, and limited to 448"
)
_FOR_ROPE = "after that its rotary embedding depends on the longest text of a batch"

logger = logging.getLogger(__name__)


class SlotPlan(NamedTuple):
    """The memory of texts: how many at a time, the tokens that each may have at most.

    num_blocks: of ``BLOCK`` tokens that they share, None where each has a slot of its own.
    """

    num_slots: int
    max_model_len: int
    num_blocks: int | None = None


class _Memory(NamedTuple):
    """Bytes: of all slots, of one token, and of a slot besides its tokens."""

    budget: int
    token: int
    state: int

    def slots(self, length: int) -> int:
        return self.budget // max(length * self.token + self.state, 1)

    def length(self, num_slots: int) -> int:
        return (self.budget // num_slots - self.state) // max(self.token, 1)

    def sharing(self, most: int, length: int) -> SlotPlan:
        """Of up to ``most`` texts that share blocks, of which one holds ``length`` tokens."""
        slots = most
        if self.state:
            slots = max(min(most, (self.budget - length * self.token) // self.state), 1)
        rest = self.budget - slots * self.state
        return SlotPlan(slots, length, max(rest // max(self.token * BLOCK, 1), -(-length // BLOCK)))


def plan_slots(
    model: Any,
    config: EngineConfig,
    *,
    shares_blocks: bool = False,
    state_bytes: int | None = None,
    has_draft_model: bool = False,
) -> SlotPlan:
    """Slots for ``config.max_batch_size`` texts, as far as the memory budget goes.

    shares_blocks: texts take blocks as they grow, and wait for each other where there are too few.
    Then each may be as long as the model's own context, or all blocks. state_bytes: that a slot
    takes besides; None: what it takes by the stock modules. has_draft_model: a model of its own
    drafts, and keeps the same texts.

    Else every text has a slot. With a ``max_model_len``, there are fewer slots where the budget
    holds fewer. With None, a text may be as long as the model's own context. Where the budget does
    not hold that in every slot, it may be as long as fits, and a warning says so. It does not go
    below 4096 tokens for that: there are fewer slots instead.

    Raises ConfigError when not even one text fits, and for more tokens than the model takes.
    """
    probe = stock_lm(model, num_slots=1, max_length=1)
    budget = config.kv_memory_bytes
    if budget is None:
        with_draft = FP8_WITH_DRAFT_MODEL if config.kv_dtype == "fp8" else SHARE_WITH_DRAFT_MODEL
        share = with_draft if has_draft_model else CUDA_SHARE
        budget = agree_on_least(_default_budget(torch.device(model.device), share), model)
    state = probe.state_bytes_per_slot if state_bytes is None else state_bytes
    memory = _Memory(budget, _token_bytes(probe, config), state)
    text_config = model.config.get_text_config(decoder=True)
    own: int | None = getattr(text_config, "max_position_embeddings", None)
    most = largest_context(text_config)
    length = config.max_model_len
    if length is None:
        sharing = 1 if shares_blocks else config.max_batch_size
        length = _default_length(most, memory, sharing)
    elif own is not None and length > own:
        raise ConfigError("max_model_len", length, f"the model's context is {own}; pass less")
    fitting = memory.slots(length)
    if fitting < 1:
        size = length * memory.token + memory.state
        fix = f"one request of {length} tokens takes {size} bytes and the KV cache may take "
        fix += f"{budget}: lower max_model_len or raise kv_memory_bytes"
        raise ConfigError("max_model_len", length, fix)
    if config.max_model_len is None and own is not None and length < own:
        reason = _FOR_MEMORY % (budget, config.max_batch_size, memory.token)
        reason = _FOR_ROPE if length == most else reason
        logger.warning("texts may have %d tokens, the model's own %d: %s.", length, own, reason)
    if shares_blocks:
        return memory.sharing(config.max_batch_size, length)
    return SlotPlan(min(config.max_batch_size, fitting), length)


def _token_bytes(probe: SlotLM | TextLM, config: EngineConfig) -> int:
    """Of the keys and values of one token: fp8 takes one a number."""
    if config.kv_dtype == "fp8" and isinstance(probe, SlotLM):
        return probe.kv_numbers_per_token
    return probe.kv_bytes_per_token


def _adapted(model: PreTrainedModel, options: Options) -> PreTrainedModel:
    """The model with its adapters, if there are any. Raises ConfigError and ModelError."""
    loras = options.loras
    if loras and is_parallel(model):
        fix = "a model whose layers are split takes none: merge one into it"
        raise ConfigError("loras", [*loras], fix)
    return with_adapters(model, loras, options.config.max_batch_size) if loras else model


def _load_target(model: Any, draft: Any, config: EngineConfig, window: CaptureWindow) -> CausalLM:
    """The model over blocks where it has a packed form, else over slots. draft: see ``LLM``."""
    form, longest = None, 1 + config.longest_draft
    # On other devices, or with an explicit budget, this is not needed: a draft may be on the hub.
    is_asked = config.kv_memory_bytes is None and model.device.type == "cuda"
    has_draft_model = is_asked and _is_model(draft, model)
    plan_texts = partial(plan_slots, model, has_draft_model=has_draft_model)
    if is_packed_on(model.device, config.kernels):
        plan = plan_texts(config, shares_blocks=True)
        form = PackedForm.of(model, config.kernels, plan.max_model_len)
    if config.kv_dtype == "fp8":
        form = _in_fp8(form, model, config)
    if form is None:
        plan = plan_texts(config)
    elif state_bytes := form.state_bytes(longest):
        fixed = replace(config, max_model_len=plan.max_model_len)
        plan = plan_texts(fixed, shares_blocks=True, state_bytes=state_bytes)
    return make_causal_lm(
        model,
        num_slots=plan.num_slots,
        max_length=plan.max_model_len,
        kernels=config.kernels,
        form=form,
        num_blocks=plan.num_blocks,
        width=config.num_draft_tokens + 1,
        longest_draft=longest,
        window=window,
    )


def _in_fp8(form: PackedForm | None, model: PreTrainedModel, config: EngineConfig) -> PackedForm:
    """The form with keys and values in fp8. Raises ConfigError where that is not possible."""
    device, reason = model.device, ""
    if device.type not in PACKED_DEVICES or not is_packed_on(device, config.kernels):
        reason = f"kernels={config.kernels!r} on {device.type} keeps them in the model's dtype"
    elif device.type == "cuda" and not can_read_fp8(device.index or 0):
        reason = "this GPU cannot convert fp8, which NVIDIA's do from compute capability 8.9 on"
    elif form is None:
        kind = model.config.model_type
        reason = f"{kind!r} runs by its stock modules, which keep them in the model's dtype"
    if form is None or reason:
        raise ConfigError("kv_dtype", config.kv_dtype, f"{reason}: pass kv_dtype='auto'")
    stored: Any = getattr(model.config, "quantization_config", None) or {}
    stored = stored if isinstance(stored, dict) else stored.to_dict()
    if found := [name for name in _SCALED if stored.get(name)]:
        logger.warning(_WITHOUT_SCALES, config.kv_dtype, ", ".join(found))
    return form.in_fp8()


def _default_length(most: int | None, memory: _Memory, num_slots: int) -> int:
    """most: that the model takes, None if that is unknown."""
    if most is None:
        return LEAST_CONTEXT
    if memory.slots(most) >= num_slots:
        return most
    fitting = memory.length(num_slots) // STEP * STEP
    return min(most, max(LEAST_CONTEXT, fitting))


def _is_model(draft: Any, target: PreTrainedModel) -> bool:
    """Whether the draft is a language model of its own, and no head; True of what is not known."""
    if draft is None or not isinstance(draft, str | Path):
        return isinstance(draft, PreTrainedModel)
    try:
        return find_method(draft, target) in (None, "pard")
    except ModelError:  # a proposer may read what we cannot; else it says what is wrong
        return True


def _default_budget(device: torch.device, share: float) -> int:
    """share: of what is free on a CUDA device, and of what is left of engines that are closed."""
    if device.type == "cuda":
        free_memory(device)
        free, _ = torch.cuda.mem_get_info(device)
        return max(min(int(free * share), free - LEAST_REST), int(free * min(share, 0.5)))
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * CPU_SHARE)


DEFAULT_PROPOSER = "chain:grammar_forced+auto"
# An EAGLE-3 head drafts under masks in one CUDA graph. To look for forced text first costs the host
# as much as it brings, or more.
CHAIN_OF_GRAPHS = "chain:grammar_forced+eagle3"

BUNDLED_HEADS = ("eagle3", "mtp", "dspark")


@dataclass(slots=True)
class Setup:
    """Everything an ``LLM`` is made of."""

    model: Any
    tokenizer: Any
    config: EngineConfig
    proposer_name: str
    max_model_len: int
    vocabulary: Vocabulary
    spell: Callable[[str], list[int]]
    encoder: PromptEncoder
    grammars: RequestGrammars
    engine: Engine
    about: str

    @classmethod
    def build(cls, model: Any, proposer: str | None, draft: Any, options: Options) -> Setup:
        """Load what has to be loaded and put the engine together."""
        require_grammar_backend("grammar_backend", options.config.grammar_backend)
        if proposer:  # before a large model is loaded for it
            require_proposer(proposer)
        if draft is not None:
            _require_source("draft", draft)
        model = named_model(model)
        _require_parts(model, proposer, draft, options)
        loaded = _loaded(model, options.load)
        is_bundled = loaded.config.name_or_path == bundled_asset("target")
        if draft == BUNDLED or (draft is None and is_bundled):
            draft = _bundled_draft(proposer or DEFAULT_PROPOSER)
        config, split = options.config, split_vision(loaded, options.config.picture_tokens)
        window = CaptureWindow(largest=_largest_graph(config))
        target = _load_target(_adapted(split.language, options), draft, config, window)
        reader = PictureReader.load(model, split.sight, options.processor, options.load)
        tokenizer = find_tokenizer(model, options, reader)
        given = (target, split.language, tokenizer, config)
        context = replace(_context(*given), draft=draft, window=window)
        name = _drafter(proposer, context)
        grammars = RequestGrammars.build(config, context.vocabulary, tokenizer)
        drafter = build_proposer(name, context)
        engine = Engine(target, drafter, config, window, PicturePlaces.of(split, target))
        if config.capture and target.device.type == "cuda":
            warm_up(engine, context.vocabulary, grammars)
        engine.set_draft_lengths()
        logger.info("%s; drafts: %s", _describe(engine), _drafts_of(name, drafter))
        return cls(
            model=loaded,
            tokenizer=tokenizer,
            config=config,
            proposer_name=name,
            max_model_len=target.max_length,
            vocabulary=context.vocabulary,
            spell=context.encode,
            encoder=PromptEncoder(tokenizer, target.vocab_size, target.max_length, reader),
            grammars=grammars,
            engine=engine,
            about=_about(engine, name_of(loaded.config.name_or_path), name),
        )


# However few texts run: prompts that come alone are read by graphs of up to so many tokens.
_LEAST_GRAPH = 1024


def _largest_graph(config: EngineConfig) -> int:
    """Tokens of the longest graph: drafts of all texts, and prompt pieces in the same forward."""
    most = config.max_batch_size * (config.num_draft_tokens + 1) + MIN_PROMPT_TOKENS
    return min(bucket(max(most, _LEAST_GRAPH)), SIZES[-1])


def _context(
    target: CausalLM, base: PreTrainedModel, tokenizer: Any, config: EngineConfig
) -> ProposerContext:
    """What a proposer may use, without what it drafts with.

    base: the target without adapters: drafts are made by it alone.
    """
    check_size(tokenizer, target.vocab_size)
    stop_ids = end_of_text_ids(target.model, tokenizer)
    return ProposerContext(
        vocabulary=Vocabulary.from_tokenizer(tokenizer, target.vocab_size, stop_ids),
        encode=lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"]),
        tokenizer=tokenizer,
        target=base,
        config=config,
        num_slots=target.num_slots,
        max_model_len=target.max_length,
        device=target.device,
        dtype=target.dtype,
        blocks=target.blocks,
        axes=target.axes,
    )


def _drafter(proposer: str | None, context: ProposerContext) -> str:
    """The proposer to build, by name; None takes what is fastest on this device."""
    name = resolve_auto(proposer or DEFAULT_PROPOSER, context)
    is_default_on_cuda = proposer is None and context.device.type == "cuda"
    return "eagle3" if is_default_on_cuda and name == CHAIN_OF_GRAPHS else name


def _about(engine: Engine, source: str, proposer: str) -> str:
    """Model, proposer, device and memory, as ``repr(llm)`` shows them."""
    target = engine.model
    mebibytes = target.model.get_memory_footprint() / 2**20
    texts = f"{target.num_slots} slots of {target.max_length} tokens"
    if target.blocks is not None:
        texts = _blocks_of(target.blocks, target)
    dtype = str(target.dtype).removeprefix("torch.")
    where = f"device={str(target.device)!r}, dtype={dtype!r}"
    return f"{source!r}, proposer={proposer!r}, {where}: {mebibytes:,.0f} MiB of weights, {texts}"


def _describe(engine: Engine) -> str:
    """How the target runs, and why, in one line."""
    target, config = engine.model, engine.config
    if isinstance(target, TextLM):
        return f"{target.runs_as}, for {target.reason}"
    if target.blocks is None:
        reason = "no other form fits it"
        if not is_packed_on(target.device, config.kernels):
            reason = f"kernels={config.kernels!r} on {target.device.type}"
        return (
            f"{target.runs_as} ({reason}), {target.num_slots} slots of {target.max_length} tokens"
        )
    graphs = "without graphs"
    if target.device.type == "cuda":
        graphs = "CUDA graphs" if config.capture else "CUDA graphs as steps need them"
        is_read = target.runs_as == PackedDecoder.runs_as and target.kv_dtype in DTYPES
        if is_read and is_installed():
            graphs += ", long prompts by FlashAttention 3"
    memory = _blocks_of(target.blocks, target)
    least = engine.planner.turns.least
    turns = "" if least is None else f", halves of {least} texts take turns"
    return f"{target.runs_as} ({graphs}), {memory}, prefix cache {_prefix_cache(engine)}{turns}"


def _blocks_of(blocks: Blocks, target: CausalLM) -> str:
    kept = " in fp8" if target.kv_dtype == FP8 else ""
    return f"{blocks.num_blocks} blocks of {BLOCK} tokens{kept} for {target.num_slots} texts"


def _drafts_of(name: str, drafter: Proposer) -> str:
    return f"{name} ({drafter.runs_as})" if drafter.runs_as else name


def _prefix_cache(engine: Engine) -> str:
    if engine.planner.prefixes.takes:
        return "on"
    if not engine.config.prefix_cache:
        return "off (prefix_cache=False)"
    if engine.model.has_linear_state:
        return "off (a linear state has no beginning)"
    return "off (the draft head's stock modules keep whole texts)"


def _require_parts(model: Any, proposer: str | None, draft: Any, options: Options) -> None:
    """What is known before anything is loaded: folders that are missing, and a missing draft."""
    for argument, source, needed in (
        ("model", model, "config.json"),
        ("draft", None if draft == BUNDLED else draft, "config.json"),
        ("tokenizer", options.tokenizer, TOKENIZER_CONFIG),
    ):
        if isinstance(source, bool | int | float | list | tuple | dict):
            kind = "tokenizer" if argument == "tokenizer" else "model"
            raise ConfigError(argument, source, f"must be a hub id, a folder, or a loaded {kind}")
        if isinstance(source, str | Path) and (looks_local(source) or Path(source).exists()):
            find_gguf(source, needed, argument=argument)
    for lora, path in options.loras.items():
        check_folder(f"loras[{lora!r}]", path, "an adapter's folder", ADAPTER_CONFIG)
    name = model if isinstance(model, str | Path) else getattr(model, "name_or_path", "")
    is_bundled = str(name) == bundled_asset("target")
    if proposer and not (draft is None and is_bundled):
        require_draft(proposer, draft)


def _loaded(model: Any, load: dict[str, Any]) -> Any:
    if isinstance(model, str | Path):
        return load_model(model, pictures=True, **load)
    for name, value in load.items():
        fix = "the model is loaded already: load it that way, or pass its folder or hub id"
        raise ConfigError(name, value, fix)
    _require_source("model", model)
    return model


def _require_source(name: str, model: Any) -> None:
    if not isinstance(model, str | Path | torch.nn.Module):
        raise ConfigError(name, model, "must be a hub id, a folder, or a loaded model")
    if name == "draft" and model == READER:
        raise ConfigError(name, model, "drafts for no model: leave it out")


def _bundled_draft(proposer: str) -> str:
    """What the bundled target drafts with, by the names in a proposer's spec."""
    heads = [name for name in re.split("[:+]", proposer) if name in BUNDLED_HEADS]
    return bundled_asset(heads[0] if heads else "draft")


_WARM_PROMPT = 8  # tokens
_WARM_STEPS = 2  # of a text at least
# The second one is llguidance's under "auto": to make that backend takes half a second.
_WARM_SCHEMAS: tuple[dict[str, Any], ...] = (
    {"type": "array", "items": {"type": "integer"}},
    {"type": "string", "maxLength": 600},
)
# Triton compiles a number that is 1 or a multiple of 16 by itself.
_WARM_BATCHES = (1, 2, 16)


def warm_up(engine: Engine, vocabulary: Vocabulary, grammars: RequestGrammars) -> None:
    """Compile the kernels of ``engine``, capture its graphs, and write some short texts with it.

    Afterwards no step captures or compiles anything: a shape without a graph runs launch by launch.

    To be called in the engine's own thread, before its first request. Shows a bar on stderr.
    """
    began = time.perf_counter()
    grammars.warm_up()
    specs = map(GrammarSpec.json_schema, _WARM_SCHEMAS)
    grammar, *others = [grammars.queue.submit(spec) for spec in specs]
    if engine.model.device.type == "cuda":
        _compile_kernels(engine)
    compiled = time.perf_counter() - began
    left = engine.capture()
    with tqdm(desc="capturing CUDA graphs", unit="graph", leave=False) as bar:
        for _ in left:
            bar.update()
        captured = bar.n
    length = min(_WARM_PROMPT * (_WARM_STEPS + 1), engine.model.max_length)
    prompt = [0] * min(_WARM_PROMPT, length - 1)
    batches = sorted({min(size, engine.model.num_slots) for size in _WARM_BATCHES})
    for batch, sampling, one in product(batches, SAMPLINGS, (grammar, None)):
        params = replace(  # the salt: no request is drafted from these texts
            sampling,
            max_tokens=_WARM_PROMPT * _WARM_STEPS,
            ignore_eos=True,
            cache_salt="guided_spec.warm_up",
        )
        job = Job(prompt, params, length, 0, one, grammars.endings)
        _write_texts(engine, [Request(job, vocabulary, _ignore) for _ in range(batch)])
    wait(others)
    engine.close_captures()
    seconds = time.perf_counter() - began
    logger.info(
        "compiled kernels and captured %d CUDA graphs in %.1f s, %.1f of them compiling ahead",
        *(captured, seconds, compiled),
    )


@torch.inference_mode()
def _compile_kernels(engine: Engine) -> None:
    """All kernels of its steps that are known beforehand, many at a time."""
    from guided_spec.ops.launch_triton import compiling_ahead  # imported here: it needs triton

    with compiling_ahead():
        # The largest first: all others are compiled meanwhile.
        launch_all(decisions_of(engine))
        with engine.compiling():
            for _ in engine.capture():
                pass
        launch_table_rows(num_mask_words(engine.model.vocab_size), engine.model.device)


def decisions_of(engine: Engine) -> Decisions:
    """What its steps decide."""
    model, config = engine.model, engine.config
    return Decisions(
        batch_size=model.num_slots,
        longest_draft=config.longest_draft,
        vocab_size=model.vocab_size,
        has_own_vocabulary=engine.proposer.has_own_vocabulary,
        verifier=config.verifier,
        dtype=model.dtype,
        device=model.device,
    )


def _write_texts(engine: Engine, requests: Sequence[Request]) -> None:
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()


def _ignore(chunk: Chunk) -> None:
    if chunk.completion is not None and chunk.completion.error is not None:
        logger.warning("a text of the warm-up failed: %s", chunk.completion.error)
