"""JSON schemas that cannot be enforced in full, refused where vLLM checks a request.

vLLM hands a schema to its grammar backend, which drops what it cannot express. Here such a request
fails instead, with the keywords and what to write instead of them.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any

from guided_spec.errors import UnsatisfiableGrammarError, UnsupportedSchemaError
from guided_spec.grammar.backends.tag import prepare_tag
from guided_spec.grammar.schema.prepare import prepare_schema
from guided_spec.integrations.patches import Patch
from guided_spec.integrations.vllm.plugin import count


def check_schemas(params: Any) -> None:
    """Look at what vLLM's StructuredOutputsParams ask for; other kinds than schemas pass.

    Broken JSON passes too: vLLM has its own words for it.

    Raises UnsupportedSchemaError for a schema, alone or inside a structural tag, that guided_spec
    cannot enforce in full, and UnsatisfiableGrammarError where no value is valid under it.
    """
    schema, tag = _parse(params.json), _parse(params.structural_tag)
    if isinstance(schema, dict | bool):
        prepare_schema(schema)
    if isinstance(tag, dict) and "structures" in tag:  # vLLM's older form
        for structure in tag["structures"]:
            prepare_schema(structure.get("schema", True))
    elif isinstance(tag, dict):
        prepare_tag(tag)


def refuse_schemas(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around ``SamplingParams._validate_structured_outputs``: vLLM's own error, HTTP status 400."""
    exceptions: Any = importlib.import_module("vllm.exceptions")

    @functools.wraps(original)
    def validate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.structured_outputs is not None:  # before vLLM refuses one without saying why
            try:
                check_schemas(self.structured_outputs)
            except (UnsupportedSchemaError, UnsatisfiableGrammarError) as error:
                count("schemas")
                raise exceptions.VLLMValidationError(str(error)) from error
        return original(self, *args, **kwargs)

    return validate


def _parse(source: Any) -> Any:
    if not isinstance(source, str):
        return source
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None


PATCHES = (
    Patch(
        "vllm.sampling_params",
        "SamplingParams._validate_structured_outputs",
        "self ...",
        refuse_schemas,
    ),
    Patch("vllm.sampling_params", "SamplingParams", attributes="structured_outputs"),
    Patch("vllm.sampling_params", "StructuredOutputsParams", attributes="json structural_tag"),
    Patch("vllm.exceptions", "VLLMValidationError"),
)
PARTS = {"": PATCHES}
