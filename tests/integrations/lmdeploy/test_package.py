"""``install`` and ``uninstall`` on the real LMDeploy, and what its own methods do in between."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.errors import ConfigError
from guided_spec.integrations.lmdeploy import plugin as integration
from guided_spec.integrations.lmdeploy.agent import with_grammar_compiled
from guided_spec.integrations.lmdeploy.manager import TURN, GuidedManager, model_stop_ids
from guided_spec.integrations.lmdeploy.plugin import install, is_installed, uninstall
from guided_spec.integrations.patches import find
from tests.integrations.lmdeploy.world import Requests, toy_tokenizer, world
from tests.toys import EOS, VOCAB_SIZE

K = 2
CHOICE = {"type": "regex_schema", "regex_schema": "ab|ba"}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    yield world(monkeypatch)
    uninstall()


def _names() -> dict[str, Any]:
    targets = [find(patch._replace(parameters="..."), "it") for patch in integration._PATCHES]
    return {f"{target.patch.module}.{target.patch.path}": target.function for target in targets}


def test_uninstall_puts_everything_back(modules: Any) -> None:
    before = _names()
    proposers = dict(modules.proposers.SPEC_PROPOSERS.module_dict)
    install()
    during = _names()
    install()
    assert _names() == during
    assert is_installed()
    assert all(during[name] is not original for name, original in before.items())
    uninstall()
    uninstall()
    assert _names() == before
    assert modules.proposers.SPEC_PROPOSERS.module_dict == proposers
    assert not is_installed()


def test_changed_methods_are_refused_and_nothing_is_replaced(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _names()
    monkeypatch.setattr(modules.sampler.RejectionSampler, "forward", len)
    with pytest.raises(ConfigError, match="RejectionSampler.forward") as caught:
        install()
    assert "\n" not in str(caught.value)
    assert _names() == before


def test_the_agent_gets_our_parts_and_its_drafter_the_helper(modules: Any) -> None:
    install()
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    agent = Requests(modules, K, manager).agent
    assert isinstance(manager, GuidedManager)
    assert manager.num_draft == K
    assert agent.proposer.guided_helper is agent.guided_helper
    assert agent.guided_helper.manager is manager
    assert manager.vocabulary.stop_token_ids == (EOS,)
    manager.close()


def test_stop_tokens_are_the_tokenizers_and_the_models(modules: Any, tmp_path: Any) -> None:
    del modules
    transformers = importlib.import_module("transformers")
    transformers.GenerationConfig(eos_token_id=[EOS, 4]).save_pretrained(tmp_path)
    tokenizer = toy_tokenizer()
    tokenizer.name_or_path = str(tmp_path)
    assert model_stop_ids(tokenizer) == [EOS, 4]


def test_turns_are_counted_by_sampling_parameters(modules: Any) -> None:
    install()
    requests = Requests(modules, K)

    def turn() -> int:
        number: int = requests.sampling([1], {}).session_ctx[0][TURN]
        return number

    first = turn()
    assert turn() == first
    requests.params.clear()
    assert turn() != first


def test_raw_logprobs_know_nothing_of_the_mask(modules: Any) -> None:
    install()
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    requests = Requests(modules, K, manager)
    sampling = requests.sampling([1], {"top_k": 1, "num_logprobs": 1}, [CHOICE])
    logits = torch.randn(K + 1, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))
    drawn = requests.decode(logits, torch.tensor([[1, 0]]), sampling)
    tokens = drawn.token_ids[0]
    expected = logits.log_softmax(-1)[range(K + 1), tokens.clamp_min(0)]
    assert tokens[0] in (0, 1)
    torch.testing.assert_close(drawn.extra.logprobs.vals[:, 0], expected)
    manager.close()


def test_a_grammar_that_ends_stops_its_row_even_where_lmdeploy_goes_on(modules: Any) -> None:
    """``ignore_eos`` leaves LMDeploy without stop words; here it goes through its whole step."""
    install()
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    requests = Requests(modules, K, manager)
    requests.agent._forward_impl = lambda inputs: {
        "hidden_states": torch.zeros(1, inputs.input_ids.shape[1], 4),
        "model_metas": None,
    }
    requests.agent.proposer.get_logits = lambda hidden: torch.zeros(1, hidden.shape[1], VOCAB_SIZE)
    agent = object.__new__(modules.agent.BaseModelAgent)
    agent.rank, agent.spec_agent, agent.guided_decoding_manager = 0, requests.agent, manager
    agent.dist_ctx, agent.agent_strategy = None, modules.strategy.ARSpecModelAgentStrategy(K)
    criteria = modules.strategy.ARSpecStoppingCriteria(torch.tensor([100, 100, 1]))
    sampling = requests.sampling([1, 2, 3], {"top_k": 1}, [CHOICE, None, CHOICE])
    extra = modules.strategy.ARSpecExtraInputs(
        target_logits=torch.zeros(3 * (K + 1), VOCAB_SIZE),
        output_draft_token_ids=torch.tensor([[0, 1], [0, 0], [0, 1]]),
    )
    with torch.inference_mode():
        step = agent._step_postprocess_with_output(
            None,
            None,
            requests.inputs(3, 7, width=K + 1),
            sampling,
            criteria,
            None,
            need_broadcast_next=False,
            extra_inputs=extra,
        )
        output = asyncio.run(step)[-1]
    assert output.next_token_ids.tolist() == [[0, 1, EOS], [0, 0, 0], [0, 1, EOS]]
    assert output.stopped.tolist() == [True, False, True]
    assert output.stop_pos.tolist() == [2, -1, 0]  # the last one has room for one token
    manager.close()


def test_a_request_whose_schema_cannot_be_enforced_is_an_invalid_one(modules: Any) -> None:
    manager = GuidedManager(toy_tokenizer(), VOCAB_SIZE)
    schema = {"not": {"multipleOf": 2}}
    removed: list[Any] = []

    async def preprocess(engine: Any, response_format: Any) -> Any:
        del engine
        config = SimpleNamespace(response_format=response_format)
        return SimpleNamespace(gen_config=config, session="session")

    wrapped = with_grammar_compiled(preprocess)
    engine = SimpleNamespace(session_mgr=SimpleNamespace(remove=removed.append))
    with pytest.raises(modules.serve.RequestError, match="positive spelling") as caught:
        asyncio.run(wrapped(engine, {"type": "json_schema", "json_schema": {"schema": schema}}))
    assert caught.value.code == modules.serve.ErrorCode.INVALID_REQUEST
    assert removed == ["session"]
    assert asyncio.run(wrapped(engine, CHOICE)).session == "session"
    manager.close()


def test_plain_decoding_goes_through_the_same_manager(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDeploy's own processor of logits, without speculation."""
    install()
    manager = modules.agent.GuidedDecodingManager(toy_tokenizer(), VOCAB_SIZE)
    processor = modules.logits.FusedLogitsProcessor

    async def wait_for_no_stream(self: Any) -> None:
        del self

    monkeypatch.setattr(processor, "_wait_stream_once", wait_for_no_stream)
    requests = Requests(modules, K, manager)
    sampling = requests.sampling([1, 2], {"top_k": 1}, [CHOICE, None])

    async def step() -> list[int]:
        one = processor(sampling, guided_decoding_manager=manager)
        logits = torch.zeros(2, VOCAB_SIZE)
        logits[:, 7] = 1.0
        scores, _ = await one(logits)
        tokens = one.sampling(scores)
        await one.accept_guided_tokens(tokens)
        return [int(token) for token in tokens]

    with torch.inference_mode():
        drawn = [asyncio.run(step()) for _ in range(3)]
    assert drawn == [[0, 7], [1, 7], [EOS, 7]]
    manager.close()


