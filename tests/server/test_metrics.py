"""Counters say what has happened."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from guided_spec.engine.llm import LLM
from guided_spec.engine.outputs import Completion
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.server.metrics import Metrics
from guided_spec.types import SamplingParams
from tests.docs.pages import ROOT
from tests.server.running import ASK, LONG, Contact, Running, running, until

SCHEMA = {"name": "contact", "schema": Contact.model_json_schema()}
DASHBOARD = ROOT / "examples" / "serve" / "grafana.json"


def total(found: dict[str, float], name: str) -> float:
    """Over all labels."""
    return sum(value for key, value in found.items() if key.startswith(f"{name}{{"))


def by_place(found: dict[str, float], what: str) -> list[float]:
    """Tokens at each position of a draft."""
    longest = sum(name.startswith(f"{what}_at_total{{") for name in found)
    return [found[f"{what}_at_total{{{place}}}"] for place in range(1, longest + 1)]


def test_counters(llm: LLM) -> None:
    form = {"type": "json_schema", "json_schema": SCHEMA}
    body: dict[str, Any] = {"messages": ASK, "n": 2}
    with running(llm) as fresh:
        usages = [
            fresh.post("/v1/chat/completions", {**body, "response_format": form}).json()["usage"],
            fresh.post("/v1/completions", {"prompt": ["The", "name"]}).json()["usage"],
        ]
        assert fresh.post("/v1/completions", {"prompt": 3}).status_code == 400
        assert fresh.post("/nowhere", {}).status_code == 404
        found = {
            name.removeprefix("guided_spec_"): value for name, value in fresh.metrics().items()
        }
    prompt, output = (
        sum(usage[f"{kind}_tokens"] for usage in usages) for kind in ("prompt", "completion")
    )
    assert found["prompt_tokens_total"] == prompt
    assert found["output_tokens_total"] == output
    assert found["requests_total{/v1/chat/completions,200}"] == 1
    assert found["requests_total{/v1/completions,200}"] == 1
    assert found["requests_total{/v1/completions,400}"] == 1
    assert found["requests_total{other,404}"] == 1
    assert found["samples_total{stop}"] + found["samples_total{length}"] == 4
    assert found["time_to_first_token_seconds_count"] == 4
    assert 0 < found["time_between_tokens_seconds_count"] < output
    assert found["request_seconds_count{/v1/chat/completions}"] == 1
    kinds = {"forced", "constrained", "reasoning", "free"}
    for kind in kinds - {"reasoning"}:
        accepted = found[f"accepted_tokens_total{{{kind}}}"]
        assert 0 < accepted <= found[f"drafted_tokens_total{{{kind}}}"]
    assert found["drafted_tokens_total{reasoning}"] == 0
    assert found["steps_total"] + total(found, "accepted_tokens_total") >= output
    for what in ("drafted", "accepted"):
        places = by_place(found, what)
        assert places == sorted(places, reverse=True), "what is drafted at 2 is drafted at 1"
        assert sum(places) == total(found, f"{what}_tokens_total")
    assert found["mask_seconds_total"] > 0
    assert found["starved_rows_total"] == 0
    assert (found["slots"], found["running_samples"], found["waiting_samples"]) == (4, 0, 0)
    assert (found["blocks"], found["used_blocks"]) == (llm.load.num_blocks, 0)


def test_stats_are_those_of_the_engine(llm: LLM, served: Running) -> None:
    """What one request adds is what the engine says of the same text."""
    stats = llm.chat(ASK, response_format={"type": "json_schema", "json_schema": SCHEMA}).completion
    one = stats.stats
    expected = {"steps_total": one.steps, "output_tokens_total": one.output_tokens}
    for what, counts, forced in (
        ("drafted", one.drafted, one.forced),
        ("accepted", one.accepted, one.forced_accepted),
    ):
        expected[f"{what}_tokens_total{{forced}}"] = forced
        expected[f"{what}_tokens_total{{constrained}}"] = sum(counts) - forced
        places = enumerate(counts, 1)
        expected |= {f"{what}_at_total{{{place}}}": count for place, count in places}
    before = served.metrics()
    form = {"type": "json_schema", "json_schema": SCHEMA}
    served.post("/v1/chat/completions", {"messages": ASK, "response_format": form})
    after = served.metrics()
    names = {name: f"guided_spec_{name}" for name in expected}
    added = {name: after[full] - before.get(full, 0) for name, full in names.items()}
    assert added == expected


def test_blocks_are_told() -> None:
    with (
        LLM(proposer="none", kernels="packed", max_model_len=1024, max_batch_size=2) as packed,
        running(packed) as served,
    ):
        assert served.metrics()["guided_spec_blocks"] == packed.load.num_blocks > 2
        for _ in packed.stream("Hello", SamplingParams(**LONG)):
            assert 0 < served.metrics()["guided_spec_used_blocks"] < packed.load.num_blocks
            break  # which ends the text
        until(lambda: served.metrics()["guided_spec_used_blocks"] == 0)


def test_drafts_of_reasoning_are_counted_apart(llm: LLM) -> None:
    """Those before the marker, and nothing of them elsewhere."""
    spec = GrammarSpec.choice(["yes", "no"]).after("=", reasoning_budget=8)
    stats = llm.generate("A", SamplingParams(grammar=spec, max_tokens=20))[0].stats
    assert 0 < stats.reasoning < sum(stats.drafted)
    metrics = Metrics(lambda: llm.load)
    metrics.count_sample(Completion("", [], "stop", None, stats, grammar=spec))
    lines = metrics.text().decode().splitlines()
    for what, counts in (("drafted", stats.drafted), ("accepted", stats.accepted)):
        found = dict(line.rsplit(" ", 1) for line in lines if f"{what}_tokens_total{{" in line)
        assert sum(map(float, found.values())) == sum(counts)
    name = 'guided_spec_drafted_tokens_total{kind="reasoning"}'
    assert f"{name} {float(stats.reasoning)}" in lines


def test_the_page_names_all_metrics(served: Running) -> None:
    served.require_service()
    known = {name.partition("{")[0] for name in served.metrics()}
    named = {
        *re.findall(r"\bguided_spec_[a-z_]+", (ROOT / "docs" / "serve_reference.md").read_text())
    }
    histograms = {name.removesuffix("_bucket") for name in known if name.endswith("_bucket")}
    assert named - known - histograms == set()
    derived = re.compile("_(created|bucket|count|sum)$")
    everything = {name for name in known if not derived.search(name)} | histograms
    assert everything - named == set()


def test_the_dashboard_asks_for_what_there_is(served: Running) -> None:
    """Every series and label of its queries; rates of counters, quantiles of histograms alone."""
    served.require_service()
    families = [*text_string_to_metric_families(httpx.get(f"{served.url}/metrics").text)]
    samples = [(family.type, sample) for family in families for sample in family.samples]
    labels = {sample.name: {*sample.labels} for _, sample in samples}
    counted = {sample.name for kind, sample in samples if kind in ("counter", "histogram")}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [(panel, target["expr"]) for panel in panels for target in panel["targets"]]
    for panel, query in queries:
        names = {*re.findall(r"\bguided_spec_\w+", query)}
        assert names
        assert names <= labels.keys(), query
        rates = {*re.findall(r"rate\((guided_spec_\w+)\[\$__rate_interval\]\)", query)}
        assert rates == names & counted, query
        assert ("histogram_quantile" in query) == any(name.endswith("_bucket") for name in names)
        grouped = re.findall(r"by \(([\w, ]+)\)", query)
        for name in names:
            assert {*", ".join(grouped).split(", ")} - {""} <= labels[name], query
        legends = " ".join(target["legendFormat"] for target in panel["targets"])
        assert {*re.findall(r"{{(\w+)}}", legends)} <= set().union(
            *(labels[name] for name in names)
        )
    shown = {name for _, query in queries for name in re.findall(r"\bguided_spec_\w+", query)}
    derived = re.compile("_(created|bucket|count|sum)$")
    assert {name for name in labels if not derived.search(name)} - shown == set()
