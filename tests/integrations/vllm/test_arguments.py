"""Arguments of ``LLM(engine="vllm")`` as vLLM's: what is renamed, passed on, and refused."""

from __future__ import annotations

import dataclasses
import importlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from guided_spec.bundled import bundled_asset
from guided_spec.engine.runner import Wanted
from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm.arguments import (
    RENAMED,
    Arguments,
    read_arguments,
    require_own_start,
)
from guided_spec.integrations.vllm.plugin import VARIABLE, installed_version

KNOWN = {*RENAMED.values(), "model", "quantization", "speculative_config"}
KNOWN |= {"compilation_config", "structured_outputs_config", "logprobs_mode", "reasoning_parser"}


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def read(
    proposer: str | None = None,
    draft: Any = None,
    engine_options: dict[str, Any] | None = None,
    model: Any = "a/b",
    *,
    has_lookup: bool = False,
    **options: Any,
) -> Arguments:
    options = {"num_draft_tokens": 5, **options}
    wanted = Wanted(model, proposer, draft, options, engine_options or {})
    return read_arguments(wanted, KNOWN, has_lookup=has_lookup)


def test_pipeline_ranks_have_the_drafters_of_the_new_runner_alone() -> None:
    for proposer in ("ngram", "chain:grammar_forced+ngram"):
        fix = f"pipeline_parallel_size=2: this release of vLLM has no '{re.escape(proposer)}'"
        with pytest.raises(ConfigError, match=fix):
            read(proposer, pipeline_parallel_size=2)
        with pytest.raises(ConfigError, match=fix):
            read(proposer, engine_options={"pipeline_parallel_size": 2})
        assert read(proposer, pipeline_parallel_size=1).engine["pipeline_parallel_size"] == 1
        assert read(proposer, pipeline_parallel_size=2, has_lookup=True).proposer == proposer
    for proposer, draft in (("none", None), ("eagle3", "a/head")):
        found = read(proposer, draft, pipeline_parallel_size=2)
        assert found.engine["pipeline_parallel_size"] == 2


def test_names_of_vllm() -> None:
    found = read(
        "chain:grammar_forced+eagle3",
        "a/head",
        {"quantization": "fp8"},
        num_draft_tokens=3,
        max_batch_size=7,
        max_model_len=512,
        prefill_tokens=128,
        prefix_cache=False,
        kv_memory_bytes=2**30,
        kv_dtype="fp8",
        tensor_parallel_size=4,
        dtype=torch.bfloat16,
        revision=None,
        compile_threads=3,
        grammar_tables="auto",
    )
    speculative = {"method": "eagle3", "model": "a/head", "num_speculative_tokens": 3}
    assert found.engine == {
        "model": "a/b",
        "max_num_seqs": 7,
        "max_model_len": 512,
        "max_num_batched_tokens": 128,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": 2**30,
        "kv_cache_dtype": "fp8",
        "tensor_parallel_size": 4,
        "dtype": "bfloat16",
        "quantization": "fp8",
        "speculative_config": speculative,
        "structured_outputs_config": {"backend": "xgrammar"},
    }
    assert read(engine_options={"dtype": "half"}).engine["dtype"] == "half"
    assert found.features == ("counts", "drafts", "endings", "forced", "graphs", "tables")
    assert found.proposer == "chain:grammar_forced+eagle3"
    assert (found.config.compile_threads, found.config.num_draft_tokens) == (3, 3)


def test_dtypes_of_keys_that_vllm_alone_has() -> None:
    wider = {"kv_cache_dtype": "fp8_e5m2"}
    assert read(engine_options=wider).engine["kv_cache_dtype"] == "fp8_e5m2"
    with pytest.raises(ConfigError, match=r"kv_cache_dtype'\]='fp8_e5m2': pass kv_dtype"):
        read(engine_options=wider, kv_dtype="fp8")


