"""Sampled drafts of vLLM's drafters, which of them are covered, and how graphs are split."""

from __future__ import annotations

import importlib
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.errors import ConfigError

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import guard as vllm_guard  # noqa: E402
from guided_spec.integrations.vllm.drafts import heads as vllm_drafts  # noqa: E402
from tests.integrations.vllm.drafters import (  # noqa: E402
    V1,
    V2,
    Table,
    config_of,
    encode,
    started,
    use_loops,
)
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    RELEASE,
    interpreted,
    keep_functions,
    sampling_params,
    tokenizer,
    verify,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, and the Triton interpreter's
    pytest.mark.usefixtures("loops"),
    interpreted,
]
VARIABLE = "GUIDED_SPEC_VLLM"
fuses = pytest.mark.skipif(RELEASE < (0, 28), reason="older releases fuse no graphs")


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    use_loops(monkeypatch)


def letter(text: str) -> int:
    (found,) = encode(text)
    return found


@pytest.mark.parametrize("graphs", ["none", "step", pytest.param("fused", marks=fuses)])
def test_sampled_drafts_are_verified_with_what_they_were_drawn_from(graphs: str) -> None:
    config = config_of(draft_sample_method="probabilistic")
    table = Table(23)
    drafter = V2(config, table, graphs=graphs)
    assert not drafter.drafter.use_fused_multi_step_decode
    assert not drafter.drafter.supports_decode_metadata_update
    started(
        drafter,
        free=sampling_params(config),
        bound=sampling_params(config, regex="a[bcd]{4}"),
    )
    a, legal = letter("a"), [letter(x) for x in "bcd"]
    draft = drafter.step({"free": [11], "bound": [a]}, temperature=0.7)
    logits = drafter.drafter.draft_logits
    assert torch.isfinite(logits[1, 0]).nonzero().view(-1).tolist() == sorted(legal)
    scale = 1.0 if RELEASE >= (0, 28) else 0.7  # older releases keep them divided
    torch.testing.assert_close(logits[1, 0, legal], table.logits(a)[legal] / scale)
    assert set(tokenizer().decode(draft["bound"])) <= set("bcd")
    plain = V2(config, table, graphs=graphs, guided=False)
    for name in draft:
        plain.add(name, sampling_params(config))
    free = plain.step({"free": [11], "bound": [a]}, temperature=0.7)["free"]
    assert free == draft["free"]
    assert torch.equal(plain.drafter.draft_logits[0], logits[0])  # bit for bit


def test_sampled_drafts_of_the_older_runner() -> None:
    config = config_of(draft_sample_method="probabilistic")
    table = Table(25)
    drafter = started(
        V1(config, table),
        bound=sampling_params(config, regex="a[bcd]{4}"),
        free=sampling_params(config),
    )
    a, legal = letter("a"), [letter(x) for x in "bcd"]
    draft = drafter.step({"bound": [a], "free": [11]}, temperature=0.7)["bound"]
    probs = drafter.drafter.take_last_draft_probs()
    expected = (table.logits(a)[legal] / 0.7).softmax(-1)
    torch.testing.assert_close(probs[0, 0, legal], expected)
    assert probs[0, 0].sum() == pytest.approx(1.0, abs=1e-5)
    assert set(tokenizer().decode(draft)) <= set("bcd")
    free = (table.logits(11) / 0.7).softmax(-1)
    torch.testing.assert_close(probs[1, 0], free)


def test_the_law_of_a_step_is_the_targets() -> None:
    """p is (.5, .3, .2) over b, c, d; the drafter likes d, and most of all an illegal token."""
    config = config_of(draft_sample_method="probabilistic")
    a, b, c, d, illegal = map(letter, "abcdz")
    table = Table(27)
    for token, strength in ((illegal, 6.0), (d, 4.0), (c, 2.5), (b, 2.0)):
        table.head[token] += strength * table.embedding[a]
    drafter = V2(config, table)
    drafter.drafter.num_speculative_steps = 1
    names = [f"request {at}" for at in range(8)]
    params = sampling_params(config, regex="a[bcd]{9}")
    started(drafter, **dict.fromkeys(names, params))
    size = max(b, c, d, illegal) + 1  # no other token is possible
    target = torch.full((8, 2, size), float("-inf"))
    target[..., [b, c, d]] = torch.tensor([0.5, 0.3, 0.2]).log()
    tokens: list[int] = []
    for step in range(25):
        drafter.seed = 1000 * step
        drafts = drafter.step(dict.fromkeys(names, [a]), temperature=1.0)
        firsts = [draft[:1] for draft in drafts.values()]
        kept = drafter.drafter.draft_logits[:8, :1, :size].float()
        tokens += [row[0] for row in verify(target, kept, firsts, seed=step)]
        for name in names:  # and once more from the start
            drafter.add(name, params)
    shares = [tokens.count(token) / len(tokens) for token in (b, c, d)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.1)


@fuses
def test_masks_split_the_graph_of_a_draft() -> None:
    config = config_of()
    plain = V2(config, Table(31), graphs="fused", guided=False)
    assert plain.drafter.use_fused_multi_step_decode
    assert plain.drafter.supports_decode_metadata_update
    drafter = V2(config, Table(31), graphs="fused")
    assert not drafter.drafter.use_fused_multi_step_decode
    assert not drafter.drafter.supports_decode_metadata_update


def test_other_drafters_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    proposer = V1(config_of(), Table(33), guided=False).drafter
    assert vllm_drafts.is_covered(proposer)
    with caplog.at_level(logging.INFO, "vllm.guided_spec"):
        proposer.use_local_argmax_reduction = True
        assert not vllm_drafts.is_covered(proposer)
        base: Any = type(proposer)
        own_loop: Any = type("OwnLoop", (base,), {"propose": print})
        assert not vllm_drafts.is_covered(own_loop.__new__(own_loop))
    assert "use_local_argmax_reduction" in caplog.text
    assert "a way of its own to draft" in caplog.text


@pytest.mark.parametrize(("name", "feature"), [("drafts", vllm_drafts), ("guard", vllm_guard)])
def test_a_worker_gets_the_patches(
    monkeypatch: pytest.MonkeyPatch, name: str, feature: Any
) -> None:
    own = keep_functions(monkeypatch, feature.PATCHES)
    workers = [
        one for wanted in feature.WORKER_PATCHES for one in keep_functions(monkeypatch, wanted)
    ]
    monkeypatch.setenv(VARIABLE, name)
    importlib.import_module("guided_spec.integrations.vllm.plugin").register()
    base: Any = importlib.import_module("vllm.v1.worker.worker_base").WorkerBase
    assert (base, "__init__") in [target[:2] for target in own]
    assert not any(getattr(owner, at) is kept for owner, at, kept in own)
    assert all(getattr(owner, at) is kept for owner, at, kept in workers)
    worker = base(config_of(), 0, 0, "")
    assert worker.rank == 0
    assert not any(getattr(owner, at) is kept for owner, at, kept in workers)


def test_a_drafter_with_more_tokens_than_the_target_is_refused() -> None:
    drafter = V1(config_of(), Table(35), guided=False).drafter
    drafter.draft_model_config = SimpleNamespace(get_vocab_size=lambda: 5000)
    with pytest.raises(ConfigError, match="the target has 4096 tokens"):
        vllm_drafts.Drafting(drafter, NUM_DRAFT, torch.empty)
