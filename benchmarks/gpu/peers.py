"""Other engines on the documents of ``documents``: transformers' generate, and vLLM."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import vllm_peer
from benchmarks.gpu.documents import DocumentPlan, DocumentRun, num_documents
from benchmarks.gpu.subject import Subject, json_documents
from guided_spec.engine.prompt import PromptEncoder
from guided_spec.evaluate.measurement import Measurement, WorkItem, is_valid, run_transformers
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import end_of_text_ids

VLLM_METHODS = ("none", "ngram", "eagle3")
TAIL = 600  # characters of a failed engine's log that are reported
LOOKUP_PROBLEM = (
    "prompt lookup asks the processor about several positions of a draft and takes them back; "
    "xgrammar's processor follows one text"
)
# Without a network, without FlashInfer (the default sampler needs it), and told of on one machine.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "PYTHONUNBUFFERED": "1",
    "TOKENIZERS_PARALLELISM": "true",
}


class VllmEnvironment(NamedTuple):
    """Where vLLM is.

    python: an interpreter that can import it; None is this one. site: a folder that is put in front
    of that interpreter's path; None for none. memory_share: of the device, for vLLM to fill.
    logs: a folder that vLLM's output goes to, and what is known of a run that is cut off; None is a
    temporary one. methods: what to run with it, of ``VLLM_METHODS`` (peers) or as
    ``gpu_plugins.Configuration`` writes it (plugins); empty is everything. limit: seconds that one
    of them may take, start-up included.
    """

    python: str | None = None
    site: str | None = None
    memory_share: float = 0.75
    logs: Path | None = None
    methods: Sequence[str] = ()
    limit: float = 540.0

    @property
    def is_there(self) -> bool:
        """Whether there is anything to start."""
        named = self.python is not None or self.site is not None
        return named or importlib.util.find_spec("vllm") is not None


def measure_transformers(
    subject: Subject, plan: DocumentPlan, report: Callable[[str], None]
) -> list[DocumentRun]:
    """``model.generate`` with xgrammar's processor, greedy, one request at a time."""
    report("peers: transformers")
    items = json_documents(num_documents(plan, 1))
    vocabulary, prompts = _prompts(subject, items)
    arguments: dict[str, Any] = {"max_tokens": plan.max_tokens}
    run_transformers(subject.model, vocabulary, prompts[:2], items[:2], **arguments)
    run = run_transformers(subject.model, vocabulary, prompts, items, **arguments)
    counts = {"tokens": run.tokens, "forwards": run.tokens, "seconds": run.seconds}
    found = _measurement("transformers", items, _whole(run.texts, run.ended), counts)
    return [
        DocumentRun("transformers", 1, 0.0, found),
        DocumentRun("transformers prompt lookup", 1, 0.0, problem=LOOKUP_PROBLEM),
    ]


def measure_vllm(
    subject: Subject, plan: DocumentPlan, where: VllmEnvironment, report: Callable[[str], None]
) -> list[DocumentRun]:
    """vLLM plain, with n-grams and with the EAGLE-3 head, each in a process of its own.

    It loads the subject's folder, and needs the memory of the device that the caller holds: free
    that before. An engine that does not start is reported with the end of its log.
    """
    chosen = [m for m in VLLM_METHODS if not where.methods or m in where.methods]
    methods = [m for m in chosen if m != "eagle3" or subject.eagle3 is not None]
    cells = [(batch, t) for batch in plan.batches for t in plan.temperatures]
    if not where.is_there:
        problem = "vllm cannot be imported: pass --vllm-python or --vllm-site"
        return [DocumentRun("vllm", *cell, problem=problem) for cell in cells[:1]]
    runs: list[DocumentRun] = []
    for method in methods:
        report(f"peers: vllm {method}")
        result = start_vllm(vllm_plan(subject, plan, method, where), where, method)
        done: Sequence[dict[str, Any]] = result.get("cells", ())
        for (batch, temperature), cell in zip(cells, done, strict=False):
            items = json_documents(num_documents(plan, batch))
            found = vllm_measurement(f"vllm {method}", items, cell)
            refused = f"{len(cell['refused'])} refused" if cell["refused"] else None
            runs.append(DocumentRun(f"vllm {method}", batch, temperature, found, refused))
        problem = result.get("problem", "not reached")
        missing = cells[len(done) :]
        runs += [DocumentRun(f"vllm {method}", *cell, problem=problem) for cell in missing]
    return runs


def _prompts(subject: Subject, items: Sequence[WorkItem]) -> tuple[Vocabulary, list[list[int]]]:
    config: Any = subject.model.config.get_text_config(decoder=True)
    stop = end_of_text_ids(subject.model, subject.tokenizer)
    vocabulary = Vocabulary.from_tokenizer(subject.tokenizer, config.vocab_size, stop)
    limit = config.max_position_embeddings
    encoder = PromptEncoder(subject.tokenizer, config.vocab_size, limit)
    return vocabulary, [encoder.encode(item.prompt) for item in items]


