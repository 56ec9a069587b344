"""The whole engine of an installed vLLM over the bundled model and its EAGLE-3 head.

``python -m tests.integrations.vllm.engine RESULT.json [COUNT]`` runs the first COUNT held-out
requests of the bundled model, three of four under their schema or regex, greedy, and writes {texts,
drafts, accepted}: token ids, draft tokens, and those accepted. vLLM starts its processes from here,
so that what they do is up to the environment, GUIDED_SPEC_VLLM above all.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import guided_spec

ASSETS = Path(guided_spec.__file__).parent / "assets"
NUM_DRAFT = 4
COUNTERS = {
    "vllm:spec_decode_num_draft_tokens": "drafts",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def main(result: Path, count: int) -> None:
    vllm: Any = importlib.import_module("vllm")
    llm = vllm.LLM(
        str(ASSETS / "target"),
        max_model_len=512,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        speculative_config={
            "method": "eagle3",
            "model": str(ASSETS / "eagle3"),
            "num_speculative_tokens": NUM_DRAFT,
        },
        structured_outputs_config={"backend": "xgrammar", "disable_any_whitespace": True},
    )
    lines = (ASSETS / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    rows = [json.loads(line) for line in lines]
    params = [_params(row, is_free=at % 4 == 3) for at, row in enumerate(rows)]
    outputs = llm.generate([row["prompt"] for row in rows], params, use_tqdm=False)
    found: dict[str, Any] = {"texts": [list(one.outputs[0].token_ids) for one in outputs]}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = metric.value
    result.write_text(json.dumps(found), encoding="utf-8")


def _params(row: dict[str, Any], *, is_free: bool) -> Any:
    sampling: Any = importlib.import_module("vllm.sampling_params")
    asked = {"json": row["schema"]} if row["schema"] else {"regex": row["regex"]}
    wanted = None if is_free else sampling.StructuredOutputsParams(**asked)
    return sampling.SamplingParams(max_tokens=120, temperature=0.0, structured_outputs=wanted)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 48)
