"""LMDeploy on the documents of ``benchmarks.gpu``: ``python -m benchmarks.gpu.lmdeploy_peer WORK``.

One configuration a process: what ``install()`` replaces stays in engines that were built with it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.gpu.documents import DocumentPlan, DocumentRun, num_documents
from benchmarks.gpu.lmdeploy_attention import provide_flash_attention
from benchmarks.gpu.peers import VllmEnvironment, vllm_measurement, vllm_plan
from benchmarks.gpu.plugins import PluginRun, load_outline
from benchmarks.gpu.subject import json_documents
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.integrations.lmdeploy import plugin as lmdeploy

WARM_UP_TOKENS = 8
NUM_DRAFT_TOKENS = 5
INSTALLED = "+guided_spec"
PACKAGES = ("lmdeploy", "torch", "transformers", "triton", "xgrammar")
ENGINE_LOOP = "lmdeploy.pytorch.engine.engine_loop"
LLAMA = "lmdeploy.pytorch.configurations.llama"


def main(
    work: Annotated[Path, typer.Argument(help="Folder with the widened target and eagle3.")],
    configuration: Annotated[str, typer.Option(help="none, eagle3, ...; METHOD+guided_spec.")],
    flash_attention: Annotated[Path | None, typer.Option(help="vLLM's library of it.")] = None,
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8,64",
    temperatures: Annotated[str, typer.Option(help="Such as 0,0.7.")] = "0,0.7",
    output: Annotated[Path | None, typer.Option(help="Append JSON Lines here.")] = None,
) -> None:
    """Tokens per second, acceptance and validity of LMDeploy's PyTorch engine, a line a workload.

    ``METHOD+guided_spec`` calls ``install()`` first, see docs/lmdeploy.md.
    """
    with failures_as_messages(), tempfile.TemporaryDirectory() as scratch:
        if flash_attention is not None:
            provide_flash_attention(flash_attention)
        if configuration.endswith(INSTALLED):
            lmdeploy.install()
        split = batches.split(","), temperatures.split(",")
        plan = DocumentPlan((), [int(size) for size in split[0]], [float(t) for t in split[1]])
        subject = load_outline(str(work / "target"), str(work / "eagle3"))
        draft = write_draft_folder(work / "eagle3", Path(scratch) / "draft")
        counts = _count_drafts()
        started = time.perf_counter()
        pipe = make_pipeline(work / "target", draft, configuration, max(plan.batches))
        engine: dict[str, Any] = {"load_seconds": time.perf_counter() - started}
        engine["packages"] = {name: importlib.metadata.version(name) for name in PACKAGES}
        engine["installed"] = lmdeploy.is_installed()
        for cell in vllm_plan(subject, plan, "none", VllmEnvironment())["cells"]:
            shorter = [{**one, "max_tokens": WARM_UP_TOKENS} for one in cell["requests"]]
            _run(pipe, {**cell, "requests": shorter}, counts)
            found = _run(pipe, cell, counts)
            items = json_documents(num_documents(plan, cell["batch"]))
            name = f"lmdeploy {configuration}"
            measured = vllm_measurement(name, items, found)
            refused = next(iter(found["refused"].values()), None)
            run = DocumentRun(name, cell["batch"], cell["temperature"], measured, refused)
            _write(PluginRun(run, found["drafts"], sum(found["finished"]), engine), output)
        pipe.close()


def write_draft_folder(eagle3: Path, folder: Path) -> Path:
    """The head as LMDeploy finds it: it makes ``Eagle3LlamaForCausalLM`` of the name it reads."""
    folder.mkdir()
    config = json.loads((eagle3 / "config.json").read_text(encoding="utf-8"))
    config["architectures"] = ["LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for weights in eagle3.glob("*.safetensors*"):
        (folder / weights.name).symlink_to(weights.resolve())
    return folder


def use_layers(layers: Sequence[int]) -> None:
    """Let the target hand out the inputs of ``layers``; LMDeploy has 2, N // 2 and N - 3 fixed."""
    builder = importlib.import_module(LLAMA).LlamaModelConfigBuilder
    original = builder.build

    def build(_: Any, hf_config: Any, *arguments: Any, **options: Any) -> Any:
        config = original(hf_config, *arguments, **options)
        if hasattr(hf_config, "aux_hidden_state_layers"):
            hf_config.aux_hidden_state_layers = tuple(layers)
        return config

    builder.build = classmethod(build)