def vllm_plan(
    subject: Subject, plan: DocumentPlan, method: str, where: VllmEnvironment
) -> dict[str, Any]:
    """What ``vllm_peer`` is to do: cells in the order of ``plan``'s batches and temperatures."""
    cells = []
    for batch in plan.batches:
        items = json_documents(num_documents(plan, batch))
        _, prompts = _prompts(subject, items)
        requests = [
            {"prompt_ids": ids, "max_tokens": plan.max_tokens, **vllm_grammar(item)}
            for ids, item in zip(prompts, items, strict=True)
        ]
        cells += [
            {"batch": batch, "temperature": temperature, "requests": requests}
            for temperature in plan.temperatures
        ]
    config: Any = subject.model.config.get_text_config(decoder=True)
    return {
        "model": subject.folder,
        "eagle3": subject.eagle3,
        "method": method,
        "num_draft_tokens": plan.num_draft_tokens,
        "max_model_len": min(2048, config.max_position_embeddings),
        "memory_share": where.memory_share,
        "cells": cells,
    }


def vllm_grammar(item: WorkItem) -> dict[str, str]:
    if item.grammar is None:
        return {}
    names = {"json_schema": "schema", "regex": "regex"}
    return {names[item.grammar.kind]: item.grammar.source}


def start_vllm(
    plan: Mapping[str, Any],
    where: VllmEnvironment,
    name: str,
    variables: Mapping[str, str] | None = None,
    path: Sequence[str] = (),
) -> dict[str, Any]:
    """Run ``vllm_peer``: its result, or what there is of one, with its ``problem``.

    name: of the log ``vllm_NAME.log`` and of the result beside it. variables: further ones of the
    environment. path: folders in front of ``where``'s site.
    """
    with tempfile.TemporaryDirectory() as scratch:
        asked = Path(scratch) / "plan.json"
        folder = where.logs or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        log, answer = folder / f"vllm_{name}.log", folder / f"vllm_{name}.json"
        answer.unlink(missing_ok=True)  # of an earlier run
        asked.write_text(json.dumps(plan), encoding="utf-8")
        # -P: the modules beside the script must not hide those that vLLM imports.
        script = [where.python or sys.executable, "-P", str(vllm_peer.__file__)]
        with log.open("w") as output:
            process = subprocess.Popen(
                [*script, str(asked), str(answer)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=vllm_environment(where, path) | dict(variables or {}),
                start_new_session=True,  # so that its own processes can be ended with it
            )
            code = _wait(process, where.limit)
        text = answer.read_text(encoding="utf-8") if answer.is_file() else "{}"
        result: dict[str, Any] = json.loads(text)
        if code != 0:
            tail = " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-TAIL:]
            result["problem"] = f"ended with {code}: {tail}"
    return result


def vllm_environment(where: VllmEnvironment, path: Sequence[str] = ()) -> dict[str, str]:
    """The variables of a process that runs vLLM. path: folders in front of ``where``'s site."""
    site = where.site if where.site is not None else os.environ.get("PYTHONPATH")
    path = [*path, *([site] if site else [])]
    return {**os.environ, **ENVIRONMENT, "PYTHONPATH": os.pathsep.join(path)}


def _wait(process: subprocess.Popen[bytes], limit: float) -> int:
    """Its exit status. Whatever ends the waiting ends the process and those that it started."""
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return end_group(process)
    except BaseException:  # Ctrl-C does not reach another session
        end_group(process)
        raise


def end_group(process: subprocess.Popen[bytes]) -> int:
    """Kill a process that began a session, and those that it started; its exit status."""
    os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def vllm_measurement(name: str, items: Sequence[WorkItem], cell: Mapping[str, Any]) -> Measurement:
    """One cell of ``vllm_peer``'s result.

    A forward writes one token of a request beside those it accepts: so forwards are counted.
    """
    answered = sum(text is not None for text in cell["texts"])
    accepted, tokens = cell["accepted"], cell["tokens"]
    counts = {
        "tokens": tokens,
        "seconds": cell["seconds"],
        "forwards": tokens - accepted,
        "drafted": cell["drafted"],
        "accepted": accepted,
        "failed": len(items) - answered,
    }
    texts = _whole(cell["texts"], cell["finished"])
    return _measurement(name, items, texts, counts)


def _whole(texts: Sequence[str | None], ended: Sequence[bool]) -> list[str | None]:
    return [text if whole else None for text, whole in zip(texts, ended, strict=True)]


def _measurement(
    name: str, items: Sequence[WorkItem], texts: Sequence[str | None], counts: dict[str, Any]
) -> Measurement:
    """``texts``: None for one that has not ended, which is not judged."""
    judged = [
        is_valid(text, item.grammar)
        for text, item in zip(texts, items, strict=True)
        if text is not None
    ]
    share = sum(judged) / len(judged) if judged else 1.0
    return Measurement(name, len(items), counts.pop("failed", 0), valid=share, **counts)