def test_proposers() -> None:
    assert read().engine["speculative_config"] is None
    assert read(None, "a/head").proposer == "chain:grammar_forced+auto"
    drafts = read(None, "a/head").engine["speculative_config"]
    assert drafts == {"model": "a/head", "num_speculative_tokens": 5}
    assert read("eagle3", "a/head", num_draft_tokens=0).engine["speculative_config"] is None
    lookup = read("chain:grammar_forced+ngram")
    assert lookup.engine["speculative_config"]["method"] == "custom_class"
    assert lookup.features == ("counts", "endings", "graphs")
    native = read("chain:grammar_forced+ngram", has_lookup=True)
    assert native.engine["speculative_config"] == {
        "method": "ngram_gpu",
        "num_speculative_tokens": 5,
    }
    assert native.features == ("counts", "endings", "forced", "graphs")
    assert read("ngram", has_lookup=True).engine["speculative_config"]["method"] == "ngram"
    block = read("chain:grammar_forced+dflash", "a/head").engine["speculative_config"]
    assert block == {"method": "dflash", "model": "a/head", "num_speculative_tokens": 5}
    assert read("mtp").engine["speculative_config"] == {
        "method": "mtp",
        "num_speculative_tokens": 5,
    }


def test_features(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read("none").features == ("counts", "endings", "graphs")
    assert read("mtp", grammar_tables="auto").features == (
        "counts",
        "drafts",
        "endings",
        "graphs",
        "tables",
    )
    assert read("ngram", grammar_tables="auto").features == ("counts", "endings", "graphs")
    sampled = {"speculative_config": {"draft_sample_method": "probabilistic"}}
    assert read("eagle3", "a/head", sampled).features == (
        "counts",
        "drafts",
        "endings",
        "exact",
        "graphs",
    )
    monkeypatch.setenv(VARIABLE, "guard")
    assert read("mtp").features == ("counts", "drafts", "endings", "graphs", "guard")
    assert read(model=None).engine["model"] == bundled_asset("target")


def test_graphs_that_somebody_chose() -> None:
    for compilation, is_ours in (
        ({"cudagraph_capture_sizes": [1, 2]}, True),
        ({"cudagraph_mode": None}, True),
        ({"cudagraph_mode": "FULL_AND_PIECEWISE"}, False),
        (SimpleNamespace(cudagraph_mode=None), False),  # vLLM's CompilationConfig, made by hand
    ):
        found = read(engine_options={"compilation_config": compilation})
        assert ("graphs" in found.features) == is_ours
        assert found.engine["compilation_config"] is compilation


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"model": object()}, "model='object': vLLM loads it itself"),
        ({"draft": object(), "proposer": "eagle3"}, "draft='object': vLLM loads it itself"),
        ({"tokenizer": object()}, "tokenizer='object'"),
        ({"verifier": "coupled"}, "verifier='coupled': not under engine='vllm'"),
        ({"grammar_backend": "llguidance"}, "needs vLLM's xgrammar"),
        ({"kernels": "stock"}, "kernels='stock'"),
        ({"capture": False}, "enforce_eager"),
        ({"device": "cpu"}, "CUDA_VISIBLE_DEVICES"),
        ({"max_batch_size": 0}, "max_batch_size=0: must be between 1 and"),
        ({"max_forced_tokens": 3}, "max_forced_tokens=3"),
        ({"zzz": 1}, "zzz=1: is no option; the options are"),
        ({"lora": 1}, "lora=1: is no option; did you mean loras?"),
        ({"loras": {"a": "b"}}, "adapters of requests need engine='guided_spec'"),
        ({"max_batchsize": 1}, "max_batchsize=1: is no option; did you mean max_batch_size?"),
        ({"max_num_seqs": 1}, "max_num_seqs=1: is no option; did you mean max_batch_size?"),
        ({"num_speculative_tokens": 1}, "did you mean num_draft_tokens?"),
        ({"quantization": "fp8"}, "is vLLM's own; pass engine_options={'quantization': ...}"),
        ({"proposer": "suffix"}, "proposer='suffix': engine='vllm' has none, ngram"),
        ({"proposer": "eagel3"}, "; did you mean eagle3?"),
        ({"proposer": "eagle3"}, "draft=None: proposer='eagle3' needs one"),
        ({"proposer": "ngram", "draft": "a"}, "draft='a': proposer='ngram' drafts without it"),
        ({"engine_options": {"max_num_seqs": 3}}, "pass max_batch_size, outside of it"),
        ({"engine_options": {"model": "a"}}, "pass model, outside of it"),
        ({"engine_options": {"dtype": "a"}, "dtype": "b"}, "pass dtype, outside of it"),
        ({"engine_options": {"spec_model": "a"}}, "pass draft, outside of it"),
        ({"engine_options": {"quantisation": 3}}, "did you mean quantization?"),
        ({"engine_options": {"zzz": 3}}, "no such argument; see its AsyncEngineArgs"),
        ({"engine_options": {"structured_outputs_config": {"backend": "guidance"}}}, "xgrammar"),
        ({"engine_options": {"structured_outputs_config": 3}}, "must be a dict"),
        ({"engine_options": {"speculative_config": {"model": "a"}}}, "pass draft, outside of it"),
        ({"engine_options": {"speculative_config": {"revision": "a"}}}, "nothing is drafted"),
    ],
)
def test_what_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(**given)
    assert reason in str(raised.value)


