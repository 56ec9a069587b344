"""``python -m tests.integrations.sglang.engine REQUESTS OPTIONS``: an SGLang engine, on a CPU.

REQUESTS: [prompt, sampling parameters] each, as JSON. OPTIONS: the engine's, as JSON. The last line
written is what the engine answered, as JSON.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

TARGET = Path(__file__).parents[3] / "guided_spec" / "assets" / "target"


def main(requests: str, options: str) -> None:
    engine = importlib.import_module("sglang").Engine(
        model_path=str(TARGET),
        device="cpu",
        dtype="float32",  # Triton's interpreter multiplies no bfloat16
        sampling_backend="pytorch",
        max_total_tokens=2048,
        max_running_requests=4,
        disable_cuda_graph=True,
        grammar_backend="guided_spec",
        **json.loads(options),
    )
    prompts, params = zip(*json.loads(requests), strict=True)
    answers = engine.generate(list(prompts), sampling_params=list(params))
    engine.shutdown()
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
