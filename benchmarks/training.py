"""Speed and memory of training a head: ours beside those of speculators and SpecForge.

``python -m benchmarks.training --shape 8b`` makes random hidden states of a target, which is
written with its embedding, norm and output head alone, and trains a head of the shape on one batch
of them, over and over. Every trainer gets the same states, the same fresh head where it has the
same tensors, the same optimizer, autocast to bfloat16 on CUDA, and a loss of KL divergence at every
depth with equal weights, or, with ``--loss token_cross_entropy``, of the document's tokens, which
is SpecForge's only loss of DFlash. Documents are packed into one row where the other trainer packs.
Printed are tokens per second behind the warm-up, the peak of the device's memory, and the loss of
the first step, by which the work is seen to be the same: of DFlash, the others average over the
depths what is a sum here, and of EAGLE-3 speculators also drafts from the end of a document into
the next one. SpecForge's loss of EAGLE-3 is a cross-entropy, averaged over all places though those
count alone whose likeliest token the draft knows: the tokens that the draft knows are made the
likeliest, and its loss is printed less the target's entropy, as a mean over what counts.

Variants, and what they differ in:

=====================  ============================================================================
``ours``               as ``guided-spec train`` runs it
``ours:dense``         EAGLE-3 under dense masks, as where attention has no kernel without
``ours:recompute``     with ``--gradient-checkpointing``
``ours:eager``         nothing compiled
``speculators``        its model as it is: the output head of the draft is not trained
``speculators:head``   it is, as ours is
``speculators:plain``  the same with its losses in plain torch, which it compiles, not by its kernel
``speculators:eager``  by its kernel; of its forward the attention and its masks alone are compiled
``specforge``          by flex attention; its EAGLE-3 with the compact teacher of its offline mode
=====================  ============================================================================

A trainer that is not installed, or does not train what is asked for, is left out, and said so.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import inspect
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MethodType
from typing import Any, NamedTuple
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from transformers import LlamaConfig, Qwen3Config

from guided_spec.cli.console import stdout
from guided_spec.models.attention import shape_free_kernels
from guided_spec.models.heads.draft_head import DraftVocabulary
from guided_spec.models.heads.export import save_head
from guided_spec.models.loading import load_ends
from guided_spec.training.algorithm import TargetStates, TrainingBatch
from guided_spec.training.algorithms import heads
from guided_spec.training.compiled_layers import compile_layers
from guided_spec.training.registry import find_algorithm
from guided_spec.training.target_rows import TargetHead
from guided_spec.training.trainer import make_optimizer

CLIP = 0.5
VARIANTS = {
    "eagle3": (
        *("ours", "ours:dense", "ours:recompute", "ours:eager"),
        *("speculators", "speculators:head", "speculators:plain", "speculators:eager", "specforge"),
    ),
    "dflash": (
        *("ours", "ours:recompute", "ours:eager"),
        *("speculators", "speculators:head", "speculators:plain", "speculators:eager", "specforge"),
    ),
}
KL, TOKENS = "kl", "token_cross_entropy"
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 8,
        "vocab_size": 16384,
    },
    "toy": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 8,
        "vocab_size": 512,
    },
}


class Work(NamedTuple):
    """What is trained on. folder: of the target. head: of the fresh head, for other trainers.

    options: of the command line. model: our draft, whose head was written.
    """

    folder: Path
    head: Path
    target: Any
    batch: TrainingBatch
    states: TargetStates
    options: Any


class Result(NamedTuple):
    """Of one variant; bytes is None without CUDA."""

    variant: str
    tokens_per_second: float
    peak_bytes: int | None
    first_loss: float
    first_seconds: float


Trainee = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and its loss on the batch."""


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Parse the command line, measure, print and, if asked, write JSON."""
    options = _parser().parse_args(arguments)
    torch.manual_seed(0)
    results = []
    with TemporaryDirectory() as folder, shape_free_kernels():
        work = _prepare(Path(folder), options)
        for variant in options.variants or VARIANTS[options.algorithm]:
            if problem := _problem(variant.partition(":")[0], work):
                stdout().print(f"{variant}: {problem}")
                continue
            results.append(run_variant(work, variant))
            stdout().print(_line(results[-1]))
            if options.output is not None:  # a run that is stopped keeps what it has
                _write(results, options)
    return results


def _problem(package: str, work: Work) -> str:
    """Why ``package`` cannot train what is asked for; empty where it can."""
    options = work.options
    if package == "ours":
        return ""
    is_dflash_of_specforge = package == "specforge" and options.algorithm == "dflash"
    if options.loss != (TOKENS if is_dflash_of_specforge else KL):
        return f"it has no {options.algorithm} with --loss {options.loss}"
    if is_dflash_of_specforge and options.draft_vocab_size != work.target.config.vocab_size:
        return f"it scores all tokens: pass --draft-vocab-size {work.target.config.vocab_size}"
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def _write(results: Sequence[Result], options: argparse.Namespace) -> None:
    chosen = vars(options) | {"output": str(options.output)}
    record = {"options": chosen, "results": [result._asdict() for result in results]}
    options.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--algorithm", choices=sorted(VARIANTS), default="eagle3")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--variants", nargs="*", help="by default all of the algorithm")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="of a document, in tokens")
    parser.add_argument("--answers", type=float, default=1.0, help="share that is trained on")
    parser.add_argument("--draft-vocab-size", type=int, default=32000)
    parser.add_argument("--ttt-steps", type=int, help="by default 3, of a block 15")
    parser.add_argument("--anchors", type=int, default=128, help="of a document, for blocks")
    parser.add_argument("--loss", choices=(KL, TOKENS), default=KL)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="write JSON here too")
    return parser


def _line(result: Result) -> str:
    peak = "" if result.peak_bytes is None else f", {result.peak_bytes / 2**30:.1f} GiB"
    return (
        f"{result.variant}: {result.tokens_per_second:.0f} tokens/s{peak}, "
        f"loss {result.first_loss:.3f}, first step {result.first_seconds:.1f} s"
    )


def run_variant(work: Work, variant: str) -> Result:
    """Train by one variant; what it held is freed again."""
    package, _, change = variant.partition(":")
    is_on_cuda = work.options.device == "cuda"
    with _changed(change):
        model, loss = TRAINERS[package](work, change)
        optimizer = make_optimizer(model, learning_rate=1e-4, weight_decay=0.0)
        began = time.perf_counter()
        first = _step(model, loss, optimizer, work)
        first_seconds = time.perf_counter() - began
        _step(model, loss, optimizer, work)
        if is_on_cuda:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(work.options.steps):
            last = _step(model, loss, optimizer, work, wait=False)
        last.item()
        seconds = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if is_on_cuda else None
    tokens = int(work.batch.lengths.sum()) * work.options.steps
    del model, loss, optimizer
    gc.collect()
    torch.compiler.reset()
    if is_on_cuda:
        torch.cuda.empty_cache()
    return Result(variant, tokens / seconds, peak, float(first), first_seconds)


def _step(
    model: nn.Module, loss: Callable[[], Tensor], optimizer: Any, work: Work, *, wait: bool = True
) -> Tensor:
    is_on_cuda = work.options.device == "cuda"
    with torch.autocast("cuda", dtype=torch.bfloat16) if is_on_cuda else nullcontext():
        value = loss()
    value.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    value = value.detach()
    return value.cpu() if wait else value


@contextmanager
def _changed(change: str) -> Iterator[None]:
    """What is patched of ours while a variant runs."""
    with ExitStack() as stack:
        if change == "dense":
            stack.enter_context(mock.patch.object(heads, "has_kernel", return_value=False))
        if change == "eager":
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


def _prepare(folder: Path, options: Any) -> Work:
    """Write the target's ends and a fresh head, and make the states."""
    shape, device = SHAPES[options.shape], torch.device(options.device)
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    config = LlamaConfig(
        **shape,
        max_position_embeddings=max(options.length, 2048),
        architectures=["LlamaForCausalLM"],
        dtype=dtype,
    )
    path = folder / "target"
    config.save_pretrained(path)
    size, vocab = shape["hidden_size"], shape["vocab_size"]
    wide = [torch.randn(vocab, size, device=device, dtype=dtype) * size**-0.5 for _ in range(2)]
    wide[1][: options.draft_vocab_size] *= 2  # the draft knows the likeliest tokens
    tensors = {"model.embed_tokens.weight": wide[0], "lm_head.weight": wide[1]}
    tensors["model.norm.weight"] = torch.ones(size, dtype=dtype)
    save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path / "model.safetensors")
    target = load_ends(path, device=device)
    batch = _batch(options, vocab)
    model = _ours(target, options)
    save_head(model.head, folder / "head", layout="speculators", target=target, dtype=torch.float32)
    aux = len(model.feature_layers)
    drawn = torch.randn(*batch.token_ids.shape, aux + 1, size, device=device, dtype=dtype)
    states = TargetStates(drawn[:, :, :-1], drawn[:, :, -1])
    return Work(path, folder / "head", target, batch.to(device), states, options)


