"""Schemas that cannot be enforced, refused by the real vLLM's own check of a request."""

from __future__ import annotations

import importlib
import json
from types import SimpleNamespace
from typing import Any

import pytest

from guided_spec.errors import UnsatisfiableGrammarError, UnsupportedSchemaError
from guided_spec.integrations.vllm.plugin import COUNTER, installed_version, register
from guided_spec.integrations.vllm.schemas import check_schemas

UNSUPPORTED = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
GOOD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def tag(schema: Any) -> str:
    content = {"type": "json_schema", "json_schema": schema}
    part = {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}
    return json.dumps({"type": "structural_tag", "format": part})


def old_tag(schema: Any) -> str:
    structure = {"begin": "<a>", "schema": schema, "end": "</a>"}
    return json.dumps({"structures": [structure], "triggers": ["<a"]})


def params(json: Any = None, structural_tag: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(json=json, structural_tag=structural_tag)


def test_what_is_refused_and_what_passes() -> None:
    for asked in (
        params(UNSUPPORTED),
        params(json.dumps(UNSUPPORTED)),
        params(structural_tag=tag(UNSUPPORTED)),
        params(structural_tag=old_tag(UNSUPPORTED)),
    ):
        with pytest.raises(UnsupportedSchemaError, match="cannot be enforced"):
            check_schemas(asked)
    with pytest.raises(UnsatisfiableGrammarError):
        check_schemas(params(json=False))
    for schema in (GOOD, json.dumps(GOOD), None, "{broken"):
        check_schemas(params(schema))
    check_schemas(params(structural_tag=tag(GOOD)))
    check_schemas(params(structural_tag=old_tag(GOOD)))


@pytest.mark.skipif(installed_version() is None, reason="vLLM is not installed")
@pytest.mark.filterwarnings("ignore")  # vLLM's own
def test_vllm_refuses_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = importlib.import_module("tests.integrations.vllm.parts")
    sampling: Any = importlib.import_module("vllm.sampling_params").SamplingParams
    name = "_validate_structured_outputs"
    monkeypatch.setattr(sampling, name, getattr(sampling, name))
    config = parts.make_config()
    lost = {"type": "string", "contentEncoding": "base64", "not": {"pattern": "a+"}}
    assert parts.sampling_params(config, json=lost) is not None  # vLLM drops it
    monkeypatch.setenv("GUIDED_SPEC_VLLM", "schemas")
    register()
    wrapped = getattr(sampling, name)
    refused: Any = importlib.import_module("vllm.exceptions").VLLMValidationError
    client: Any = importlib.import_module("prometheus_client")
    sample = (f"{COUNTER}_total", {"feature": "schemas"})
    before = client.REGISTRY.get_sample_value(*sample) or 0
    for schema in (lost, UNSUPPORTED):  # vLLM refuses the second too, without a reason
        with pytest.raises(refused, match="cannot be enforced in full"):
            parts.sampling_params(config, json=schema)
    assert client.REGISTRY.get_sample_value(*sample) == before + 2
    for grammar in ({"json": GOOD}, {"regex": "a+"}, {}):
        assert parts.sampling_params(config, **grammar) is not None
    register()
    assert getattr(sampling, name) is wrapped
