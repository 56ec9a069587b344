"""What vLLM's server answers, as far as an evaluation asks it: with counters of its drafts."""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from tests.answering import Answering, running

TOKENS, K = 5, 3  # of an answer: a token of the prompt's, a draft of K with 2 accepted, its bonus


@dataclass
class FakeVllm:
    """Every answer is "yes" and counts five tokens: 1, then a draft of three of which two stay.

    foreign: tokens of others that each reading of the counters adds. is_drafting: whether it counts
    drafts at all, which vLLM does where it has a draft.
    """

    is_drafting: bool = True
    foreign: int = 0
    answers: int = 0
    others: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def metrics(self) -> str:
        self.others += self.foreign
        label = '{engine="0",model_name="a {b}"}'
        counted = {"vllm:generation_tokens": [(label, self.answers * TOKENS + self.others)]}
        if self.is_drafting:
            drafts = {"drafts": 1, "draft_tokens": K, "accepted_tokens": 2}
            for name, times in drafts.items():
                counted[f"vllm:spec_decode_num_{name}"] = [(label, times * self.answers)]
            at = [(f'{label[:-1]},position="{p}"}}', self.answers * (p < 2)) for p in range(K)]
            counted["vllm:spec_decode_num_accepted_tokens_per_pos"] = at
        lines = ["# HELP vllm:generation_tokens_total Number of generation tokens."]
        for name, values in counted.items():
            lines += [f"{name}_total{labels} {float(value)}" for labels, value in values]
            lines += [f"{name}_created{labels} 1.7e+09" for labels, _ in values]
        return "\n".join(lines) + "\n"

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        with self.lock:
            self.answers += 1
            self.bodies.append(body)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": TOKENS}
        return {"choices": [{"text": "yes", "finish_reason": "stop"}], "usage": usage}

    def running(self) -> AbstractContextManager[str]:
        """Its address, up to ``/v1``."""
        fake = self

        class Handler(Answering):
            def do_GET(self) -> None:
                if self.path == "/metrics":
                    self.reply(fake.metrics())
                else:
                    self.reply(json.dumps({"data": [{"id": "served"}]}))

            def do_POST(self) -> None:
                self.reply(json.dumps(fake.complete(self.read())))

        return running(Handler)
