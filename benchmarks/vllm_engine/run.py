"""``python -m benchmarks.vllm_engine``: ``LLM(engine="vllm")`` beside vLLM used directly.

The same requests, documents and free text mixed, with the same EAGLE-3 head and the same settings:
vLLM without the plugin, with its ``drafts``, with ``forced``, ``tables`` and ``graphs`` besides,
with all that ``LLM(engine="vllm")`` has on, and that itself. The last one ends with a soak, some of
whose requests are cancelled. With ``--in-turn`` the engines of all ways are there at once, and one
run of each comes behind one of the other: on a shared host, two ways are compared only so.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any, NamedTuple

import typer
from rich.table import Table

from benchmarks.gpu.peers import VllmEnvironment, end_group, vllm_environment
from benchmarks.gpu.plugins import install_beside, load_outline
from benchmarks.gpu.run import GpuPlan, folders
from benchmarks.gpu.subject import Subject, json_documents
from benchmarks.turns import Turns
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.errors import ConfigError
from guided_spec.evaluate.measurement import is_valid
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.integrations.vllm.plugin import RAY_VARIABLE, VARIABLE
from guided_spec.models.heads.loading import find_method

FREE_TOKENS = 64
NUM_DRAFT = 5
TAIL = 800


class Way(NamedTuple):
    """name: in the table. way: of the child's plan. features: of the plugin, where that is not the
    child's own choice."""

    name: str
    way: str
    features: str


WAYS = {
    "off": Way("vLLM", "direct", ""),
    "drafts": Way("vLLM, drafts", "direct", "drafts"),
    "forced": Way("vLLM, forced", "direct", "drafts,forced"),
    "tables": Way("vLLM, forced and tables", "direct", "drafts,forced,tables"),
    "graphs": Way("vLLM, graphs", "direct", "graphs"),
    "fast": Way("vLLM, for speed", "direct", "drafts,forced,graphs,tables"),
    "all": Way("vLLM, as LLM has it", "direct", "counts,drafts,endings,forced,graphs,tables"),
    "llm": Way("LLM(engine='vllm')", "llm", ""),
}


class Row(NamedTuple):
    """One way at one batch size and temperature: the best of its runs.

    spread: by which share of it the slowest run was slower. against: tokens per second over those
    of vLLM with the same features, run by run, the median. valid: share of the documents that were
    not cut off. same_free: share of the free texts with the tokens of vLLM's,
    which they need not have where tokens are sampled.
    """

    name: str
    batch: int
    temperature: float
    tokens_per_second: float
    spread: float
    against: float | None
    valid: float
    same_free: float
    failed: int


class Soak(NamedTuple):
    """What came of requests of which some were cancelled. same_free: as of a row."""

    requests: int
    cancelled: int
    failed: int
    valid: float
    same_free: float
    seconds: float


def make_requests(
    encode: Callable[[str], list[int]], count: int, max_tokens: int, free_every: int = 3
) -> list[dict[str, Any]]:
    """Held-out documents; of so many, one prompt has free text behind it. 0: none has."""
    found = []
    for at, item in enumerate(json_documents(count)):
        is_free = free_every > 0 and at % free_every == free_every - 1
        assert item.grammar is not None
        schema = None if is_free else json.loads(item.grammar.source)
        tokens = FREE_TOKENS if is_free else max_tokens
        found.append({"prompt_ids": encode(item.prompt), "schema": schema, "max_tokens": tokens})
    return found


