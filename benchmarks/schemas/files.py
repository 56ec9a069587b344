"""Which schema files compile as they are: ``python -m benchmarks.schemas.files FILES_OR_FOLDERS``.

Each is compiled in a process of its own, as ``guided-spec check`` does, and then writes texts at
random, of which every row is timed. The files may refer to each other by their names and by their
``$id``.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.table import Table

from guided_spec.bundled import named_model
from guided_spec.cli.console import failures_as_messages, stdout
from guided_spec.errors import ConfigError, GrammarCompileError
from guided_spec.grammar.backends.auto import BackendChoice
from guided_spec.grammar.protocol import CompiledGrammar, GrammarBackend
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.grammar.vocabulary import Vocabulary
from guided_spec.models.tokenizer import load_tokenizer
from guided_spec.ops.mask_words import num_mask_words

_WALKS, _LONGEST = 2, 200  # texts of each file, and tokens of one
_GIGABYTE = 2**30


class FileVerdict(NamedTuple):
    """What became of one file.

    outcome: "compiles", or what was raised. seconds: of CPU, of reading and compiling it. row_p99:
    seconds of a row of the mask; None where it did not compile.
    """

    name: str
    kilobytes: float
    outcome: str
    reason: str
    backend: str
    seconds: float
    row_p99: float | None = None


def main(  # noqa: PLR0913 - the options of a command
    paths: Annotated[list[Path], typer.Argument(help="JSON schema files, or folders of them.")],
    tokenizer: Annotated[str | None, typer.Option(help="Hub id or folder of a model.")] = None,
    draw: Annotated[int | None, typer.Option(help="So many files, drawn at random.")] = None,
    seed: Annotated[int, typer.Option(help="Of that draw.")] = 0,
    additional_properties: Annotated[
        str, typer.Option(help="closed, or schema: see GrammarSpec.")
    ] = "closed",
    beside: Annotated[
        Path | None, typer.Option(help="A folder of more files, to which these may refer.")
    ] = None,
    max_seconds: Annotated[float, typer.Option(help="Of CPU for one file.")] = 30.0,
    output: Annotated[Path | None, typer.Option(help="JSON lines, one for each file.")] = None,
) -> None:
    """A table with a line for each file, and how many compile."""
    with failures_as_messages():
        files = sorted(_files(paths))
        drawn = files if draw is None else sorted(random.Random(seed).sample(files, draw))  # noqa: S311
        others = [] if beside is None else sorted(_files([beside]))
        resources = {name: part for file in [*others, *files] for name, part in _named(file)}
        loaded = load_tokenizer(named_model(tokenizer))
        vocabulary = Vocabulary.from_tokenizer(loaded, len(loaded), [loaded.eos_token_id or 0])
    backend = BackendChoice("auto", vocabulary)
    for pattern in ("a", "a{2,200}"):  # of which each backend, made when first asked, takes one
        backend.compile(GrammarSpec.regex(pattern))
    verdicts = []
    for file in drawn:
        settings = {"additional_properties": additional_properties, "resources": resources}
        verdicts.append(judge(file, backend, settings, max_seconds))
        if output is not None:
            lines = [json.dumps(verdict._asdict()) for verdict in verdicts]
            output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    stdout().print(_table(verdicts))
    counts = Counter(verdict.outcome for verdict in verdicts)
    stdout().print(", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()))


def _files(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise ConfigError("paths", str(path), "must be JSON schema files, or folders of them")
        yield from path.rglob("*.json") if path.is_dir() else [path]


def _named(file: Path) -> Iterator[tuple[str, Any]]:
    """The schema by the name of its file, and by its URI where it has one."""
    schema = _read(file)
    if isinstance(schema, dict):
        yield file.name, schema
    for key in ("$id", "id") if isinstance(schema, dict) else ():
        if isinstance(schema.get(key), str) and schema[key].strip("#"):
            yield schema[key].removesuffix("#"), schema


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8-sig"))
    except ValueError:
        return None


def judge(
    file: Path, backend: GrammarBackend, settings: Mapping[str, Any], max_seconds: float
) -> FileVerdict:
    """Compile one file in a process with bounds of CPU time and of memory."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_judge, args=(file, backend, settings, max_seconds, sender))
    process.start()
    sender.close()
    kilobytes = file.stat().st_size / 1000
    try:
        verdict: FileVerdict = receiver.recv()
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGXCPU:
            raise RuntimeError(f"{file}: it ended with {process.exitcode}") from None
        reason = f"beyond {max_seconds:g} s of CPU"
        verdict = FileVerdict(file.stem, kilobytes, "too dear", reason, "", max_seconds)
    process.join()
    return verdict


def _judge(
    file: Path,
    backend: GrammarBackend,
    settings: Mapping[str, Any],
    max_seconds: float,
    sender: Connection,
) -> None:
    spent = int(time.process_time() + max_seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (spent, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_AS, (_size() + 4 * _GIGABYTE,) * 2)
    started = time.process_time()
    outcome, reason, compiled = "compiles", "", None
    try:
        text = file.read_text(encoding="utf-8-sig")
        compiled = backend.compile(GrammarSpec.json_schema(text, **settings))
    except (GrammarCompileError, MemoryError) as error:
        outcome, reason = type(error).__name__, str(error)
    seconds = time.process_time() - started
    name = getattr(compiled, "backend", "") if compiled is not None else ""
    verdict = FileVerdict(
        file.stem, file.stat().st_size / 1000, outcome, reason, name, seconds, None
    )
    if compiled is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)
        verdict = verdict._replace(row_p99=_row_p99(compiled, backend.vocabulary))
    sender.send(verdict)


def _size() -> int:
    """Bytes of address space in use."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    return pages * resource.getpagesize()


def _row_p99(compiled: CompiledGrammar, vocabulary: Vocabulary) -> float:
    """Of all rows of a few texts at random, of which every second token is one of JSON's signs."""
    times: list[float] = []
    row = np.zeros((1, num_mask_words(vocabulary.vocab_size)), dtype=np.int32)
    signs = vocabulary.single_byte_ids[list(b'",:]}{[0123456789 tfn')]
    for seed in range(_WALKS):
        text, rng = compiled.new_matcher(), np.random.default_rng(seed)
        while len(times) < _LONGEST * (seed + 1):
            started = time.thread_time()
            text.fill_next_token_bitmask(row)
            times.append(time.thread_time() - started)
            bits = np.unpackbits(row.view(np.uint8), bitorder="little")
            legal = np.flatnonzero(bits[: vocabulary.vocab_size])
            plain = np.intersect1d(legal, signs)
            legal = plain if len(plain) and rng.random() < 0.5 else legal
            if not text.accept_token(int(rng.choice(legal))) or text.is_terminated():
                break
    return float(np.quantile(times, 0.99))


def _table(verdicts: list[FileVerdict]) -> Table:
    table = Table("file", "kB", "verdict", "backend", "compile, CPU s", "row p99, ms", "reason")
    for one in verdicts:
        row = "" if one.row_p99 is None else f"{one.row_p99 * 1e3:.2f}"
        reason = one.reason.replace("\n", " ")[:160]
        seconds = f"{one.seconds:.2f}"
        table.add_row(
            one.name, f"{one.kilobytes:.0f}", one.outcome, one.backend, seconds, row, reason
        )
    return table


if __name__ == "__main__":
    typer.run(main)
