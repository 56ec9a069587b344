"""vLLM on the same requests: a script of its own, which imports nothing of this package.

``python -P vllm_peer.py PLAN.json RESULT.json`` in an environment that has vLLM (0.25.1 was used).
``benchmarks.gpu.peers`` writes the plan, starts the script and reads the result.

A plan holds: model, eagle3 (folders); method: "none", "ngram", "eagle3" or "guided";
num_draft_tokens; max_model_len; memory_share; cells: a list of {batch, temperature, requests}, each
request a {prompt_ids, schema or regex, max_tokens}; and, where they are needed, engine and
speculative: further arguments of vLLM's LLM and of its speculative_config. The result:
{load_seconds, version, packages, plugin, cells}, one for one, each {seconds, tokens, texts,
finished, refused, drafts, drafted, accepted}. plugin: what a ``worker_extension_cls`` among the
engine's arguments says of itself, see ``plugins_worker``; None without one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 8
NGRAM = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
GUIDED = "guided_spec.integrations.vllm.proposer.GuidedProposer"
PACKAGES = ("vllm", "torch", "transformers", "xgrammar")
COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def main(plan_path: Path, result_path: Path) -> None:
    """Run a plan; the result is written anew after each cell, so that a killed run has some."""
    plan = json.loads(plan_path.read_text(encoding="utf-8"))
    vllm: Any = importlib.import_module("vllm")
    started = time.perf_counter()
    llm = vllm.LLM(**engine_arguments(plan))
    result: dict[str, Any] = {
        "load_seconds": time.perf_counter() - started,
        "version": vllm.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "plugin": _plugin(llm, plan),
        "cells": [],
    }
    result_path.write_text(json.dumps(result), encoding="utf-8")
    for cell in plan["cells"]:
        # Grammars are compiled here, and nothing runs for the first time with the clock on.
        shorter = [{**request, "max_tokens": WARM_UP_TOKENS} for request in cell["requests"]]
        _run(llm, {**cell, "requests": shorter})
        llm.reset_prefix_cache()
        result["cells"].append(_run(llm, cell))
        result_path.write_text(json.dumps(result), encoding="utf-8")
    llm.llm_engine.engine_core.shutdown()


def engine_arguments(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of ``vllm.LLM`` for a plan."""
    speculative = _speculative(plan)
    batches = [cell["batch"] for cell in plan["cells"]]
    width = 1 if speculative is None else plan["num_draft_tokens"] + 1
    sizes = {2**power for power in range(10)} | {batch * width for batch in batches}
    return {
        "model": plan["model"],
        "dtype": "bfloat16",
        "max_model_len": plan["max_model_len"],
        "max_num_seqs": max(batches),
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": plan["memory_share"],
        "speculative_config": speculative,
        "compilation_config": {"cudagraph_capture_sizes": sorted(sizes)},
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "disable_log_stats": False,  # the counters of accepted drafts are among them
        "seed": 0,
        **plan.get("engine", {}),
    }


def _speculative(plan: Mapping[str, Any]) -> dict[str, Any] | None:
    if plan["method"] == "none":
        return None
    own = {
        "ngram": {"method": "ngram", **NGRAM},
        "eagle3": {"method": "eagle3", "model": plan["eagle3"]},
        "dflash": {"method": "dflash", "model": plan["eagle3"]},
        "guided": {"method": "custom_class", "model": GUIDED},
    }[plan["method"]]
    depth = plan["num_draft_tokens"]
    return {**own, "num_speculative_tokens": depth, **plan.get("speculative", {})}


def _plugin(llm: Any, plan: Mapping[str, Any]) -> dict[str, Any] | None:
    """What of guided_spec works in the engine's process, and in this one; in the log too."""
    extension = plan.get("engine", {}).get("worker_extension_cls")
    if extension is None:
        return None
    module = importlib.import_module(extension.rpartition(".")[0])
    found: dict[str, Any] = dict(llm.collective_rpc("describe_guided_spec")[0])
    found["replaced_here"] = module.replaced_functions()
    sys.stdout.write(f"guided_spec: {json.dumps(found)}\n")
    return found


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _run(llm: Any, cell: Mapping[str, Any]) -> dict[str, Any]:
    """Keep ``batch`` requests in the engine until all are done: ``max_num_seqs`` without a reload.

    The loop is that of ``LLM.generate``.
    """
    engine, requests = llm.llm_engine, cell["requests"]
    waiting = list(enumerate(requests))[::-1]
    texts: list[str | None] = [None] * len(requests)
    finished = [False] * len(requests)
    tokens, refused = 0, dict[int, str]()
    running: dict[str, int] = {}
    before = _counters(llm)
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < cell["batch"]:
            index, request = waiting.pop()
            try:
                _add(engine, str(index), request, cell["temperature"])
            except ValueError as error:  # a schema that it does not enforce
                refused[index] = str(error)
                continue
            running[str(index)] = index
        if not running:
            break
        for output in engine.step():
            if output.finished:
                index = running.pop(output.request_id)
                answer = output.outputs[0]
                texts[index], finished[index] = answer.text, answer.finish_reason == "stop"
                tokens += len(answer.token_ids)
    seconds = time.perf_counter() - started
    after = _counters(llm)
    counts = {name: after[name] - before[name] for name in after}
    record = {"seconds": seconds, "tokens": tokens, "texts": texts, "finished": finished}
    return {**record, "refused": refused, **counts}


def _add(engine: Any, name: str, request: Mapping[str, Any], temperature: float) -> None:
    names: Any = importlib.import_module("vllm.sampling_params")
    asked = {"json": request.get("schema"), "regex": request.get("regex")}
    grammar = {key: value for key, value in asked.items() if value is not None}
    params = names.SamplingParams(
        temperature=temperature,
        max_tokens=request["max_tokens"],
        seed=None,  # its own generator for each request would slow vLLM down
        structured_outputs=names.StructuredOutputsParams(**grammar) if grammar else None,
        output_kind=names.RequestOutputKind.FINAL_ONLY,
    )
    engine.add_request(name, {"prompt_token_ids": request["prompt_ids"]}, params)


def _counters(llm: Any) -> dict[str, int]:
    """Drafts, their tokens, and those of them accepted, so far; zeros without speculation."""
    found = dict.fromkeys(COUNTERS.values(), 0)
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] += metric.value
    return found


def _paths(arguments: Sequence[str]) -> tuple[Path, Path]:
    if len(arguments) != 2:
        raise SystemExit("usage: vllm_peer.py PLAN.json RESULT.json")
    return Path(arguments[0]), Path(arguments[1])


if __name__ == "__main__":
    main(*_paths(sys.argv[1:]))