def rows(results: Mapping[str, Mapping[str, Any]], requests: Sequence[Any]) -> list[Row]:
    """What the children wrote, by the names of the ways."""
    found: list[Row] = []
    first = _by_size(results.get(WAYS["off"].name, {}))
    same = _by_size(results.get(WAYS["all"].name, {}))
    for name, result in results.items():
        for size, cells in _by_size(result).items():
            speeds = _speeds(cells)
            speed = max(speeds)
            has_same = name == WAYS["llm"].name and size in same
            against = _against(speeds, _speeds(same[size])) if has_same else None
            answers = cells[0]["answers"]
            free = first[size][-1]["answers"] if size in first else answers
            asked = [*requests[: cells[0]["lap"]]] * (len(answers) // cells[0]["lap"])
            found.append(
                Row(
                    name,
                    *size,
                    round(speed, 1),
                    round(1 - min(speeds) / speed, 3),
                    against,
                    _valid(answers, asked),
                    _same_free(answers, free, asked),
                    sum(one["error"] is not None for one in answers),
                )
            )
    return found


def judge_soak(
    soak: Mapping[str, Any], free: Sequence[Any], requests: Sequence[Mapping[str, Any]]
) -> Soak:
    """free: answers of vLLM without the plugin, to the first of the requests."""
    answers = soak["answers"]
    places = [at % len(requests) for at in range(len(answers))]
    kept = [(one, at) for one, at in zip(answers, places, strict=True) if not one["cancelled"]]
    known = [(one, at) for one, at in kept if at < len(free)]
    return Soak(
        requests=len(answers),
        cancelled=len(answers) - len(kept),
        failed=sum(one["error"] is not None for one, _ in kept),
        valid=_valid([one for one, _ in kept], [requests[at] for _, at in kept]),
        same_free=_same_free(
            [one for one, _ in known],
            [free[at] for _, at in known],
            [requests[at] for _, at in known],
        ),
        seconds=round(soak["seconds"], 1),
    )


def _by_size(result: Mapping[str, Any]) -> dict[tuple[int, float], list[Mapping[str, Any]]]:
    """The cells by batch size and temperature."""
    found: dict[tuple[int, float], list[Mapping[str, Any]]] = {}
    for cell in result.get("cells", ()):
        found.setdefault((cell["batch"], cell["temperature"]), []).append(cell)
    return found


def _speeds(cells: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(cell["tokens"] / cell["seconds"]) for cell in cells]


def _against(speeds: Sequence[float], others: Sequence[float]) -> float:
    """How many times as fast, run by run: those of one number were near each other in time."""
    pairs = zip(speeds, others, strict=False)
    return round(statistics.median(speed / other for speed, other in pairs), 3)


def _valid(answers: Sequence[Mapping[str, Any]], requests: Sequence[Mapping[str, Any]]) -> float:
    """A document that was cut off by its budget is none."""
    judged = [
        is_valid(answer["text"], GrammarSpec.json_schema(request["schema"]))
        for answer, request in zip(answers, requests, strict=False)
        if request["schema"] is not None and len(answer["token_ids"]) < request["max_tokens"]
    ]
    return round(sum(judged) / len(judged), 4) if judged else 0.0


def _same_free(
    answers: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]],
    requests: Sequence[Mapping[str, Any]],
) -> float:
    same = [
        list(one["token_ids"]) == list(other["token_ids"])
        for one, other, request in zip(answers, others, requests, strict=False)
        if request["schema"] is None
    ]
    return round(sum(same) / len(same), 4) if same else 0.0


class Child(NamedTuple):
    """Where a way is run. front: folders before ``where``'s site. devices: empty are all. cache:
    of those that run at the same time, which must not write one; empty is vLLM's own."""

    where: VllmEnvironment
    front: Sequence[str]
    logs: Path
    devices: str = ""
    cache: str = ""

    @property
    def variables(self) -> dict[str, str]:
        """With the plugin's own variable, vLLM would compile its graphs a second time."""
        own = {RAY_VARIABLE: VARIABLE}
        if self.devices:
            own["CUDA_VISIBLE_DEVICES"] = self.devices
        if self.cache:
            own["VLLM_CACHE_ROOT"] = str(Path(tempfile.gettempdir()) / f"vllm_cache_{self.cache}")
        return own


def _run(plan: Mapping[str, Any], way: Way, child: Child) -> dict[str, Any]:
    """One child; its result, with the ``problem`` where it failed."""
    where = child.where
    label = "".join(letter if letter.isalnum() else "-" for letter in way.name)
    with tempfile.TemporaryDirectory() as folder:
        install_beside(Path(folder))
        asked, answer = Path(folder) / "plan.json", Path(folder) / "result.json"
        turns = _turns(plan, way, Path(folder))
        own = {"way": way.way, "name": way.name, "turns": str(turns.folder)}
        asked.write_text(json.dumps({**plan, **own}), encoding="utf-8")
        environment = vllm_environment(where, [folder, *child.front]) | child.variables
        environment[VARIABLE] = way.features
        command = [where.python or sys.executable, "-P", "-m", "benchmarks.vllm_engine.child"]
        log = child.logs / f"vllm_engine_{label}.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command, str(asked), str(answer)],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
            try:
                code = process.wait(where.limit)
            except subprocess.TimeoutExpired:
                code = end_group(process)
            finally:
                turns.leave()
        found: dict[str, Any] = json.loads(answer.read_text()) if answer.is_file() else {}
        if code != 0:
            found["problem"] = log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
    return found


