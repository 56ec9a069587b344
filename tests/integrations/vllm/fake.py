"""The few names of vLLM that ``LLM(engine="vllm")`` uses, with an engine that writes by heart."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

import guided_spec
from guided_spec.grammar.backends.xgrammar import XGrammarBackend, XGrammarGrammar
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.integrations.vllm import llm as integration
from guided_spec.integrations.vllm import plugin
from guided_spec.integrations.vllm.arguments import RENAMED

MODEL = Path(guided_spec.__file__).parent / "assets" / "target"
STEP = 3  # tokens of a delta


class RequestOutputKind(Enum):
    DELTA = 1
    FINAL_ONLY = 2


class Settings:
    """vLLM's SamplingParams and StructuredOutputsParams: what they were made of."""

    def __init__(self, **given: Any) -> None:
        if given.get("temperature", 0) > 2:
            raise ValueError("temperature must be at most 2")
        self.__dict__.update(given)
        self.given = given


class Grammars:
    """In place of ``VllmGrammars``: what it compiles, by xgrammar and this package's vocabulary."""

    def __init__(self, config: Any = None) -> None:
        del config
        tokenizer: Any = AutoTokenizer.from_pretrained(str(MODEL))
        ends = [tokenizer.eos_token_id]
        self.vocabulary = Vocabulary.from_tokenizer(tokenizer, len(tokenizer), ends)
        self._backend = XGrammarBackend(self.vocabulary)

    def stops_of(self, params: Any) -> frozenset[int]:
        return frozenset(params.stop_token_ids)

    def compile(self, spec: GrammarSpec) -> XGrammarGrammar:
        compiler = self._backend._compilers.cached
        if spec.kind == "ebnf":
            return XGrammarGrammar(compiler.compile_grammar(spec.source))
        return XGrammarGrammar(compiler.compile_structural_tag(spec.source))


class FakeEngine:
    """vLLM's AsyncLLM. answers: token ids behind a prompt's text, or what is raised there.

    hang: prompts behind which nothing comes any more after the first tokens.
    seen: the prompts and settings that came. aborted: prompts whose caller went away.
    reason: why texts that do not end by themselves are over. metrics: of a finished request.
    """

    def __init__(self, args: Any) -> None:
        self.args = args
        self.environment = os.environ.get("GUIDED_SPEC_VLLM")
        self.start_method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        self.answers: dict[str, list[int] | Exception] = {}
        self.hang: set[str] = set()
        self.seen: list[tuple[Mapping[str, Any], Any]] = []
        self.aborted: list[str] = []
        self.reason: str | None = "length"
        self.metrics: Any = None
        self.is_shut_down = False
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(MODEL))
        config = AutoConfig.from_pretrained(str(MODEL))
        model = SimpleNamespace(
            model=args.model,
            hf_config=config,
            max_model_len=args.max_model_len or 256,
            logprobs_mode=args.logprobs_mode or "raw_logprobs",
            get_vocab_size=lambda: config.vocab_size,
        )
        self.vllm_config = SimpleNamespace(
            model_config=model,
            scheduler_config=SimpleNamespace(max_num_seqs=args.max_num_seqs or 4),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            cache_config=SimpleNamespace(num_gpu_blocks=64),
        )

    def shutdown(self) -> None:
        self.is_shut_down = True

    async def generate(
        self, prompt: Mapping[str, Any], params: Any, name: str
    ) -> AsyncGenerator[Any, None]:
        text = self._tokenizer.decode(prompt["prompt_token_ids"])
        self.seen.append((prompt, params))
        answer = self.answers[text]
        if isinstance(answer, Exception):
            raise answer
        left, is_whole = list(answer[: params.max_tokens]), params.output_kind.name == "FINAL_ONLY"
        try:
            while left:
                await asyncio.sleep(0)
                new, left = (left, []) if is_whole else (left[:STEP], left[STEP:])
                yield self._output(name, new, params, is_over=not left)
                if text in self.hang:
                    await asyncio.sleep(60)
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted.append(text)
            raise

    def _output(self, name: str, new: list[int], params: Any, *, is_over: bool) -> Any:
        rows = None
        if params.logprobs is not None:
            rows = [{token: SimpleNamespace(logprob=-0.5, rank=1)} for token in new]
        reason = ("stop" if new[-1] in params.stop_token_ids else self.reason) if is_over else None
        metrics = self.metrics if is_over else None
        one = SimpleNamespace(
            token_ids=new, logprobs=rows, finish_reason=reason, spec_decode_metrics=metrics
        )
        return SimpleNamespace(
            request_id=name, outputs=[one], finished=is_over, num_cached_tokens=2
        )


@dataclasses.dataclass
class World:
    """engines: those that were made. fail: raised where the next one is made."""

    engines: list[FakeEngine] = dataclasses.field(default_factory=list)
    fail: Exception | None = None

    @property
    def engine(self) -> FakeEngine:
        return self.engines[-1]

    def make(self, args: Any) -> FakeEngine:
        if self.fail is not None:
            raise self.fail
        self.engines.append(FakeEngine(args))
        return self.engine


def install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *extra: str) -> World:
    """Put it in vLLM's place. extra: further arguments of its engine."""
    names = ["model", *RENAMED.values(), "speculative_config", "structured_outputs_config"]
    names += ["logprobs_mode", "enforce_eager", *extra]
    args = dataclasses.make_dataclass(
        "AsyncEngineArgs",
        [(name, Any, dataclasses.field(default=None)) for name in names],
    )
    world = World()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"StructuredOutputsConfig": SimpleNamespace},
        "vllm.engine": {},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": args},
        "vllm.sampling_params": {
            "SamplingParams": Settings,
            "StructuredOutputsParams": Settings,
            "RequestOutputKind": RequestOutputKind,
        },
        "vllm.v1": {},
        "vllm.v1.engine": {},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=world.make)},
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    for module in (integration, plugin):
        monkeypatch.setattr(module, "installed_root", lambda: tmp_path)
    monkeypatch.setattr(integration, "PATCHES", ())
    monkeypatch.setattr(integration, "counts", SimpleNamespace(PATCHES=()))
    monkeypatch.setattr(integration, "VllmGrammars", Grammars)
    monkeypatch.setattr(plugin, "entry_points", lambda **_: ["guided_spec"])
    monkeypatch.delenv("GUIDED_SPEC_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return world
