"""Learned heads in the engine: the text is plain decoding's, and drafts of a taught head are taken.

Every head is taught the plain texts first, so that drafts are accepted, raggedly.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from guided_spec.core import DecodeBatch, DraftInFlight, TargetOutput
from guided_spec.engine.outputs import Completion
from guided_spec.errors import ConfigError, ModelError
from guided_spec.grammar.protocol import GrammarMatcher
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.masks.constraint import Constraint
from guided_spec.masks.rows import MaskRows
from guided_spec.models.checkpoint import Checkpoint
from guided_spec.models.heads.block.runner import BlockRunner
from guided_spec.models.heads.loading import load_head
from guided_spec.models.hidden_states import HiddenStates, Unread
from guided_spec.models.packed.slot_head import PackedSlotHead
from guided_spec.ops.host import Download
from guided_spec.proposers.learned_head import LearnedHead
from guided_spec.types import Accepted, Draft, DraftPolicy, SamplingParams
from tests.by_chance import draft_by_chance
from tests.cases import rotated
from tests.engine.test_equality import PARAMS, PROMPTS, SCHEMA
from tests.learned_heads import TARGETS, HeadedTarget, overfit, write_head
from tests.models.heads.heads import write_eagle3
from tests.models.tiny import build
from tests.tiny_llm import VOCAB_SIZE, make_llm

METHODS = list(TARGETS)
BLOCKS = ("dflash", "dflash2", "domino", "dspark", "lilicorr", "p_eagle")
PACKED = ("eagle3", "packed")
FREE = [replace(params, grammar=None) for params in PARAMS]
SIZES = ((1, 1024), (5, 7))  # slots, prompt tokens of one prefill forward
Setting = tuple[str, bool, tuple[int, int]]  # draft policy, whether under grammars, size
SETTINGS: list[Setting] = [  # every pair of two
    ("mask", True, SIZES[0]),
    ("validate", False, SIZES[0]),
    ("validate", True, SIZES[1]),
    ("mask", False, SIZES[1]),
]


class Taught(NamedTuple):
    """A target whose head knows its plain texts: those under the grammars, and the free ones."""

    headed: HeadedTarget
    guided: list[Completion]
    free: list[Completion]

    def generate(
        self, proposer: str, params: list[SamplingParams], **options: Any
    ) -> list[Completion]:
        with make_llm(self.headed.target, proposer, self.headed.draft, **options) as llm:
            # Else those run together whose grammars are done first, which no two runs agree on.
            llm.compile(one.grammar for one in params if one.grammar is not None)
            outputs = llm.generate(PROMPTS, params, on_error="return")
        assert [output.error for output in outputs] == [None] * len(PROMPTS)
        return [output.completions[0] for output in outputs]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def teach(method: str) -> Taught:
        headed = write_head(tmp_path_factory.mktemp("heads") / method, method, VOCAB_SIZE)
        plain = Taught(headed, [], [])
        guided = plain.generate("none", PARAMS, max_batch_size=1)
        free = plain.generate("none", FREE, max_batch_size=1)
        with make_llm(headed.target, "none") as llm:
            prompts = [llm.encode(prompt) for prompt in PROMPTS] * 2
        texts = [p + c.token_ids for p, c in zip(prompts, guided + free, strict=True)]
        head = load_head(method, headed.draft, headed.target)
        overfit(head, headed.target, [text for text in texts if len(text) > 4])
        return Taught(headed, guided, free)

    return teach


@pytest.fixture(scope="module")
def _eagle3_taught(taught: Any) -> None:
    """Whichever test comes first does not wait for it."""
    taught("eagle3")


def tokens(completions: list[Completion]) -> list[tuple[list[int], str]]:
    return [(c.token_ids, c.finish_reason) for c in completions]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "setting"), rotated(METHODS, SETTINGS, each=2))
def test_greedy_text_is_that_of_plain_decoding(taught: Any, method: str, setting: Setting) -> None:
    known, (policy, is_guided, size) = taught(method), setting
    found = known.generate(
        f"{method}:{policy}",
        PARAMS if is_guided else FREE,
        max_batch_size=size[0],
        prefill_tokens=size[1],
    )
    assert tokens(found) == tokens(known.guided if is_guided else known.free)
    accepted = [sum(c.stats.accepted) for c in found]
    assert sum(accepted) > 10  # these heads are taught for seconds
    assert len(set(accepted)) > 2  # ragged: rows move on at their own pace


@pytest.mark.parametrize("method", METHODS)
def test_in_a_chain(taught: Any, method: str) -> None:
    """The head goes on behind forced text and drafts of others that it has no states for."""
    for chain in (f"chain:grammar_forced+{method}", f"chain:ngram+{method}:validate"):
        found = taught(method).generate(chain, PARAMS, max_batch_size=3, prefill_tokens=16)
        assert tokens(found) == tokens(taught(method).guided)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("policy", ["mask", "validate"])
def test_packed_models_write_the_same(taught: Any, policy: str, batch_size: int) -> None:
    """Target and head in packed form, alone and behind another proposer; some requests free."""
    known = taught("eagle3")
    mixed = [*PARAMS[:3], *FREE[3:]]
    expected = tokens([*known.guided[:3], *known.free[3:]])
    for proposer in (f"eagle3:{policy}", f"chain:ngram+eagle3:{policy}"):
        found = known.generate(proposer, mixed, max_batch_size=batch_size, kernels="packed")
        assert tokens(found) == expected
        assert sum(sum(c.stats.accepted) for c in found) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("drafted_from_the_start")
@pytest.mark.parametrize(
    ("method", "batch_size"), rotated(["dflash", "domino", "dspark", "lilicorr", "p_eagle"], [5, 1])
)
def test_packed_blocks_write_the_same(taught: Any, method: str, batch_size: int) -> None:
    """And draft the same as the stock head, along tables or along the originals."""
    known = taught(method)
    mixed = [*PARAMS[:3], *FREE[3:]]
    expected = tokens([*known.guided[:3], *known.free[3:]])
    for proposer in (method, f"{method}:validate", f"chain:ngram+{method}"):
        by_form = []
        for kernels in ("packed", "stock"):
            options: Any = {"max_batch_size": batch_size, "kernels": kernels}
            by_form.append(known.generate(proposer, mixed, **options))
            assert tokens(by_form[-1]) == expected
        packed, stock = ([c.stats.accepted for c in found] for found in by_form)
        assert packed == stock
        assert sum(map(sum, packed)) > 20


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dflash", "domino", "dspark", "lilicorr", "p_eagle"])
def test_blocks_behind_a_prefix_that_another_text_left(taught: Any, method: str) -> None:
    """What a block leaves behind its text is never taken for text."""
    headed = taught(method).headed
    prompt, found = [5 + at % 60 for at in range(150)], []
    for prefix_cache in (True, False):
        options: Any = {"prefix_cache": prefix_cache, "kernels": "packed", "max_batch_size": 2}
        with make_llm(headed.target, method, headed.draft, **options) as llm:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            outputs = [llm.generate([prompt[:cut]], params)[0] for cut in (150, 140, 150)]
        found.append(outputs)
    cached, plain = found
    assert [output.stats.cached_tokens > 0 for output in cached] == [False, True, True]
    assert [o.token_ids for o in cached] == [o.token_ids for o in plain]
    assert [o.stats.drafted for o in cached] == [o.stats.drafted for o in plain]
    assert [o.stats.accepted for o in cached] == [o.stats.accepted for o in plain]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch, spec: str) -> Counter[str]:
    """How often a head read ahead, was right about a text, and asked for a text's states."""
    calls = Counter[str]()
    kind: Any = BlockRunner if spec.rpartition("+")[2] in BLOCKS else PackedSlotHead
    read_ahead, commit, read = kind.read_ahead, kind.commit, kind.read
    pull = HiddenStates.pull

    def reading(*arguments: Any) -> None:
        calls["read"] += 1
        read_ahead(*arguments)

    def committing(*arguments: Any) -> None:
        calls["confirmed"] += 1
        commit(*arguments)

    def told(*arguments: Any) -> None:
        before = calls["confirmed"]
        read(*arguments)
        calls["confirmed"] = before  # what is read when it is known needs no confirmation

    def pulling(states: HiddenStates, slot: int, start: int) -> Unread | None:
        found = pull(states, slot, start)
        calls["asked"] += found is not None
        return found

    monkeypatch.setattr(kind, "read_ahead", reading)
    monkeypatch.setattr(kind, "commit", committing)
    monkeypatch.setattr(kind, "read", told)
    monkeypatch.setattr(HiddenStates, "pull", pulling)
    return calls


