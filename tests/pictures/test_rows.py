"""Rows of the table: kept while they are used, given away after, and never taken for another's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from guided_spec.engine.llm import LLM
from guided_spec.errors import ModelError, PromptError
from guided_spec.models.pictures import picture as picture_module
from guided_spec.models.pictures.embedding import PictureEmbedding
from guided_spec.models.pictures.picture import Picture, PicturePrompt, TextAfter, alike
from guided_spec.models.pictures.rows import PictureRows
from guided_spec.models.pictures.vision import VisionTower, split_vision
from guided_spec.models.slot_lm import SlotLM
from guided_spec.types import SamplingParams
from tests.pictures.sighted import ask, picture, sighted
from tests.pictures.test_texts import GREEDY, LENGTH, LONG, texts

VOCAB, WIDTH = 6, 3


class Tower:
    """Rows of a picture's own number; refuses number 9."""

    def features(self, pictures: Sequence[Picture]) -> list[Tensor]:
        numbers = [one.inputs["number"].item() for one in pictures]
        if 9 in numbers:
            raise ModelError("no such picture")
        counts = [one.count for one in pictures]
        made = zip(counts, numbers, strict=True)
        return [torch.full((count, 1, WIDTH), float(number)) for count, number in made]


def made(num_rows: int) -> tuple[PictureEmbedding, PictureRows]:
    table = PictureEmbedding.widening(nn.Embedding(VOCAB, WIDTH), num_rows, placeholder=2)
    return table, PictureRows(table, Tower())


def numbered(number: int) -> Picture:
    return Picture.of(str(number).encode(), {"number": np.array([number])}, 1 + number % 3)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=3), max_size=30),
    st.integers(1, 9),
    st.randoms(use_true_random=False),
)
def test_rows_are_a_pictures_own_while_a_text_holds_them(
    asked: list[list[int]], num_rows: int, dice: Any
) -> None:
    table, rows = made(num_rows)
    held: list[tuple[list[Picture], list[list[int]]]] = []
    for numbers in asked:
        pictures = [numbered(number) for number in numbers]
        try:
            ids = rows.take(pictures)
        except ModelError:
            assert 9 in numbers
            ids = None
        in_use = {token for _, each in held for one in each for token in one}
        if ids is not None:
            held.append((pictures, ids))
        elif 9 not in numbers:
            needed = sum(one.count for one in {*pictures, *(p for each, _ in held for p in each)})
            assert needed > num_rows, f"{in_use} left room for it"
        for pictures, each in held:
            for one, own in zip(pictures, each, strict=True):
                assert len(own) == one.count
                assert set(own) <= set(range(VOCAB, VOCAB + num_rows))
                found = table(torch.tensor(own))
                assert (found == float(one.inputs["number"][0])).all()
        if held and dice.random() < 0.5:
            rows.release(held.pop(dice.randrange(len(held)))[0])
    for pictures, _ in held:
        rows.release(pictures)
    whole = [numbered(99 + 3 * at) for at in range(num_rows)]
    assert rows.take(whole) is not None, "all rows can be had again"


