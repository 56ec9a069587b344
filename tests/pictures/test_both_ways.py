"""Pictures whose tokens all see each other: read as a whole, however a prompt is cut or shared."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from guided_spec.engine.target.pictures import PicturePlaces
from guided_spec.errors import ConfigError, ModelError, PromptError
from guided_spec.models.attention import MaskBuilder
from guided_spec.models.causal_lm import make_causal_lm
from guided_spec.models.packed.blocks import BLOCK
from guided_spec.models.pictures.picture import PicturePrompt
from guided_spec.models.pictures.spans import SlotSpans
from guided_spec.models.pictures.vision import split_vision
from guided_spec.ops.attention import slot_attention
from tests.pictures.sighted import Sighted, ask, picture, sighted
from tests.pictures.test_texts import CAT, DOG, GREEDY, LENGTH, PROMPTS, TWO, expected, texts
from tests.tiers import examples

FAMILY = "gemma3"
BOTH_WAYS = (FAMILY, "gemma4")
COUNT = 16  # tokens of a picture
THIRD = picture(3)
MORE = [*PROMPTS, ask(DOG, CAT, DOG, "?")]
PARTS = {  # a tall picture is shown in parts too
    **{"do_convert_rgb": True, "do_pan_and_scan": True, "pan_and_scan_min_crop_size": 8},
    **{"pan_and_scan_max_num_crops": 2, "pan_and_scan_min_ratio_to_activate": 1.9},
}


@pytest.mark.parametrize("family", BOTH_WAYS)
def test_a_picture_is_seen_in_both_directions(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one direction the texts are others, so that these tests say something."""
    begin = PicturePlaces.begin

    def forget(self: PicturePlaces, request: Any) -> None:
        request.spans = ()
        begin(self, request)

    monkeypatch.setattr(PicturePlaces, "begin", forget)
    with sighted(family).llm() as llm:
        found = texts(llm, [TWO, PROMPTS[2]])
    wanted = expected(family, [TWO, PROMPTS[2]])
    assert found[0] != wanted[0]
    assert found[1] == wanted[1], "a text without pictures"


@pytest.mark.parametrize("kernels", ["packed", "stock"])
@pytest.mark.parametrize("tokens", [1, COUNT - 1, COUNT + 1])
@pytest.mark.parametrize("family", BOTH_WAYS)
def test_a_picture_is_in_one_piece(family: str, kernels: str, tokens: int) -> None:
    """Where a step reads fewer tokens than it has, too, and next to texts that decode."""
    wanted = more(family)
    options = {"kernels": kernels, "max_batch_size": 2, "prefix_cache": tokens > 1}
    with sighted(family).llm("ngram", prefill_tokens=tokens, **options) as llm:
        assert texts(llm, MORE) == wanted
        assert texts(llm, MORE[::-1]) == wanted[::-1]


@cache
def more(family: str) -> list[list[int]]:
    return expected(family, MORE)


def test_another_implementation_of_attention() -> None:
    model: Any = copy.deepcopy(sighted(FAMILY).model)
    model.set_attn_implementation("eager")
    with Sighted(model, sighted(FAMILY).processor).llm("ngram", kernels="stock") as llm:
        assert texts(llm, PROMPTS) == expected(FAMILY, PROMPTS)


def placed(prompt: Any, *parts: Any) -> PicturePrompt:
    """Pictures where they are wanted, and numbers of tokens of text between them."""
    ids, places, shown = list[int](), list[int](), list[Any]()
    for part in parts:
        if isinstance(part, int):
            ids += [(7 * at) % 300 + 20 for at in range(part)]
            continue
        shown.append(part)
        places += range(len(ids), len(ids) + part.count)
        ids += [prompt.token_ids[prompt.places[0]]] * part.count
    return PicturePrompt(ids, tuple(shown), places)


def whole_text(model: Any, prompt: PicturePrompt) -> list[int]:
    ids = torch.tensor([prompt.token_ids])
    pixels = [torch.from_numpy(one.inputs["pixel_values"]) for one in prompt.pictures]
    kinds = (ids == model.config.image_token_id).int()
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    found = model.generate(
        ids,
        pixel_values=torch.cat(pixels),
        token_type_ids=kinds,
        max_new_tokens=LENGTH,
        **options,
    )
    return list(found[0, ids.shape[1] :].tolist())