def read_another(
    head: LearnedHead, batch: DecodeBatch, accepted: Accepted, output: TargetOutput, _: Download
) -> object | None:
    """``LearnedHead.read_ahead`` of tokens that will not be committed."""
    others = accepted._replace(token_ids=(accepted.token_ids + 1) % VOCAB_SIZE)
    read = torch.cat([others.num_accepted.unsqueeze(1), others.token_ids], 1)
    return READ_AHEAD(head, batch, others, output, Download(read))


READ_AHEAD = LearnedHead.read_ahead
AHEAD = [
    "eagle3",
    "dflash",
    "chain:grammar_forced:start+eagle3",
    "chain:grammar_forced+eagle3",
    "dspark",
    "domino",
    "chain:grammar_forced+lilicorr",
    "p_eagle",
]


@pytest.mark.usefixtures("drafted_from_the_start", "_eagle3_taught")
@pytest.mark.parametrize(("spec", "temperature"), rotated(AHEAD, [1.0, 0.0]))
def test_reading_ahead_changes_no_draft(
    monkeypatch: pytest.MonkeyPatch,
    taught: Any,
    ahead: Counter[str],
    temperature: float,
    spec: str,
) -> None:
    """Nor does it where the text becomes another; requests come and go, and slots are reused."""
    params = [replace(p, temperature=temperature, seed=row) for row, p in enumerate(PARAMS)]
    options: Any = {"max_batch_size": 2, "kernels": "packed"}
    known = taught(spec.rpartition("+")[2])
    found = [known.generate(spec, params, **options)]
    assert ahead["read"] > 10
    assert ahead["confirmed"] > 10
    texts = ahead["asked"] + ahead["confirmed"]  # read ahead: no need to ask
    ahead.clear()
    monkeypatch.setattr(LearnedHead, "read_ahead", read_another)
    found.append(known.generate(spec, params, **options))
    assert ahead["read"] > 10
    assert ahead["confirmed"] == 0
    for kind in (PackedSlotHead, BlockRunner):
        monkeypatch.setattr(kind, "can_read_ahead", lambda *_: False)
    ahead.clear()
    found.append(known.generate(spec, params, **options))
    if "chain" not in spec:  # the last step of a chain may draft nothing and read nothing ahead
        assert ahead["asked"] == texts
    for one in found[:2]:
        assert tokens(one) == tokens(found[2])
        assert [c.stats.drafted for c in one] == [c.stats.drafted for c in found[2]]
        assert [c.stats.accepted for c in one] == [c.stats.accepted for c in found[2]]