def make_pipeline(target: Path, draft: Path, configuration: str, max_batch_size: int) -> Any:
    """LMDeploy's pipeline on the PyTorch engine, with CUDA graphs at the powers of two."""
    package: Any = importlib.import_module("lmdeploy")
    messages: Any = importlib.import_module("lmdeploy.messages")
    method = configuration.removesuffix(INSTALLED)
    sizes = sorted({2**power for power in range(10) if 2**power < max_batch_size})
    backend = package.PytorchEngineConfig(
        dtype="bfloat16",
        max_batch_size=max_batch_size,
        cache_max_entry_count=0.6,
        cudagraph_capture_batch_sizes=[*sizes, max_batch_size],
    )
    speculative = None
    if method != "none":
        model = str(draft) if method == "eagle3" else ""
        speculative = messages.SpeculativeConfig(method, model, NUM_DRAFT_TOKENS)
    if method == "eagle3":
        config = json.loads((draft / "config.json").read_text(encoding="utf-8"))
        use_layers(config["eagle_aux_hidden_state_layer_ids"])
    return package.pipeline(str(target), backend_config=backend, speculative_config=speculative)


def generation_config(request: Mapping[str, Any], temperature: float) -> Any:
    """A request of ``vllm_plan`` in LMDeploy's words, without filters."""
    package: Any = importlib.import_module("lmdeploy")
    asked = None
    if "schema" in request:
        schema = {"name": "answer", "schema": json.loads(request["schema"])}
        asked = {"type": "json_schema", "json_schema": schema}
    sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    return package.GenerationConfig(
        max_new_tokens=request["max_tokens"],
        response_format=asked,
        **(sampled if temperature > 0 else {}),
    )


def _count_drafts() -> Counter[str]:
    """What every step says of a request's draft, added up where LMDeploy makes the record."""
    counts: Counter[str] = Counter()
    loop: Any = importlib.import_module(ENGINE_LOOP)
    original = loop.RequestMetrics

    def counted(*arguments: Any, spec_info: Any = None, **options: Any) -> Any:
        if spec_info is not None and spec_info["num_draft_tokens"] > 0:
            counts["drafts"] += 1
            counts["drafted"] += spec_info["num_draft_tokens"]
            counts["accepted"] += spec_info["num_accepted_tokens"]
        return original(*arguments, spec_info=spec_info, **options)

    loop.RequestMetrics = counted
    return counts


def _run(pipe: Any, cell: Mapping[str, Any], counts: Counter[str]) -> dict[str, Any]:
    """All requests, ``batch`` at a time, in the form of ``vllm_peer``'s cells."""
    counts.clear()
    started = time.perf_counter()
    loop = pipe.internal_thread.loop
    answers = asyncio.run_coroutine_threadsafe(_ask_all(pipe.async_engine, cell), loop).result()
    seconds = time.perf_counter() - started
    return {
        "seconds": seconds,
        "tokens": sum(answer["tokens"] for answer in answers),
        "texts": [answer["text"] for answer in answers],
        "finished": [answer["reason"] == "stop" for answer in answers],
        "refused": {i: a["refused"] for i, a in enumerate(answers) if a["refused"] is not None},
        **{name: counts[name] for name in ("drafts", "drafted", "accepted")},
    }


async def _ask_all(engine: Any, cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    room = asyncio.Semaphore(cell["batch"])
    asked = [_ask(engine, request, cell["temperature"], room) for request in cell["requests"]]
    return list(await asyncio.gather(*asked))


async def _ask(
    engine: Any, request: Mapping[str, Any], temperature: float, room: asyncio.Semaphore
) -> dict[str, Any]:
    refusals: Any = importlib.import_module("lmdeploy.serve.core.exceptions")
    found: dict[str, Any] = {"text": "", "tokens": 0, "reason": None, "refused": None}
    async with room:
        try:
            prepared = await engine.preprocess(
                None,
                engine.session_mgr.get(),
                gen_config=generation_config(request, temperature),
                input_ids=request["prompt_ids"],
            )
            async for part in engine.generate(prepared):
                found["text"] += part.response
                found["tokens"], found["reason"] = part.generate_token_len, part.finish_reason
        except refusals.RequestError as error:
            return {"text": None, "tokens": 0, "reason": None, "refused": str(error)}
    found["tokens"] += found["reason"] == "stop"  # the token that ended it, which is left out
    return found


def _write(run: PluginRun, output: Path | None) -> None:
    line = json.dumps(run.as_dict())
    stdout().print(line, markup=False, soft_wrap=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    typer.run(main)