def test_no_prefix_ends_in_a_picture() -> None:
    """What a cut would keep of one depends on the picture after it. The first of two pictures
    without text between them is in two blocks, and so is another one."""
    one, before = sighted(FAMILY), BLOCK - COUNT // 2
    with one.llm() as llm:
        shown: Any = llm.prepare_chat(ask(CAT, DOG, THIRD, "?")).prompt
        cat, dog, third = shown.pictures
        pairs = ((cat, dog), (cat, third), (cat, dog))
        asked = [placed(shown, before, *pair, 2 * BLOCK) for pair in pairs]
        rest = BLOCK - COUNT
        asked += [placed(shown, before, third, rest, dog, end) for end in (BLOCK, 3, BLOCK + 1)]
        wanted = [whole_text(one.model, prompt) for prompt in asked]
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in asked]
    assert [output.completions[0].token_ids for output in outputs] == wanted
    taken = [output.stats.cached_tokens for output in outputs]
    assert taken == [0, 0, 3 * BLOCK, 0, 0, 3 * BLOCK]


def test_a_prompt_that_ends_with_a_picture_is_refused() -> None:
    """Its last token is read with what is drafted after it."""
    with sighted(FAMILY).llm() as llm:
        prompt: Any = llm.prepare_chat(ask(CAT, "?")).prompt
        end = prompt.places[-1] + 1
        with pytest.raises(PromptError, match="prompt: it ends with a picture; end it with text"):
            llm.generate([replace(prompt, token_ids=prompt.token_ids[:end])], GREEDY)


def test_pictures_in_parts_and_empty_lines() -> None:
    """The processor writes text around a picture, which is tokenized with that of the message."""
    processor: Any = copy.copy(sighted(FAMILY).processor)
    processor.images_kwargs = PARTS
    processor.tokenizer = copy.deepcopy(processor.tokenizer)
    processor.tokenizer.add_tokens(["\n\n", "\n\n\n", "\n\n\n\n"])
    one = Sighted(sighted(FAMILY).model, processor)
    asked = [ask("the\n", DOG, "\nand", CAT, DOG, "\n\n?"), ask(CAT, CAT, "what")]
    with one.llm("ngram", prefill_tokens=20) as llm:
        prompt: Any = llm.prepare_chat(asked[0]).prompt
        assert len(prompt.spans) == 7
        assert texts(llm, asked) == [one.expected(prompt, LENGTH) for prompt in asked]


@given(st.lists(st.integers(1, 3), max_size=4), st.integers(0, 3))
def test_spans_are_what_follows_without_text(lengths: list[int], first: int) -> None:
    ids, places, wanted = [1] * first, list[int](), list[range]()
    for length in lengths:
        wanted.append(range(len(ids), len(ids) + length))
        places += wanted[-1]
        ids += [9] * length + [1]
    assert PicturePrompt(ids, (), places).spans == tuple(wanted)


def test_a_form_that_reads_in_one_direction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    language = split_vision(copy.deepcopy(sighted(FAMILY).model), 8).language
    limits: dict[str, Any] = {"num_slots": 2, "max_length": 64}
    assert make_causal_lm(language, kernels="packed", **limits).spans is not None
    monkeypatch.setattr(slot_attention.Ahead, "in_layer", lambda *_: ())
    with pytest.raises(ModelError, match="in packed form differ"):
        make_causal_lm(language, kernels="packed", **limits)


class Table(torch.nn.Embedding):
    """Nothing is known of it."""


