"""Keys, values and latents in fp8 on a CUDA device: kernels against definitions, and an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from guided_spec import LLM, GrammarSpec, SamplingParams
from guided_spec.engine import setup
from guided_spec.errors import ConfigError
from guided_spec.ops.attention.latent_attention import keep_latents, latent_attention
from guided_spec.ops.attention.slot_attention import (
    FP8,
    KeyValues,
    QkvShape,
    Rotation,
    Window,
    as_kept,
)
from guided_spec.ops.attention.slot_attention import slot_attention as attend
from guided_spec.ops.pointwise import rotate_and_store
from tests.gpu.test_latent_cuda import DEEPSEEK
from tests.gpu.test_latent_cuda import case as latent_case
from tests.gpu.test_slot_attention_cuda import CUDA, TOLERANCE, case, compare
from tests.latent_lines import Widths, make_latents
from tests.ops import test_rotary as rotary
from tests.slot_lines import Case, SharedPrefix, Span, kept_positions, make

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batches(batch: int, tokens: int, dtype: torch.dtype) -> None:
    compare(case(batch, (32, 8), tokens, 128), dtype, kept_in=FP8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [8, 16, 48, 64, 80, 192, 256])
def test_sizes_of_a_head(width: int, dtype: torch.dtype) -> None:
    compare(case(3, (4, 2), 5, width), dtype, kept_in=FP8)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("window", [None, Window(50), Window(50, is_chunk=True)])
def test_prompts(window: Window | None, dtype: torch.dtype) -> None:
    """Whole tiles, of 64 queries and of 128, and masked ones."""
    for batch, tokens in ((1, 150), (3, 90), (64, 60)):
        given = case(batch, (32, 8), tokens, 128, window)._replace(block=64, has_sinks=batch == 3)
        compare(given, dtype, tokens, kept_in=FP8)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_texts_that_begin_alike(dtype: torch.dtype) -> None:
    spans = [Span(slot, 128 + 5 * (slot % 9), 6) for slot in range(20)]
    alike = (SharedPrefix(tuple(range(10)), 2), SharedPrefix(tuple(range(10, 19)), 1))
    compare(Case(8, 4, 128, 300, 64, spans, alike=alike), dtype, 6, kept_in=FP8)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_number_is_rounded_as_the_definition_says(dtype: torch.dtype) -> None:
    """All of 16 bits; the largest ones to 448, NaN to NaN."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    data = make(Case(8, 1, 256, 40, 32, [Span(0, 0, 32)])).to(dtype).kept_in(FP8).to(CUDA)
    states = numbers.view(32, 8, 256).to(CUDA)
    attend(data.query, KeyValues(states, states.flip(0)), data.buffers, data.places, scale=1.0)
    block = data.places.tables[0, 0]
    for buffer, wanted in zip(data.buffers, (states, states.flip(0)), strict=True):
        found = buffer[block].transpose(0, 1).cpu().view(torch.uint8)
        expected = as_kept(wanted.cpu(), FP8).view(torch.uint8)
        is_nan = wanted.isnan().cpu()
        assert torch.equal(found[~is_nan], expected[~is_nan])
        assert found[is_nan].view(FP8).float().isnan().all()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [QkvShape(32, 8, 128), *rotary.SHAPES])
