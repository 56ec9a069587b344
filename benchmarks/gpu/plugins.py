"""vLLM with this package's plugin off and on: the same documents, each configuration by itself."""

from __future__ import annotations

import importlib.metadata
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from benchmarks.gpu.documents import DocumentPlan, DocumentRun, num_documents
from benchmarks.gpu.peers import VllmEnvironment, start_vllm, vllm_measurement, vllm_plan
from benchmarks.gpu.plugins_worker import WORKER_EXTENSION
from benchmarks.gpu.subject import Subject, json_documents
from guided_spec.errors import ConfigError
from guided_spec.integrations.vllm.plugin import FEATURES, VARIABLE
from guided_spec.models.tokenizer import load_tokenizer

METHODS = ("none", "ngram", "eagle3", "guided")
OPTIONS = ("sampled", "sync", "v1")
CONFIGURATIONS = (
    "none",
    "ngram",
    "guided",
    "eagle3",
    "eagle3+drafts",
    "eagle3+exact+schemas",
    "eagle3:sampled",
    "eagle3:sampled+exact",
)
ENTRY_POINTS = "[vllm.general_plugins]\nguided_spec = guided_spec.integrations.vllm:register\n"
SOURCES = Path(__file__).resolve().parents[2]
PACKAGES = ("guided_spec", "benchmarks")  # of them; the second has the worker's extension


class Configuration(NamedTuple):
    """One way to run vLLM, written ``METHOD[:OPTION...][+FEATURE...]``.

    method: "none", "ngram", "eagle3", or "guided", the plugin's own proposer.
    options: "sampled" lets the draft head sample, "sync" turns asynchronous scheduling off, "v1"
    takes the older model runner. features: of the plugin, what ``GUIDED_SPEC_VLLM`` names.
    """

    method: str
    options: tuple[str, ...] = ()
    features: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Configuration:
        """Raises ConfigError for a name that is not known."""
        head, *features = text.split("+")
        method, *options = head.split(":")
        known = {METHODS: [method], OPTIONS: options, tuple(FEATURES): features}
        for names, given in known.items():
            for name in given:
                if name not in names:
                    fix = f"METHOD[:OPTION...][+FEATURE...]: {name!r} must be of {', '.join(names)}"
                    raise ConfigError("vllm_methods", text, fix)
        return cls(method, tuple(options), tuple(features))

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment. A switch that is off is set too: the shell may have it on."""
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if "v1" in self.options else {}
        return {VARIABLE: ",".join(self.features), **runner}

    @property
    def arguments(self) -> dict[str, dict[str, Any]]:
        """Fields of ``vllm_peer``'s plan."""
        engine: dict[str, Any] = {"worker_extension_cls": WORKER_EXTENSION}
        if "sync" in self.options:
            engine["async_scheduling"] = False
        sampled = {"draft_sample_method": "probabilistic"} if "sampled" in self.options else {}
        return {"engine": engine, "speculative": sampled}


@dataclass(frozen=True, slots=True)
class PluginRun:
    """One configuration on one workload.

    run: as for other engines. drafts: how often vLLM verified a draft, by its own counters; None
    without a measurement. finished: texts that ended by themselves, which are those judged.
    engine: what its process says: load_seconds, packages, and plugin (see ``vllm_peer``).
    """

    run: DocumentRun
    drafts: int | None
    finished: int | None
    engine: Mapping[str, Any]

    @property
    def mean_draft_length(self) -> float | None:
        """Tokens that a verified draft brought with the one behind it: vLLM's acceptance length.

        Steps without a draft are left out, unlike in ``acceptance_length``. None without drafts.
        """
        if self.run.measurement is None or not self.drafts:
            return None
        return 1 + self.run.measurement.accepted / self.drafts

    def as_dict(self) -> dict[str, Any]:
        """Every field, for JSON."""
        own = {"drafts": self.drafts, "finished": self.finished, "vllm": dict(self.engine)}
        return self.run.as_dict() | own | {"mean_draft_length": self.mean_draft_length}


def measure_plugins(
    subject: Subject, plan: DocumentPlan, where: VllmEnvironment, report: Callable[[str], None]
) -> Iterator[list[PluginRun]]:
    """The runs of one configuration after another, as each of them ends.

    ``where.methods`` names them, ``CONFIGURATIONS`` if empty; all are read before anything starts.
    The plugin is that of this package, whatever ``where`` has installed. Memory of the device that
    the caller holds is missing to vLLM. Raises ConfigError for a configuration that is not known.
    """
    names = where.methods or CONFIGURATIONS
    configurations = {name: Configuration.parse(name) for name in names}
    if not where.is_there:
        problem = "vllm cannot be imported: pass --vllm-python or --vllm-site"
        missing = DocumentRun("vllm", plan.batches[0], plan.temperatures[0], problem=problem)
        yield [PluginRun(missing, None, None, {})]
        return
    for name, configuration in configurations.items():
        if configuration.method == "eagle3" and subject.eagle3 is None:
            continue
        report(f"plugins: vllm {name}")
        asked = vllm_plan(subject, plan, configuration.method, where) | configuration.arguments
        label = re.sub(r"[^A-Za-z0-9]+", "-", name)
        with tempfile.TemporaryDirectory() as folder:
            install_beside(Path(folder))
            found = start_vllm(asked, where, label, configuration.variables, [folder])
        yield list(_runs(f"vllm {name}", plan, found))


def install_beside(folder: Path) -> None:
    """Make ``folder`` one to import guided_spec from, with the plugin's entry point.

    The package may be used from its sources, and by an interpreter that has not installed it:
    importlib.metadata knows of neither.
    """
    for name in PACKAGES:
        (folder / name).symlink_to(SOURCES / name, target_is_directory=True)
    try:
        version = importlib.metadata.version("guided-spec")
    except importlib.metadata.PackageNotFoundError:
        version = "0"
    metadata = folder / f"guided_spec-{version}.dist-info"
    metadata.mkdir()
    head = f"Metadata-Version: 2.1\nName: guided-spec\nVersion: {version}\n"
    (metadata / "METADATA").write_text(head, encoding="utf-8")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS, encoding="utf-8")


def load_outline(folder: str, eagle3: str | None) -> Subject:
    """A subject whose model is on the meta device: all that other processes' plans need."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    if (Path(folder) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return Subject(model, load_tokenizer(folder), folder, eagle3)


def _runs(engine: str, plan: DocumentPlan, found: Mapping[str, Any]) -> Iterator[PluginRun]:
    about = {key: found.get(key) for key in ("load_seconds", "packages", "plugin")}
    cells = [(batch, t) for batch in plan.batches for t in plan.temperatures]
    done: Sequence[Mapping[str, Any]] = found.get("cells", ())
    for (batch, temperature), cell in zip(cells, done, strict=False):
        items = json_documents(num_documents(plan, batch))
        measured = vllm_measurement(engine, items, cell)
        refused = f"{len(cell['refused'])} refused" if cell["refused"] else None
        run = DocumentRun(engine, batch, temperature, measured, refused)
        yield PluginRun(run, cell["drafts"], sum(cell["finished"]), about)
    problem = found.get("problem", "not reached")
    for batch, temperature in cells[len(done) :]:
        run = DocumentRun(engine, batch, temperature, problem=problem)
        yield PluginRun(run, None, None, about)