class Watched(NamedTuple):
    """A draft in flight, which looks at the originals when it is finished."""

    inner: DraftInFlight
    batch: DecodeBatch

    @property
    def draft(self) -> Draft:
        return self.inner.draft

    @property
    def most(self) -> tuple[int, ...]:
        return self.inner.most

    @property
    def is_advanced(self) -> bool:
        return self.inner.is_advanced

    @property
    def serve_mailbox(self) -> Callable[[], None] | None:
        return self.inner.serve_mailbox

    def finish(self) -> Draft:
        draft, batch = self.inner.finish(), self.batch
        for constraint, context, prompt in zip(
            batch.constraints, batch.contexts, batch.prompt_lengths, strict=True
        ):
            if constraint is not None:
                check_original(constraint, list(context[prompt:]))
        return draft

    def carry(self, *accepted: Any) -> object | None:
        return self.inner.carry(*accepted)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "batch_size"), rotated(METHODS, [5, 1]))
def test_sampled_text(
    monkeypatch: pytest.MonkeyPatch, taught: Any, method: str, batch_size: int
) -> None:
    """Valid; each mask row is filled once a step, and the originals never see a draft."""
    known = taught(method)
    fills: Counter[tuple[int, int]] = Counter()
    fill, begin, seen = MaskRows.fill, LearnedHead.begin, list[int]()

    def counting(rows: MaskRows, matcher: GrammarMatcher, request: int, depth: int) -> None:
        fills[request, depth] += 1
        assert fills[request, depth] == 1
        fill(rows, matcher, request, depth)

    def watching(
        head: LearnedHead, batch: DecodeBatch, lookahead: Any, carry: object | None = None
    ) -> DraftInFlight:
        fills.clear()
        seen.append(len(batch))
        return Watched(begin(head, batch, lookahead, carry), batch)

    monkeypatch.setattr(MaskRows, "fill", counting)
    monkeypatch.setattr(LearnedHead, "begin", watching)
    params = [replace(p, temperature=0.5, seed=row) for row, p in enumerate(PARAMS)]
    found = known.generate(method, params, max_batch_size=batch_size, prefill_tokens=16)
    assert max(seen) == batch_size
    assert sum(sum(c.stats.accepted) for c in found) > 0  # these heads are taught for seconds
    assert re.fullmatch("[0-9]{3}-[a-z]{4,8}", found[3].text)
    assert found[4].text in ("a cat", "a dog", "a caterpillar")


