"""``LLM(engine="vllm")`` over an installed vLLM, the bundled model and its EAGLE-3 head.

``python -m tests.integrations.vllm.own_llm RESULT.json PROPOSER`` writes what it wrote: texts under
schemas, one of them within few tokens, and a regex, free text, a stream that is left early, and the
refusal of a schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import guided_spec
from guided_spec import LLM, GrammarSpec, SamplingParams

ASSETS = Path(guided_spec.__file__).parent / "assets"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "phone": {"type": "string"}},
    "required": ["name", "phone"],
}
LONG = {
    **SCHEMA,
    "properties": {"name": {"type": "string", "maxLength": 200}},
    "required": ["name"],
}
PROMPTS = (
    "Please call Maria Lopez at +49 170 5551234.\n\nJSON: ",
    "Please call Maria Lopez at +49 170 5551234.\n\nJSON: ",
    "Please call Maria Lopez at +49 170 5551234.\n\nJSON: ",
    "The launch was moved to March 5, 2024.\n\nDate: ",
    "one two three one two three one two",
    "one two three one two three one two",
)
PARAMS = (
    SamplingParams(grammar=GrammarSpec.json_schema(LONG)),
    SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA)),
    SamplingParams(grammar=GrammarSpec.json_schema(SCHEMA), max_tokens=14),  # too few for the model
    SamplingParams(grammar=GrammarSpec.regex(r"\d{4}-\d{2}-\d{2}")),
    SamplingParams(max_tokens=16),
    SamplingParams(max_tokens=40, stop="mis"),
)


def main(result: Path, proposer: str) -> None:
    draft = str(ASSETS / "eagle3") if "eagle3" in proposer else None
    options: dict[str, Any] = {"max_model_len": 512, "max_batch_size": 8, "dtype": "float32"}
    with LLM(
        None, proposer, 4, draft=draft, engine="vllm", engine_options={"enforce_eager": True},
        **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, PARAMS)
        stream = llm.stream(PROMPTS[-1], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        unique = GrammarSpec.json_schema({"type": "array", "uniqueItems": True})
        (refused,) = llm.generate("x", SamplingParams(grammar=unique), on_error="return")
        found = {
            "texts": [output.text for output in outputs],
            "complete": [output.is_complete for output in outputs],
            "refused": type(refused.completions[0].error).__name__,
        }
    result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