def _batch(options: Any, vocab_size: int) -> TrainingBatch:
    shape = (options.documents, options.length)
    answer = torch.arange(options.length) >= max(1, round((1 - options.answers) * options.length))
    return TrainingBatch(
        token_ids=torch.randint(vocab_size, shape),
        loss_mask=answer.expand(shape).contiguous(),
        lengths=torch.full(shape[:1], options.length),
        bitmask=torch.full((1, -(-vocab_size // 32)), -1, dtype=torch.int32),
        mask_rows=torch.zeros(shape, dtype=torch.int64),
        indices=torch.arange(shape[0]),
    )


def _ours(target: Any, options: Any, **changes: Any) -> Any:
    """A fresh draft, the same each time; over all tokens or the first of the vocabulary."""
    torch.manual_seed(1)
    size, total = options.draft_vocab_size, target.config.vocab_size
    known = torch.arange(size, device=target.device)
    own = {"ttt_steps": _depths(options), **changes}
    if options.algorithm == "dflash":
        own["anchors"] = options.anchors
    return find_algorithm(options.algorithm).from_training_args(
        target.config,
        target=target,
        vocabulary=None if size == total else DraftVocabulary(known, total),
        **own,
    )


def _depths(options: Any) -> int:
    default = 15 if options.algorithm == "dflash" else 3
    return int(options.ttt_steps or default)


def _train_ours(work: Work, change: str) -> Trainee:
    options = work.options
    model = _ours(work.target, options, gradient_checkpointing=change == "recompute")
    model.train()
    if change != "eager":
        compile_layers(model)
    forward, _ = find_algorithm(options.algorithm).get_trainer_kwargs(
        masked=False, ttt_steps=_depths(options), ttt_step_loss_decay=1.0, loss=options.loss
    )
    return model, lambda: model(work.batch, work.states, **forward).loss


def _train_speculators(work: Work, change: str) -> Trainee:
    name = {"eagle3": "Eagle3", "dflash": "DFlash"}[work.options.algorithm]
    core = importlib.import_module(f"speculators.models.{work.options.algorithm}.core")
    losses = importlib.import_module("speculators.losses")
    device = work.batch.token_ids.device
    config = vars(core)[f"{name}SpeculatorConfig"].from_pretrained(work.head)
    is_on_cuda = device.type == "cuda"
    kernel = "simple_flex_attention" if is_on_cuda else "eager"
    config.transformer_layer_config._attn_implementation = kernel
    model = vars(core)[f"{name}DraftModel"].from_pretrained(work.head, config=config)
    model = model.float().to(device).train()
    model.lm_head.weight.requires_grad_(requires_grad=change != "")
    if not is_on_cuda:  # it compiles where a GPU is, and its masks need not be compiled here
        vars(core).update(_compiled_create_block_mask=vars(core)["create_block_mask"])
    if change == "eager" and is_on_cuda:
        attention = importlib.import_module("speculators.models.attention")
        vars(attention).update(flex_attention=torch.compile(flex_attention.flex_attention))
        model._create_mask_fn = torch.compile(flex_attention.create_block_mask)
        model.forward = MethodType(inspect.unwrap(type(model).forward), model)
    is_fused = is_on_cuda and change != "plain"
    loss_config = losses.resolve_loss_config("kl_div", "fused" if is_fused else "eager")
    inputs = _packed(work) | {"loss_config": loss_config}
    if work.options.algorithm == "eagle3":
        inputs |= {"ttt_steps": _depths(work.options), "ttt_step_loss_decay": 1.0}
    else:
        inputs |= {"max_anchors": work.options.anchors * work.options.documents, "gamma": 1e9}
    return model, lambda: model(**inputs)[1]


def _packed(work: Work) -> dict[str, Tensor]:
    """The documents behind one another, as speculators' trainer has them.

    EAGLE-3: tokens and last states one further than the rest, and masks where a token is predicted
    from; the places at the ends of documents that have no such token count as padding.
    """
    batch, states = work.batch, work.states
    documents = batch.indices[:, None].expand_as(batch.token_ids).clone()
    places = torch.arange(batch.token_ids.shape[1], device=documents.device)
    found = {
        "hidden_states": states.aux.flatten(2),
        "input_ids": batch.token_ids,
        "verifier_last_hidden_states": states.last,
        "loss_mask": batch.loss_mask,
        "position_ids": places.expand_as(documents),
        "document_ids": documents,
    }
    if work.options.algorithm == "eagle3":
        found["input_ids"] = batch.token_ids.roll(-1, 1)
        found["verifier_last_hidden_states"] = states.last.roll(-1, 1)
        found["loss_mask"] = batch.loss_mask.roll(-2, 1)
        found["loss_mask"][:, -2:] = False
        found["position_ids"] = found["position_ids"] + 1
        documents[:, -1] = -1
    return {name: part.flatten(0, 1).unsqueeze(0) for name, part in found.items()}


def _train_specforge(work: Work, change: str) -> Trainee:
    """Its draft, with fresh weights of its own; what it borrows is frozen, as by its trainer."""
    del change
    # Flex attention has no gradient on a CPU.
    kernel = "flex_attention" if work.batch.token_ids.is_cuda else "sdpa"
    train = _specforge_dflash if work.options.algorithm == "dflash" else _specforge_eagle3
    return train(work, kernel)


def _specforge_eagle3(work: Work, kernel: str) -> Trainee:
    drafts = importlib.import_module("specforge.modeling.draft.llama3_eagle")
    core = importlib.import_module("specforge.algorithms.eagle3.model")
    target, size, depths = work.target, work.options.draft_vocab_size, _depths(work.options)
    config = LlamaConfig(**target.config.to_dict() | {"num_hidden_layers": 1, "pad_token_id": 0})
    config.draft_vocab_size, config.norm_output = size, True
    with work.batch.token_ids.device:
        draft = drafts.LlamaForCausalLMEagle3(config, attention_backend=kernel).float()
    head, folder = _ours(target, work.options).head, work.head.with_name("safeailab")
    save_head(
        head, folder, layout="safeailab", target=target, dtype=torch.float32, embedding="omit"
    )
    embedding = {"embed_tokens.weight": target.get_input_embeddings().weight}
    draft.load_state_dict(load_file(folder / "model.safetensors") | embedding)
    draft.embed_tokens.requires_grad_(requires_grad=False)
    model = core.OnlineEagle3Model(draft, depths, kernel)
    mask = work.batch.loss_mask.roll(-2, 1)
    mask[:, -2:] = False
    normed = TargetHead(target).normed(work.states.last.roll(-1, 1))
    inputs = {
        "input_ids": work.batch.token_ids.roll(-1, 1),
        "attention_mask": torch.ones_like(work.batch.token_ids),
        "target": None,
        "loss_mask": mask.int().unsqueeze(-1),
        "hidden_states": work.states.aux.flatten(2),
        "target_hidden_for_compact": normed,
        "target_head_weight": target.get_output_embeddings().weight,
    }
    entropy, counts = _entropy(TargetHead(target), normed, mask, size)
    counted = torch.stack([counts[:, depth:].sum() for depth in range(depths)])
    least = torch.stack([entropy[:, depth:].sum() for depth in range(depths)]) / counted
    weights = counts.numel() / counted
    return model, lambda: (torch.stack(model(**inputs)[0]) * weights - least).sum()


def _entropy(head: TargetHead, normed: Tensor, mask: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Of the target over the draft's tokens, [B, T], where a place counts, and whether it does."""
    found, counts = torch.zeros(mask.shape, device=mask.device), mask.clone()
    for row, states in enumerate(normed):
        logits = head.logits(states).float()
        counts[row] &= logits.argmax(-1) < size
        p = logits[:, :size].log_softmax(-1)
        found[row] = -(p.exp() * p).sum(-1) * counts[row]
    return found, counts


def _specforge_dflash(work: Work, kernel: str) -> Trainee:
    drafts = importlib.import_module("specforge.modeling.draft.dflash")
    core = importlib.import_module("specforge.algorithms.common.dflash_family_model")
    target, options, device = work.target, work.options, work.batch.token_ids.device
    layout = _ours(target, options).head.layout
    config = Qwen3Config(**layout.config.to_dict())
    config.block_size, config._attn_implementation = layout.block_size, kernel
    config.num_target_layers = target.config.num_hidden_layers
    layers = [index - 1 for index in layout.aux_hidden_layers]
    config.dflash_config = {"target_layer_ids": layers, "mask_token_id": layout.mask_token_id}
    with device:
        draft = drafts.DFlashDraftModel(config).float()
    ends = (target.get_output_embeddings(), target.get_input_embeddings())
    for end in ends:
        end.requires_grad_(requires_grad=False)
    sizes = {"block_size": layout.block_size, "num_anchors": options.anchors}
    model = core.OnlineDFlashModel(
        draft, *ends, layout.mask_token_id, attention_backend=kernel, **sizes
    )
    mask = work.batch.loss_mask.float()
    inputs = (work.batch.token_ids, work.states.aux.flatten(2), mask)
    return model, lambda: model(*inputs)[0]


TRAINERS: dict[str, Callable[[Work, str], Trainee]] = {
    "ours": _train_ours,
    "speculators": _train_speculators,
    "specforge": _train_specforge,
}

if __name__ == "__main__":
    main()