def test_an_engine_in_other_processes_is_refused(
    modules: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``install`` does not reach them, and they would write as without it."""
    del modules
    engine = importlib.import_module("lmdeploy.pytorch.engine.engine")
    built: list[Any] = []
    made = {"build": engine.build_executor, "engine": engine.Engine.from_pretrained.__func__}
    assert all(callable(one) for one in made.values())
    monkeypatch.setattr(engine.Engine, "__init__", lambda *_, **kwargs: built.append(kwargs))
    install()
    messages = importlib.import_module("lmdeploy.messages")
    config = messages.PytorchEngineConfig(enable_mp_engine=True)
    with pytest.raises(ConfigError, match="enable_mp_engine=True: install.. reaches") as caught:
        engine.Engine.from_pretrained("a model", engine_config=config)
    assert "\n" not in str(caught.value)
    engine.Engine.from_pretrained("a model", messages.PytorchEngineConfig())
    assert len(built) == 1
    nothing = dict.fromkeys(("cache_config", "backend_config", "misc_config"))
    for backend, size in (("ray", 1), ("mp", 1), (None, 2)):
        dist = SimpleNamespace(world_size=size, dp=1)
        with pytest.raises(ConfigError, match="_backend='(ray|mp)': install.. reaches its own"):
            engine.build_executor(
                "a model", dist_config=dist, distributed_executor_backend=backend, **nothing
            )
