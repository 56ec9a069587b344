"""vLLM's own n-gram speculator of the new runner: forced text for requests under a grammar."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from guided_spec.integrations.vllm import requests as vllm_requests  # noqa: E402
from guided_spec.integrations.vllm.drafts import lookup as vllm_lookup  # noqa: E402
from guided_spec.integrations.vllm.plugin import installed_root  # noqa: E402
from tests.integrations.vllm.drafters import CPU, encode, use_loops  # noqa: E402
from tests.integrations.vllm.parts import (  # noqa: E402
    NUM_DRAFT,
    RELEASE,
    interpreted,
    make_config,
    sampling_params,
    wait_for_grammar,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own, and the Triton interpreter's
HAS_LOOKUP = RELEASE >= (0, 32)
driven = pytest.mark.skipif(not HAS_LOOKUP, reason="the new runner has no n-gram drafter there")
WORDS = ' "temperature": '
WRITTEN = {"forced": "x", "seen": "x", "free": "x"}
REGEXES = {"forced": "x" + WORDS * 2, "seen": "x[a-z ]{30}", "free": None}
PROMPT = "x is hot or not. "


class World:
    """Three requests behind their first token; two of them under a grammar."""

    def __init__(self, *, guided: bool) -> None:
        lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
        config = make_config(speculative={"method": "ngram", **lookup})
        cls: Any = importlib.import_module(
            "vllm.v1.worker.gpu.spec_decode.ngram.speculator"
        ).NgramGPUSpeculator
        init, self._propose = cls.__init__, cls.propose
        if guided:
            init = vllm_lookup.guide_lookup(init)
            self._propose = vllm_lookup.propose_lookup(self._propose)
        prompt = encode(PROMPT)
        texts = torch.zeros(8, 512, dtype=torch.int32)
        new = [*prompt, *encode("x")]
        texts[:3, : len(new)] = torch.tensor(new, dtype=torch.int32)
        states = SimpleNamespace(
            all_token_ids=SimpleNamespace(gpu=texts),
            total_len=SimpleNamespace(gpu=torch.full((8,), len(new), dtype=torch.int32)),
            req_id_to_index={name: at for at, name in enumerate(WRITTEN)},
            prompt_len=SimpleNamespace(np=np.full(8, len(prompt))),
        )
        self.speculator = cls.__new__(cls)
        init(self.speculator, config, CPU, states)
        self.runner = SimpleNamespace(speculator=self.speculator, req_states=states)
        self.batch = SimpleNamespace(req_ids=[*WRITTEN], num_reqs=3, idx_mapping=torch.arange(3))
        scheduled = [
            SimpleNamespace(
                req_id=name,
                sampling_params=sampling_params(config, **({"regex": regex} if regex else {})),
                prefill_token_ids=prompt,
            )
            for name, regex in REGEXES.items()
        ]
        vllm_requests.note_requests(lambda *_: None)(
            self.runner, SimpleNamespace(scheduled_new_reqs=scheduled)
        )

    def wait(self) -> None:
        requests = vllm_requests.requests_of(self.speculator)
        assert requests is not None
        for name in ("forced", "seen"):
            wait_for_grammar(requests, name)

    def step(self) -> dict[str, list[int]]:
        """The drafts behind the token that each request has just got."""
        sampled = torch.tensor([encode(text) for text in WRITTEN.values()])
        counts = torch.ones(3, dtype=torch.int32)
        output = (SimpleNamespace(sampled_token_ids=sampled), counts, None)
        vllm_requests.note_sampled_v2(lambda *_: output)(self.runner, None, self.batch, None)
        none: Any = None
        drafts = self._propose(
            self.speculator, self.batch, none, none, none, none, counts, none,
            torch.full((8, 1), sampled[0, 0].item()), none, none, none,
        )  # fmt: skip
        return dict(zip(WRITTEN, drafts.tolist(), strict=True))


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    use_loops(monkeypatch)


def seen(count: int) -> Sequence[int]:
    """What stands behind the first letter of the prompt."""
    return encode(PROMPT)[1 : 1 + count]


def test_an_engine_takes_it_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert vllm_lookup.has_lookup(installed_root()) is HAS_LOOKUP
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert not vllm_lookup.has_lookup(installed_root())


@driven
@interpreted
def test_forced_text_is_drafted_and_else_what_stood_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "forced")
    world, plain = World(guided=True), World(guided=False).step()
    world.wait()
    found = world.step()
    assert found["free"] == plain["free"] == list(seen(NUM_DRAFT))
    assert found["seen"] == list(seen(NUM_DRAFT))
    assert found["forced"] == encode(WORDS * 2)[:NUM_DRAFT]
    assert plain["forced"] == list(seen(NUM_DRAFT))  # which vLLM cuts at its first token


@driven
@interpreted
def test_without_the_feature_nothing_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "drafts")
    world = World(guided=True)
    assert vllm_requests.requests_of(world.speculator) is None
    assert "NgramGPUSpeculator drafts as without this package: ask for forced" in caplog.text
    assert world.step() == World(guided=False).step()