@contextmanager
def _shared_turns(ways: Sequence[Way]) -> Iterator[str | None]:
    """The folder in which these ways take turns; None for none."""
    with tempfile.TemporaryDirectory() as folder:
        Turns.begin(Path(folder), [way.name for way in ways])
        yield folder if ways else None


def _turns(plan: Mapping[str, Any], way: Way, own: Path) -> Turns:
    """own: a folder for a way that takes turns with nobody."""
    if plan["turns"] is None:
        Turns.begin(own, [way.name])
    return Turns(Path(plan["turns"] or own), way.name)


InTurn = Annotated[
    bool, typer.Option("--in-turn", help="All ways at once, run by run: lower --memory-share.")
]
app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def main(  # noqa: PLR0913 - the options of a command
    model: Annotated[str | None, typer.Option(help="Folder; default: the widened model.")] = None,
    eagle3: Annotated[str | None, typer.Option(help="Folder of it, or of a DFlash head.")] = None,
    work: Annotated[Path | None, typer.Option(help="Where the widened model is kept.")] = None,
    vllm_site: Annotated[str | None, typer.Option(help="Folder that vLLM is in.")] = None,
    packages: Annotated[
        str | None, typer.Option(help="Folders in front of the site; default: this interpreter's.")
    ] = None,
    vllm_python: Annotated[str | None, typer.Option(help="Interpreter that has vLLM.")] = None,
    ways: Annotated[str, typer.Option(help=f"Of {','.join(WAYS)}.")] = "off,all,llm",
    batches: Annotated[str, typer.Option(help="Requests at a time.")] = "1,8,64",
    temperatures: Annotated[str, typer.Option(help="Each batch is run at all of them.")] = "0",
    tensor_parallel: Annotated[int, typer.Option(help="Devices that the model is split over.")] = 1,
    devices: Annotated[str, typer.Option(help="'0 1' runs two ways at a time, '0,1' one.")] = "",
    in_turn: InTurn = False,  # noqa: FBT002
    repeats: Annotated[int, typer.Option(help="Runs of each batch; the best one counts.")] = 2,
    laps: Annotated[int, typer.Option(help="How often a run asks for each of its requests.")] = 4,
    settle: Annotated[float, typer.Option(help="Seconds behind a warm-up, for tables.")] = 0.0,
    soak: Annotated[int, typer.Option(help="Requests of the soak.")] = 1000,
    free_every: Annotated[int, typer.Option(help="One of so many is free text; 0: none.")] = 3,
    max_tokens: Annotated[int, typer.Option(help="Tokens per document at most.")] = 160,
    memory_share: Annotated[float, typer.Option(help="Of the device, for vLLM.")] = 0.75,
    limit: Annotated[float, typer.Option(help="Seconds for each way.")] = 300.0,
    logs: Annotated[Path, typer.Option(help="Folder for vLLM's output.")] = Path(),
    output: Annotated[Path | None, typer.Option(help="Write the figures here as JSON.")] = None,
) -> None:
    """Tokens per second of vLLM, with its drafts kept to grammars, and of LLM(engine="vllm")."""
    where = _require_vllm(VllmEnvironment(vllm_python, vllm_site, memory_share, limit=limit))
    chosen = [_way(name) for name in ways.split(",")]
    children = _children(where, packages, logs, devices, len(chosen) if in_turn else 0)
    sizes, engine = _numbers(int, batches), {"tensor_parallel_size": tensor_parallel}
    own: dict[str, Any] = {"repeats": repeats, "laps": laps, "settle": settle, "soak": soak}
    own |= {"temperatures": _numbers(float, temperatures), "engine": engine}
    with (
        failures_as_messages(),
        folders(GpuPlan(model=model, eagle3=eagle3, work=work), stdout().print) as paths,
        _shared_turns(chosen if in_turn else ()) as own["turns"],
    ):
        subject = load_outline(*paths)
        own["requests"] = make_requests(_encoder(subject), _count(sizes), max_tokens, free_every)
        _run_all(_plan(subject, sizes, memory_share) | own, chosen, children, output)