def test_grammars_say_themselves_where_they_begin() -> None:
    require_own_start(read())
    inner = {"structured_outputs_config": {"reasoning_parser": "qwen3"}}
    for given in ({"reasoning_parser": "qwen3"}, inner):
        with pytest.raises(ConfigError, match="write GrammarSpec.after"):
            require_own_start(read(engine_options=given))


def test_verification_that_changes_texts_is_refused() -> None:
    more = {"speculative_config": {"rejection_sample_method": "synthetic"}}
    with pytest.raises(ConfigError, match="changes what texts are likely"):
        read("eagle3", "a/head", more)
    more = {"speculative_config": {"rejection_sample_method": "standard"}}
    assert read("eagle3", "a/head", more).engine["speculative_config"]["model"] == "a/head"


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllm_takes_them() -> None:
    """Every name that is passed on is one of vLLM's own class, and it takes their values."""
    utils: Any = importlib.import_module("vllm.engine.arg_utils")
    config: Any = importlib.import_module("vllm.config")
    known = {field.name for field in dataclasses.fields(utils.AsyncEngineArgs)}
    assert known >= {*RENAMED.values(), "speculative_config", "structured_outputs_config"}
    options: dict[str, Any] = {"num_draft_tokens": 4, "max_batch_size": 8, "max_model_len": 256}
    options |= {"prefill_tokens": 512, "prefix_cache": False, "dtype": "float32"}
    options |= {"tensor_parallel_size": 1, "trust_remote_code": False, "kv_memory_bytes": 2**28}
    head = bundled_asset("eagle3")
    wanted = Wanted(None, "eagle3", head, options, {"enforce_eager": True, "seed": 3})
    given = dict(read_arguments(wanted, known, has_lookup=False).engine)
    outputs = config.StructuredOutputsConfig(**given.pop("structured_outputs_config"))
    args = utils.AsyncEngineArgs(**given, structured_outputs_config=outputs)
    assert (args.max_num_seqs, args.max_model_len, args.enforce_eager) == (8, 256, True)
    assert args.max_num_batched_tokens == 512
    assert args.kv_cache_memory_bytes == 2**28
    assert args.structured_outputs_config.backend == "xgrammar"
    model = args.create_model_config()
    assert (model.max_model_len, str(model.dtype)) == (256, "torch.float32")
    with pytest.raises(ConfigError, match="no such argument"):
        read_arguments(Wanted(None, None, None, options, {"maximum": 3}), known, has_lookup=False)
