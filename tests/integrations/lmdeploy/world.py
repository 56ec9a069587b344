"""A SpecModelAgent of the real LMDeploy on the CPU, over the twelve tokens of the toys."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.toys import EOS, TEXTS, VOCAB_SIZE

REASON = "lmdeploy 0.18.0 is not installed"


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """The twelve toy tokens as a tokenizer: one byte each, and ``<eos>``."""
    names = [text.decode() or "<eos>" for text in TEXTS]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """LMDeploy's modules by their short names; its portable operators in place of Triton's.

    Skips where LMDeploy is absent.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what LMDeploy imports
        pytest.importorskip("lmdeploy", reason=REASON)
        names = {
            "agent": "lmdeploy.pytorch.engine.model_agent.agent",
            "config": "lmdeploy.pytorch.config",
            "default": "lmdeploy.pytorch.backends.default",
            "eagle3": "lmdeploy.pytorch.spec_decode.proposers.eagle3",
            "guided": "lmdeploy.pytorch.engine.guided_process",
            "inputs": "lmdeploy.pytorch.model_inputs",
            "logits": "lmdeploy.pytorch.engine.logits_process",
            "multinomial": "lmdeploy.pytorch.nn.multinomial_sampling",
            "proposers": "lmdeploy.pytorch.spec_decode.proposers.base",
            "sampler": "lmdeploy.pytorch.spec_decode.reject_sampler",
            "sampling": "lmdeploy.pytorch.strategies.ar.sampling",
            "serve": "lmdeploy.serve.core.async_engine",
            "spec": "lmdeploy.pytorch.spec_decode.spec_agent",
            "strategy": "lmdeploy.pytorch.strategies.ar_spec.model_agent",
        }
        modules = SimpleNamespace(**{k: importlib.import_module(v) for k, v in names.items()})
    for module in (modules.sampler, modules.multinomial):
        monkeypatch.setattr(module, "get_backend", lambda *_: modules.default.DefaultOpsBackend)
    return modules


class Drawn(NamedTuple):
    """What one step gave: tokens [B, K + 1] with -1 behind the last one, and the agent's record."""

    token_ids: Tensor
    extra: Any


class Requests:
    """A batch of requests under one agent, whose forwards the test stands in for."""

    def __init__(
        self, modules: Any, k: int, manager: Any = None, method: str = "deepseek_mtp"
    ) -> None:
        self.modules = modules
        self.k = k
        self.params: dict[int, Any] = {}  # of each session, until the test ends its turn
        dist = modules.config.DistConfig()
        config = modules.config.SpecDecodeConfig(
            model="", method=method, num_speculative_tokens=k, dist_config=dist
        )
        self.agent = modules.spec.SpecModelAgent(
            config,
            SimpleNamespace(device_type="cuda"),
            SimpleNamespace(create_make_dummy_meta=lambda _: None),
            None,
            SimpleNamespace(logprobs_mode="raw_logprobs"),
            SimpleNamespace(dist_config=dist, rank=0),
            device="cpu",
            guided_decoding_manager=manager,
        )

    def sampling(
        self,
        seeds: Sequence[int],
        params: dict[str, Any],
        formats: Sequence[Any] | None = None,
        sessions: Sequence[int] | None = None,
    ) -> Any:
        """``SamplingInputs`` by LMDeploy's own strategy; sessions 0, 1, ... unless told."""
        strategy = self.modules.sampling.ARSamplingStrategy(0)
        seqs = []
        for row, seed in enumerate(seeds):
            fields = {"temperature": 1.0, "top_k": 0, "random_seed": seed, **params}
            fields["response_format"] = None if formats is None else formats[row]
            fields = {
                name: value[row] if isinstance(value, list) else value
                for name, value in fields.items()
            }
            param = importlib.import_module("lmdeploy.pytorch.messages").SamplingParam(**fields)
            number = row if sessions is None else sessions[row]
            param = self.params.setdefault(number, param)
            session = SimpleNamespace(session_id=number)
            seqs.append(
                SimpleNamespace(
                    sampling_param=param,
                    seq_id=0,
                    session=session,
                    num_valid_ids=1,
                    num_new_tokens=0,
                )
            )
        return strategy.make_sampling_inputs(seqs)

    def decode(self, logits: Tensor, drafts: Tensor, sampling: Any, history: int = 7) -> Drawn:
        """One verification: logits [K + 1, V] for all requests, or [B, K + 1, V]."""
        batch = len(drafts)
        rows = logits.expand(batch, *logits.shape[-2:]).reshape(-1, logits.shape[-1]).clone()
        extra = self.modules.strategy.ARSpecExtraInputs(
            target_logits=rows, output_draft_token_ids=drafts
        )
        return self._sample(self.inputs(batch, history, width=self.k + 1), extra, sampling)

    def prefill(self, logits: Tensor, sampling: Any, length: int = 3) -> Drawn:
        """The first token of each request: logits [V] for all, or [B, V]."""
        batch = sampling.batch_size
        extra = self.modules.strategy.ARSpecExtraInputs(
            target_logits=logits.expand(batch, -1).clone()
        )
        inputs = self.inputs(batch, 0, width=length, is_decoding=False)
        return self._sample(inputs, extra, sampling)

    def inputs(self, batch: int, history: int, *, width: int, is_decoding: bool = True) -> Any:
        """LMDeploy's record of a forward over ``width`` tokens of each request."""
        return self.modules.inputs.ModelInputs(
            input_ids=torch.zeros(1, batch * width, dtype=torch.int64),
            seq_length=torch.full((batch,), width),
            history_lengths=torch.full((batch,), history),
            block_offsets=torch.zeros(batch, 1, dtype=torch.int64),
            is_decoding=is_decoding,
            num_ignored_history=torch.zeros(batch, dtype=torch.int64),
            max_q_seqlen=width,
            max_kv_seqlen=history + width,
            sum_kv_seqlen=batch * (history + width),
        )

    def _sample(self, inputs: Any, extra: Any, sampling: Any) -> Drawn:
        with torch.inference_mode():
            found = asyncio.run(self.agent.async_sampling_logits(inputs, extra, sampling))
        return Drawn(found.output_token_ids, found)

    def draft(self, inputs: Any, extra: Any, sampling: Any) -> Tensor:
        """int64 [B, K]: LMDeploy's own draft loop behind what ``extra`` says was accepted."""
        with torch.inference_mode():
            found = asyncio.run(self.agent.async_model_forward(inputs, extra, sampling))
        drafts: Tensor = found.output_draft_token_ids
        return drafts


def closed_form(
    logits: Tensor, params: dict[str, Any], legal: Sequence[int] | None = None
) -> Tensor:
    """What LMDeploy's filters make of logits [V], written down again: top-k, top-p, min-p."""
    scores = logits.double().clone()
    if legal is not None:
        scores[[token for token in range(VOCAB_SIZE) if token not in legal]] = float("-inf")
    scores = scores / params.get("temperature", 1.0)
    order = scores.argsort(descending=True)
    kept = order[: params.get("top_k", 0) or VOCAB_SIZE]
    probs = torch.softmax(scores[kept], 0)
    kept = kept[(probs.cumsum(0) - probs) <= params.get("top_p", 1.0)]
    probs = torch.softmax(scores[kept], 0)
    kept = kept[probs >= params.get("min_p", 0.0) * probs.max()]
    return torch.zeros(VOCAB_SIZE, dtype=torch.float64).scatter(
        0, kept, torch.softmax(scores[kept], 0)
    )


assert EOS == VOCAB_SIZE - 1
