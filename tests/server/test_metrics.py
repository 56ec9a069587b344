"""Counters say what has happened."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from guided_spec.engine.llm import LLM
from tests.docs.pages import ROOT
from tests.server.running import ASK, Contact, Running, running

SCHEMA = {"name": "contact", "schema": Contact.model_json_schema()}
DASHBOARD = ROOT / "examples" / "serve" / "grafana.json"


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
    assert 0 < found["accepted_tokens_total"] <= found["drafted_tokens_total"]
    assert 0 < found["forced_tokens_total"] <= found["accepted_tokens_total"]
    assert found["steps_total"] + found["accepted_tokens_total"] >= output
    assert found["mask_seconds_total"] > 0
    assert found["starved_rows_total"] == 0
    assert (found["slots"], found["running_samples"], found["waiting_samples"]) == (4, 0, 0)


def test_stats_are_those_of_the_engine(llm: LLM, served: Running) -> None:
    """What one request adds is what the engine says of the same text."""
    stats = llm.chat(ASK, response_format={"type": "json_schema", "json_schema": SCHEMA}).completion
    names = ("steps", "drafted_tokens", "accepted_tokens", "forced_tokens", "output_tokens")
    before = served.metrics()
    form = {"type": "json_schema", "json_schema": SCHEMA}
    served.post("/v1/chat/completions", {"messages": ASK, "response_format": form})
    after = served.metrics()
    added = [after[f"guided_spec_{n}_total"] - before[f"guided_spec_{n}_total"] for n in names]
    one = stats.stats
    expected = [one.steps, sum(one.drafted), sum(one.accepted), one.forced_accepted]
    assert added == [*expected, one.output_tokens]


@pytest.mark.parametrize("path", [DASHBOARD, ROOT / "docs" / "serve.md"], ids=lambda p: p.name)
def test_what_is_written_of_metrics_exists(served: Running, path: Path) -> None:
    """The dashboard and the page name metrics that there are; the page names all of them."""
    served.require_service()
    known = {name.partition("{")[0] for name in served.metrics()}
    text = json.dumps(json.loads(path.read_text())) if path == DASHBOARD else path.read_text()
    named = {*re.findall(r"\bguided_spec_[a-z_]+", text)}
    assert named
    histograms = {name.removesuffix("_bucket") for name in known if name.endswith("_bucket")}
    assert named - known - histograms == set()
    if path != DASHBOARD:
        derived = re.compile("_(created|bucket|count|sum)$")
        everything = {name for name in known if not derived.search(name)} | histograms
        assert everything - named == set()