def test_rows_that_cannot_be_written_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a device has no memory left for a while: others would wait for them forever."""
    table, rows = made(3)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(PictureEmbedding, "write", fails)
        for _ in range(2):
            with pytest.raises(RuntimeError):
                rows.take([numbered(2)])
    ids = rows.take([numbered(2)])
    assert ids is not None
    assert (table(torch.tensor(ids)) == 2).all()


def test_the_stock_table_is_the_beginning() -> None:
    stock = nn.Embedding(VOCAB, WIDTH)
    before = stock.weight.detach().clone()
    table = PictureEmbedding.widening(stock, 4, placeholder=2)
    assert stock.weight.shape == (VOCAB, WIDTH)
    assert torch.equal(stock.weight, before)
    assert stock.weight.data_ptr() == table.weight.data_ptr()
    assert torch.equal(table.weight[VOCAB:], before[2].expand(4, WIDTH))


@given(
    st.lists(st.integers(0, 9), max_size=6),
    st.lists(st.integers(0, 9), max_size=6),
    st.slices(12),
)
def test_a_text_after_another_beginning(begin: list[int], rest: list[int], part: slice) -> None:
    tokens = [99] * len(begin) + rest
    whole = begin + rest
    found = TextAfter(begin, tokens)
    assert list(found) == whole
    assert len(found) == len(whole)
    assert found[part] == whole[part]
    assert [found[at] for at in range(-len(whole), len(whole))] == [*whole, *whole]
    tokens.append(7)
    assert list(found) == [*whole, 7]


def test_pictures_are_equal_by_their_content() -> None:
    arrays = {"pixels": np.arange(6.0), "sizes": np.array([2, 3])}
    one = Picture.of(b"one", arrays, 2)
    assert one == Picture.of(b"one", {name: array.copy() for name, array in arrays.items()}, 2)
    assert one != Picture.of(b"other", arrays, 2)
    same = PicturePrompt([1, 5, 5, 2], (one,), [1, 2])
    assert same.placed([[8, 9]]) == [1, 8, 9, 2]
    named = same.named()
    assert named[0::3] == [1, 2]
    assert len({*named}) == 4
    assert all(name < 0 for name in named[1:3])


def engine_rows(llm: LLM) -> PictureRows:
    """Of an engine that runs."""
    rows = llm._runner.setup.engine.pictures.rows  # type: ignore[attr-defined]
    assert isinstance(rows, PictureRows)
    return rows


def test_a_picture_is_read_once_and_found_again() -> None:
    one = sighted("llava")
    first, second = ask(picture(1), LONG), ask(picture(1), LONG + "And now?")
    with one.llm() as llm:
        found = [texts(llm, [ask]) for ask in (first, second, first)]
        cached = llm.chat(first, params=GREEDY).completion.stats.cached_tokens
        assert engine_rows(llm).num_read == 1
    assert found == [[one.expected(ask, LENGTH)] for ask in (first, second, first)]
    assert cached > 0


@pytest.mark.parametrize("proposer", ["none", "ngram"])
def test_rows_of_another_picture_find_no_prefix(proposer: str) -> None:
    """The table holds one picture: each takes the rows, and so the ids, of the one before it."""
    one = sighted("llava")
    prompts = [ask(picture(seed), LONG) for seed in (1, 2, 3)] * 2
    with one.llm(proposer, picture_tokens=16) as llm:
        found = [texts(llm, [prompt])[0] for prompt in prompts]
        cached = llm.chat(prompts[0], params=GREEDY).completion.stats.cached_tokens
        assert engine_rows(llm).num_read >= 6
    wanted = [one.expected(prompt, LENGTH) for prompt in prompts]
    assert len({tuple(text) for text in wanted}) == 3
    assert found == wanted
    assert cached > 0, "the same picture's prefix is found, wherever its rows are"


@given(
    st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), min_size=1, max_size=12),
    st.integers(12, 14),
    st.integers(1, 2),
)
def test_pictures_are_read_a_few_at_a_time(
    asked: list[list[int]], num_rows: int, most: int
) -> None:
    """Those that are read already stay until the last one is."""
    table, rows = made(num_rows)
    for numbers in asked:
        pictures, before = [numbered(number) for number in numbers], rows.num_read
        ids = rows.take(pictures, 0)
        assert rows.num_read == before
        for _ in range(4):
            known = rows.num_read
            ids = rows.take(pictures, most) if ids is None else ids
            assert rows.num_read - known <= most
        assert ids is not None
        assert rows.num_read - before <= len({*numbers})
        for one, own in zip(pictures, ids, strict=True):
            assert (table(torch.tensor(own)) == float(one.inputs["number"][0])).all()
        rows.release(pictures)


def test_texts_go_on_while_pictures_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    one, seen = sighted("llava"), list[str]()
    features, forward = VisionTower.features, SlotLM.forward

    def read(self: VisionTower, pictures: Sequence[Picture]) -> list[Tensor]:
        seen.append("read")
        return features(self, pictures)

    def step(self: SlotLM, *args: Any, **options: Any) -> Any:
        seen.append("step")
        return forward(self, *args, **options)

    monkeypatch.setattr(VisionTower, "features", read)
    monkeypatch.setattr(SlotLM, "forward", step)
    prompt = ask(*map(picture, range(5)), LONG)
    with one.llm(kernels="stock") as llm:
        asked = llm.prepare_chat(prompt, params=GREEDY).prompt
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        running = llm.stream_chat(ask("and?"), params=long)
        next(iter(running))
        seen.clear()
        (found,) = llm.generate([asked], GREEDY)
    reads = [at for at, name in enumerate(seen) if name == "read"]
    assert len(reads) == 5
    assert "step" in seen[reads[0] : reads[1]]
    assert all(after - before > 1 for before, after in pairwise(reads))
    assert found.completions[0].token_ids == one.expected(prompt, LENGTH)


@pytest.mark.parametrize("kernels", ["packed", "stock"])
def test_requests_wait_for_rows(kernels: Any) -> None:
    one = sighted("llava")
    prompts = [ask(picture(seed), LONG) for seed in range(6)] + [ask(LONG)]
    with one.llm(picture_tokens=33, kernels=kernels) as llm:  # two pictures, of four slots
        assert texts(llm, prompts) == [one.expected(prompt, LENGTH) for prompt in prompts]


def test_pictures_that_never_fit_are_refused() -> None:
    with sighted("llava").llm(picture_tokens=40) as llm:
        wanted = "the pictures take 48 tokens, and 40 are kept at a time: .* raise picture_tokens"
        with pytest.raises(PromptError, match=wanted):
            llm.chat(ask(*map(picture, range(3)), "and?"))
        assert llm.chat(ask(*[picture(1)] * 3, "and?"), params=GREEDY).text is not None
        assert llm.chat(ask("and?"), params=GREEDY).text is not None


def test_cancelled_requests_give_their_rows_back() -> None:
    one = sighted("llava")
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with one.llm(picture_tokens=16) as llm:
        for seed in range(4):
            for _ in llm.stream_chat(ask(picture(seed), "and?"), params=long):
                break
        assert texts(llm, [ask(picture(9), LONG)]) == [one.expected(ask(picture(9), LONG), LENGTH)]


def test_a_tower_that_fails_ends_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    one, features = sighted("llava"), VisionTower.features

    def fails(self: VisionTower, pictures: Sequence[Picture]) -> list[Tensor]:
        if victim in pictures:
            raise RuntimeError("out of luck")
        return features(self, pictures)

    monkeypatch.setattr(VisionTower, "features", fails)
    with one.llm() as llm:
        victim = llm.prepare_chat(ask(picture(5), "and?")).pictures.pictures[0]  # type: ignore[union-attr]
        prompts = [llm.prepare_chat(ask(picture(s), LONG), params=GREEDY).prompt for s in (4, 5, 6)]
        found = llm.generate(prompts, GREEDY, on_error="return")
        again = llm.chat(ask(picture(6), LONG), params=GREEDY).completion.token_ids
    errors = [one.completions[0].error for one in found]
    assert [error is None for error in errors] == [True, False, True]
    assert "its pictures cannot be read: RuntimeError('out of luck')" in str(errors[1])
    assert found[2].completions[0].token_ids == again == one.expected(ask(picture(6), LONG), LENGTH)


def test_pictures_of_several_requests_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one shape of arrays; each is read once, and none that has no room."""
    one, features, read = sighted("internvl"), VisionTower.features, list[int]()

    def noted(self: VisionTower, pictures: Sequence[Picture]) -> list[Tensor]:
        read.append(len(pictures))
        return features(self, pictures)

    monkeypatch.setattr(VisionTower, "features", noted)
    seeds = ([1], [2, 3], [3], [4, 1])
    prompts = [ask(*(picture(seed) for seed in each), LONG) for each in seeds]
    with one.llm() as llm:
        found = texts(llm, prompts)
    assert found == [one.expected(prompt, LENGTH) for prompt in prompts]
    assert sum(read) == 4
    assert max(read) > 1


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([2, 3])), max_size=9))
def test_batches_hold_pictures_of_one_form(sizes: list[tuple[int, int]]) -> None:
    made = [
        Picture.of(bytes([at]), {"a": np.zeros((n, width)), "n": np.array([n])}, n)
        for at, (n, width) in enumerate(sizes)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(picture_module, "MOST_BYTES", 5 * 3 * 8)
        batches = list(alike(made))
    found = [one.content for batch in batches for one in batch]
    assert sorted(found) == sorted(one.content for one in made)
    for batch in batches:
        assert len({one.inputs["a"].shape[1:] for one in batch}) == 1
        size = sum(array.nbytes for one in batch for array in one.inputs.values())
        assert len(batch) == 1 or size <= 5 * 3 * 8


@pytest.mark.parametrize(
    ("family", "error", "reason"),
    [
        ("llava_next", ModelError, "the vision tower (gave|failed)|its vision tower failed"),
        ("internvl", PromptError, "the processor's <IMG_CONTEXT> is not the model's token"),
    ],
)
def test_another_models_processor_is_refused(
    family: str, error: type[Exception], reason: str
) -> None:
    one, other = sighted("llava"), sighted(family).processor
    with (
        LLM(one.model, "none", processor=other, max_model_len=512) as llm,
        pytest.raises(error, match=reason),
    ):
        llm.chat(ask(picture(1, (40, 20)), "and?"), params=GREEDY)


def test_two_engines_of_one_model() -> None:
    one = sighted("internvl")
    with one.llm() as llm, llm.with_proposer("ngram") as other:
        for each in (llm, other, llm):
            prompt = ask(picture(3), LONG)
            assert texts(each, [prompt]) == [one.expected(prompt, LENGTH)]


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_stays_as_it_was(tied: bool, tmp_path: Path) -> None:  # noqa: FBT001
    one = sighted("idefics3" if tied else "llava")
    before = {name: each.clone() for name, each in one.model.state_dict().items()}
    split = split_vision(one.model, 64)
    after = one.model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    language: Any = split.language
    own = language.get_output_embeddings().weight
    table = language.get_input_embeddings().weight
    assert (own.data_ptr() == table.data_ptr()) == tied
    assert len(table) == len(own) + 64
    one.model.save_pretrained(tmp_path)