def _run_all(
    plan: Mapping[str, Any], ways: Sequence[Way], children: Sequence[Child], output: Path | None
) -> None:
    """A way at a time in each child's place; the table is printed and written behind each."""
    results: dict[str, dict[str, Any]] = {}
    free = SimpleQueue[Child]()

    def run(way: Way) -> dict[str, Any]:
        child = free.get()
        try:
            return _run({**plan, "soak": plan["soak"] if way.way == "llm" else 0}, way, child)
        finally:
            free.put(child)

    for child in children:
        free.put(child)
    with ThreadPoolExecutor(len(children)) as pool:
        running = {pool.submit(run, way): way.name for way in ways}
        for done in as_completed(running):
            results[running[done]] = done.result()
            if problem := done.result().get("problem"):
                stdout().print(problem, markup=False)
            ended = {way.name: results[way.name] for way in ways if way.name in results}
            _report(ended, plan["requests"], output)


def _children(
    where: VllmEnvironment, packages: str | None, logs: Path, devices: str, together: int
) -> list[Child]:
    """together: how many are there at once on all of the devices; 0: one in each place."""
    places = [devices] * together if together else devices.split() or [""]
    # This interpreter's own packages come before the site's: xgrammar among them.
    own = sysconfig.get_path("purelib") if where.python is None else ""
    front = [one for one in (packages or own).split(os.pathsep) if one]
    caches = [str(at) if len(places) > 1 else "" for at in range(len(places))]
    return [
        Child(where, front, logs, one, cache) for one, cache in zip(places, caches, strict=True)
    ]


def _count(batches: Sequence[int]) -> int:
    """Requests: several turns of the largest batch."""
    return max(12, 3 * max(batches))


def _numbers(kind: Callable[[str], Any], written: str) -> list[Any]:
    return [kind(one) for one in written.split(",")]


def _require_vllm(where: VllmEnvironment) -> VllmEnvironment:
    if not where.is_there:
        raise ConfigError("vllm_site", None, "vllm cannot be imported: pass it, or --vllm-python")
    return where


def _way(name: str) -> Way:
    if name not in WAYS:
        raise ConfigError("ways", name, f"must be of {', '.join(WAYS)}")
    return WAYS[name]


def _encoder(subject: Subject) -> Callable[[str], list[int]]:
    return lambda text: list(subject.tokenizer(text)["input_ids"])


def _plan(subject: Subject, batches: Sequence[int], memory_share: float) -> dict[str, Any]:
    """Of a child, but for its way and what it is to write."""
    config: Any = subject.model.config.get_text_config(decoder=True)
    return {
        "model": subject.folder,
        "eagle3": subject.eagle3,
        "method": find_method(subject.eagle3, subject.model),
        "num_draft_tokens": NUM_DRAFT,
        "max_model_len": min(2048, config.max_position_embeddings),
        "memory_share": memory_share,
        "batches": batches,
    }


def _report(
    results: Mapping[str, Mapping[str, Any]], requests: Sequence[Any], output: Path | None
) -> None:
    found = rows(results, requests)
    table = Table(*Row._fields)
    for row in found:
        table.add_row(*("" if value is None else str(value) for value in row))
    stdout().print(table)
    record: dict[str, Any] = {"rows": [row._asdict() for row in found]}
    last = results.get(WAYS["llm"].name, {})
    cells = results.get(WAYS["off"].name, {}).get("cells", ())
    greedy = [cell["answers"][: cell["lap"]] for cell in cells if cell["temperature"] == 0]
    if last.get("soak") is not None:
        judged = judge_soak(last["soak"], greedy[-1] if greedy else (), requests)
        record["soak"] = judged._asdict()
        stdout().print(judged)
    record |= {name: {k: v for k, v in one.items() if k not in ("cells", "soak")}
               for name, one in results.items()}  # fmt: skip
    if output is not None:
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    app()