def test_rotated_keys_are_rounded_once_more(shape: QkvShape, dtype: torch.dtype) -> None:
    for part in rotary.PARTS:
        packed, rotation, places = rotary.make(shape, part=part)
        at = replace(
            places,
            tokens=places.tokens.to(CUDA),
            rows=places.rows.to(CUDA),
            tables=places.tables.to(CUDA),
        )
        turns = Rotation(*(one.to(CUDA, dtype) for one in rotation[:2]))
        there = (300 * packed).to(CUDA, dtype)
        buffers = KeyValues(*(one.to(CUDA) for one in rotary.empty(shape, places, 4, FP8)))
        rotate_and_store(there, turns, shape, None, buffers, at)
        kept = kept_positions(places, 4)
        for got, wanted in zip(
            buffers, rotary.stored_again(there.cpu(), shape, places, 4), strict=True
        ):
            got, wanted = (one.cpu().float().transpose(1, 2)[kept] for one in (got, wanted))
            torch.testing.assert_close(got, wanted, atol=0, rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("widths", [DEEPSEEK, Widths(24, 6)])
@pytest.mark.parametrize("tokens", [1, 6, 70])
def test_latents(tokens: int, widths: Widths, dtype: torch.dtype) -> None:
    given = latent_case(3, tokens)._replace(width=sum(widths))
    ours = make_latents(given, widths, dtype, CUDA).kept_in(FP8)
    places, tolerance = replace(ours.places, width=tokens), TOLERANCE[dtype]
    found = keep_latents(
        ours.query.rotary, ours.packed, ours.keys, ours.rotation, ours.buffers, places
    )
    theirs = make_latents(given, widths, dtype).kept_in(FP8)
    expected = keep_latents(
        theirs.query.rotary,
        theirs.packed,
        theirs.keys,
        theirs.rotation,
        theirs.buffers,
        theirs.places,
    )
    used, kept = theirs.places.tokens[0] >= 0, kept_positions(theirs.places, given.block)
    torch.testing.assert_close(found.cpu()[used], expected[used], atol=tolerance, rtol=tolerance)
    for got, wanted in zip(ours.buffers, theirs.buffers, strict=True):
        got, wanted = (one.cpu().float().transpose(1, 2)[kept] for one in (got, wanted))
        # A number half way between two of fp8 may go to either.
        torch.testing.assert_close(got, wanted, equal_nan=True, atol=2.0**-9, rtol=2.0**-3)
    # Of the same latents, both read the same.
    same = KeyValues(*(buffer.cpu() for buffer in ours.buffers))
    scale = sum(widths) ** -0.5
    seen = latent_attention(ours.query, ours.buffers, places, scale=scale)
    wanted = latent_attention(theirs.query, same, theirs.places, scale=scale)
    torch.testing.assert_close(seen.cpu()[used], wanted[used], atol=tolerance, rtol=tolerance)


PROMPTS = ["Q: when did they meet? On 3 March 2024, in Rome.\n" * 11 + end for end in ("", "A: ")]


def written(proposer: str, dtype: str, kv_dtype: str) -> tuple[list[list[int]], str, int]:
    """Greedy texts of the bundled model, how it shows itself, and how many tokens blocks hold."""
    grammar = GrammarSpec.json_schema({"type": "array", "items": {"type": "string"}})
    params = SamplingParams(temperature=0.0, max_tokens=40, grammar=grammar)
    options: dict[str, Any] = {"dtype": dtype, "kv_dtype": kv_dtype, "kv_memory_bytes": 2**23}
    options |= {"device": "cuda", "max_batch_size": 16, "max_model_len": 512}
    with LLM(None, proposer, **options) as llm:
        found = [llm.generate(PROMPTS, params) for _ in range(2)]
        about = repr(llm)
    assert found[1][0].completions[0].stats.cached_tokens > 0
    tokens = [one.token_ids for some in found for one in some]
    return tokens, about, int(about.rpartition(" blocks of ")[0].rpartition(" ")[2])


@pytest.mark.parametrize("proposer", ["eagle3", "draft_model", "chain:grammar_forced+ngram"])
def test_drafts_change_no_text(proposer: str) -> None:
    """As graphs, with prefixes of earlier texts."""
    assert written(proposer, "float32", "fp8")[0] == written("none", "float32", "fp8")[0]


def test_blocks_hold_twice_the_tokens_of_16_bits() -> None:
    _, half, count = written("eagle3", "bfloat16", "auto")
    _, fp8, twice = written("eagle3", "bfloat16", "fp8")
    assert " in fp8" in fp8
    assert " in fp8" not in half
    assert twice in (2 * count, 2 * count + 1)


def test_older_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setup, "can_read_fp8", lambda _: False)
    with pytest.raises(ConfigError, match=r"kv_dtype='fp8': this GPU cannot convert fp8"):
        LLM(None, "none", device="cuda", kv_dtype="fp8")