def check_original(constraint: Constraint, output: list[int]) -> None:
    """The original stands where a new matcher stands that was led along what it has read.

    That is the committed text, of which a table may spare it the end.
    """
    assert constraint.catch_up() is None
    assert constraint.committed == output
    num_read = len(constraint._original.token_ids)
    assert num_read == len(output) or constraint.table_state(0) is not None
    matcher = constraint.compiled.new_matcher()
    assert all(matcher.accept_token(token) for token in output[:num_read])
    masks = np.zeros((2, -(-VOCAB_SIZE // 32)), dtype=np.int32)
    for row, one in enumerate((matcher, constraint._original)):
        one.fill_next_token_bitmask(masks, row)
    assert bool((masks[0] == masks[1]).all())


def test_without_drafts_a_head_reads_nothing(monkeypatch: pytest.MonkeyPatch, taught: Any) -> None:
    monkeypatch.setattr(PackedSlotHead, "read", lambda *_: 1 / 0)
    for proposer in ("eagle3", "chain:ngram+eagle3:validate"):
        found = taught("eagle3").generate(proposer, PARAMS, num_draft_tokens=0)
        assert tokens(found) == tokens(taught("eagle3").guided)


@pytest.mark.parametrize(("method", "kernels"), rotated(METHODS, ["stock", "packed"]))
def test_a_head_may_draft_now_and_then(
    monkeypatch: pytest.MonkeyPatch, taught: Any, method: str, kernels: str
) -> None:
    """It reads the text all the same, and drafts as well as it did where it goes on."""
    known, counts = taught(method), draft_by_chance(monkeypatch)
    for proposer in (method, f"chain:grammar_forced+{method}"):
        options: Any = {"max_batch_size": 3, "drafting": "auto", "kernels": kernels}
        found = known.generate(proposer, PARAMS, **options)
        assert tokens(found) == tokens(known.guided)
        assert sum(sum(c.stats.accepted) for c in found) > 5
    assert len({*counts}) == 3


SLOWLY_TAUGHT = [pytest.param(name, marks=pytest.mark.slow) for name in ("domino", "lilicorr")]


@pytest.mark.parametrize("method", ["eagle3", *SLOWLY_TAUGHT])
def test_samples_share_a_prompt(taught: Any, method: str) -> None:
    known = taught(method)
    with make_llm(known.headed.target, method, known.headed.draft) as llm:
        (output,) = llm.generate(PROMPTS[3], replace(PARAMS[3], n=3))
    assert [c.token_ids for c in output.completions] == [known.guided[3].token_ids] * 3


def test_a_request_may_choose_its_policy(taught: Any) -> None:
    known = taught("eagle")
    policies: list[DraftPolicy | None] = ["mask", "validate", None] * 3
    params = [
        replace(one, draft_policy=policy) for one, policy in zip(PARAMS, policies, strict=False)
    ]
    found = known.generate("eagle:validate", params)
    assert tokens(found) == tokens(known.guided)


def test_slots_are_used_again_after_a_cancellation(taught: Any) -> None:
    known = taught("eagle3")
    with make_llm(known.headed.target, "eagle3", known.headed.draft, max_batch_size=1) as llm:
        for chunk in llm.stream(PROMPTS[5], SamplingParams(max_tokens=60, ignore_eos=True)):
            assert chunk.completion is None
            break
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.token_ids for o in outputs] == [c.token_ids for c in known.guided]


@pytest.mark.slow
def test_masked_drafts_are_accepted_at_least_as_often(taught: Any) -> None:
    """Over all heads, on the same prompts."""
    lengths: dict[str, float] = {}
    for policy in ("mask", "validate"):
        stats = [c.stats for m in METHODS for c in taught(m).generate(f"{m}:{policy}", PARAMS)]
        lengths[policy] = sum(s.output_tokens for s in stats) / sum(s.steps for s in stats)
    assert lengths["mask"] >= lengths["validate"] > 1.3


def test_starvation_is_counted(taught: Any) -> None:
    stats = [c.stats for c in taught("eagle3").generate("eagle3", PARAMS)]
    assert sum(one.starved for one in stats) > 0
    assert all(c.stats.starved == 0 for c in taught("eagle").generate("eagle", PARAMS))


@pytest.mark.slow
def test_auto_finds_the_method(taught: Any) -> None:
    for method in METHODS:
        headed = taught(method).headed
        with make_llm(headed.target, "auto", headed.draft) as llm:
            assert llm.proposer == method
        with make_llm(headed.target, "chain:grammar_forced+auto", headed.draft) as llm:
            assert llm.proposer == f"chain:grammar_forced+{method}"
    with make_llm(build("llama", vocab_size=VOCAB_SIZE), "auto") as llm:
        assert llm.proposer == "ngram"
    model = build("qwen3", vocab_size=VOCAB_SIZE)
    with make_llm(model, "chain:ngram+auto", draft=model) as llm:
        assert llm.proposer == "chain:ngram+draft_model"
    for asked, found in (("auto:mask", "ngram"), ("chain:suffix+auto:mask", "chain:suffix+ngram")):
        with make_llm(build("llama", vocab_size=VOCAB_SIZE), asked) as llm:
            assert llm.proposer == found


def test_a_head_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    reads: list[str] = []
    read = Checkpoint.read

    def counting(checkpoint: Checkpoint, names: Any) -> Any:
        reads.append(checkpoint.source)
        return read(checkpoint, names)

    monkeypatch.setattr(Checkpoint, "read", counting)
    headed = write_head(tmp_path / "head", "deepseek_mtp", VOCAB_SIZE)
    for _ in range(3):
        with make_llm(headed.target, "deepseek_mtp") as llm, llm.with_proposer("auto") as other:
            assert other.proposer == "deepseek_mtp"
    assert len(reads) == 1


def test_what_does_not_fit_is_said(tmp_path: Any) -> None:
    llama = build("llama", vocab_size=VOCAB_SIZE)
    with pytest.raises(ConfigError, match="draft=None: eagle3 drafts with a model"):
        make_llm(llama, "eagle3")
    with pytest.raises(ModelError, match="expected a target of type deepseek_v3.* found llama"):
        make_llm(llama, "deepseek_mtp")
    with pytest.raises(ModelError, match="was not loaded from a checkpoint"):
        make_llm(build("glm4_moe", vocab_size=VOCAB_SIZE), "glm4_moe_mtp")
    with pytest.raises(ConfigError, match="draft='LlamaForCausalLM': eagle takes the folder"):
        make_llm(llama, "eagle", draft=llama)
    headed = write_head(tmp_path / "head", "eagle3", VOCAB_SIZE)
    with pytest.raises(ConfigError, match="draft policy='best': must be one of mask"):
        make_llm(headed.target, "eagle3:best", headed.draft)
    with pytest.raises(ModelError, match="expected"):
        make_llm(build("llama", vocab_size=VOCAB_SIZE - 9), "eagle3", headed.draft)
    kinds: list[Any] = [["dflash"], {}, "medusa"]
    for kind in kinds:
        (tmp_path / "head" / "config.json").write_text(json.dumps({"speculators_model_type": kind}))
        with pytest.raises(ModelError, match="expected a speculators_model_type that is read"):
            make_llm(headed.target, "auto", headed.draft)


@pytest.mark.slow
def test_a_grammar_spec_survives(taught: Any) -> None:
    """A schema under every policy of a head that was taught other texts."""
    spec = GrammarSpec.json_schema(SCHEMA)
    known = taught("qwen3_5_mtp")
    with make_llm(known.headed.target, "none") as llm:
        expected = llm.generate("Something new", SamplingParams(max_tokens=60, grammar=spec))
    with make_llm(known.headed.target, "qwen3_5_mtp", known.headed.draft) as llm:
        found = llm.generate("Something new", SamplingParams(max_tokens=60, grammar=spec))
    assert found[0].token_ids == expected[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_a_head_beside_linear_states(name: str, tmp_path: Any) -> None:
    """It has blocks, which the target's states are not in; drafts fail at any token."""
    target = build(name, vocab_size=VOCAB_SIZE)
    write_eagle3(tmp_path, target, draft_vocab_size=VOCAB_SIZE * 3 // 4)
    found = []
    for proposer, draft in (("none", None), ("eagle3", str(tmp_path))):
        with make_llm(target, proposer, draft, kernels="packed", max_batch_size=3) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, on_error="return")
        found.append([output.completions[0] for output in outputs])
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
    assert len({sum(one.stats.accepted) for one in found[1]}) > 1