@pytest.mark.parametrize("reason", ["where it reads in both directions differ", "no plain table"])
def test_pictures_that_would_be_read_otherwise_are_refused(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text is read as ever."""
    one = Sighted(copy.deepcopy(sighted(FAMILY).model), sighted(FAMILY).processor)
    if "differ" in reason:
        monkeypatch.setattr(SlotSpans, "put", lambda *_: None)
    else:
        known: Any = one.model.get_input_embeddings()
        weight = known.weight.detach() * known.embed_scale
        table: Any = Table
        one.model.set_input_embeddings(table.from_pretrained(weight))
    with one.llm(tokenizer=one.processor.tokenizer) as llm:
        assert reason in str(llm.sight.refusal)
        with pytest.raises(ConfigError, match=reason):
            llm.chat(PROMPTS[0])
        ids = llm.encode("the cat")
        (output,) = llm.generate([ids], GREEDY)
    options = {"max_new_tokens": LENGTH, "do_sample": False, "eos_token_id": None}
    model: Any = sighted(FAMILY).model
    assert [*ids, *output.completions[0].token_ids] == model.generate(
        torch.tensor([ids]), **options
    )[0].tolist()


def test_small_models_of_gemma_4_read_in_one_direction() -> None:
    one = sighted("gemma4")
    config = copy.deepcopy(one.model.config)
    config.text_config.use_bidirectional_attention = None
    torch.manual_seed(0)
    small = Sighted(type(one.model)(config).eval(), one.processor)
    assert SlotSpans.of(split_vision(copy.deepcopy(small.model), 8).language) is None
    with small.llm("ngram", prefill_tokens=5) as llm:
        assert texts(llm, PROMPTS) == [small.expected(prompt, LENGTH) for prompt in PROMPTS]


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.integers(0, 12),
    st.sampled_from([None, 3, 8]),
    st.booleans(),
    st.integers(0, 99),
)
def test_attention_over_blocks_is_that_of_masks(
    lengths: list[int],
    start: int,
    size: int | None,
    windowed_only: bool,  # noqa: FBT001
    seed: int,
) -> None:
    """Against one product over all positions, of a row that begins anywhere in its text."""
    torch.manual_seed(seed)
    block, longest, heads, width = 4, 48, 2, 8
    count = sum(lengths) + len(lengths) + 1
    spans, at = SlotSpans(windowed_only=windowed_only), start + 1
    own = list[range]()
    for length in lengths:
        own.append(range(at, at + length))
        at += length + 1
    spans.put(1, own)
    spans.put(0, [range(2)])  # was read before
    line = torch.tensor([[0, *[1] * count], [20, *range(start, start + count)]])
    rows = torch.tensor([[0, 1], [20, start], [1, 1 + count]])
    tables = 1 + torch.randperm(26).view(2, 13).int()
    ahead = spans.fed([0, 1], [20, start], [1, count])
    index = slot_attention.SlotIndex(line, rows, tables, longest, ahead=ahead)
    buffers = slot_attention.KeyValues(*torch.randn(2, 27, heads, block, width))
    new = slot_attention.KeyValues(*torch.randn(2, 1 + count, heads, width))
    query = torch.randn(1 + count, 2 * heads, width)
    window = None if size is None else slot_attention.Window(size)
    found = slot_attention.slot_attention(query, new, buffers, index, scale=0.3, window=window)
    kept = [one[tables[1].long()].transpose(1, 0).flatten(1, 2) for one in buffers]
    kinds = {"full_attention": None} if size is None else {"sliding_attention": window}
    builder = MaskBuilder(_Sdpa(), [*kinds], {k: w for k, w in kinds.items() if w})
    seen = spans.fed([1], [start], [count], width=count)
    mask = builder.build(line[1:, 1:], longest, query.dtype, seen)[0]
    keys, values = (one[:, :longest].repeat_interleave(2, 0) for one in kept)
    scores = (query[1:].transpose(0, 1) @ keys.transpose(1, 2) * 0.3).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(found[1:], (scores.softmax(-1) @ values).transpose(0, 1))
    alone = slot_attention.SlotIndex(line, rows, tables, longest)
    causal = slot_attention.slot_attention(query, None, buffers, alone, scale=0.3, window=window)
    assert torch.equal(found[0], causal[0])  # a text that decodes


class _Sdpa:
    _attn_implementation = "sdpa"

    def get_text_config(self, **_: Any) -> _Sdpa:
        return self
