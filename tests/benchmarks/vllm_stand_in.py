"""What the benchmark's script uses of vLLM, with answers known beforehand; vLLM needs a GPU."""

from __future__ import annotations

from pathlib import Path

_SOURCE = """
import os
from importlib import import_module
from importlib.metadata import entry_points
from types import SimpleNamespace as Names

__version__ = "stand-in"
SAMPLING = '''
class _Record:
    def __init__(self, **fields):
        self.__dict__.update(fields)
class SamplingParams(_Record): pass
class StructuredOutputsParams(_Record): pass
class RequestOutputKind:
    FINAL_ONLY = 2
'''

class LLM:
    def __init__(self, **arguments):
        for plugin in entry_points(group="vllm.general_plugins"):
            plugin.load()()
        if (arguments["speculative_config"] or {}).get("method") == "ngram":
            raise RuntimeError("no such thing as ngram")
        self.extension = None
        if "worker_extension_cls" in arguments:
            module, name = arguments["worker_extension_cls"].rsplit(".", 1)
            self.extension = getattr(import_module(module), name)()
            asynchronous = arguments.get("async_scheduling", True)
            self.extension.vllm_config = Names(
                use_v2_model_runner=os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0",
                scheduler_config=Names(async_scheduling=asynchronous),
            )
        self.is_speculative = arguments["speculative_config"] is not None
        self.largest, self.running, self.tokens = arguments["max_num_seqs"], [], 0
        self.llm_engine = self
        self.engine_core = Names(shutdown=lambda: None)
    def add_request(self, name, prompt, params):
        if len(self.running) == self.largest:
            raise RuntimeError("too many at once")
        if "minItems" in params.structured_outputs.json and prompt["prompt_token_ids"]:
            raise ValueError("minItems is not enforced")
        self.running.append((name, params.max_tokens))
    def step(self):
        name, room = self.running.pop()
        self.tokens += room
        answer = Names(text="{}", token_ids=[1] * room, finish_reason="stop")
        return [Names(request_id=name, finished=True, outputs=[answer])]
    def collective_rpc(self, name):
        return [getattr(self.extension, name)()]
    def reset_prefix_cache(self):
        return True
    def get_metrics(self):
        if not self.is_speculative:
            return []
        return [
            Names(name="vllm:spec_decode_num_drafts", value=self.tokens // 4),
            Names(name="vllm:spec_decode_num_draft_tokens", value=self.tokens // 4 * 5),
            Names(name="vllm:spec_decode_num_accepted_tokens", value=self.tokens // 4 * 3),
        ]
"""

_SERVER = """
import argparse, json, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("--host")
parser.add_argument("--port", type=int)
parser.add_argument("--disable-uvicorn-access-log", action="store_true")
parser.add_argument("--speculative-config", type=json.loads, default={})
parser.add_argument("--compilation-config", type=json.loads)
parser.add_argument("--structured-outputs-config", type=json.loads)
for name in ("model", "dtype", "max-model-len", "max-num-seqs", "max-num-batched-tokens",
             "gpu-memory-utilization", "seed"):
    parser.add_argument(f"--{name}", required=True)
args = parser.parse_args()
if args.speculative_config.get("method") == "ngram":
    sys.exit("no such thing as ngram")

running = []
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "stand-in"}]}).encode()
        self.answer(200, body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "stand-in" and asked["stream_options"] == {"include_usage": True}
        if "refused" in str(asked.get("prompt")):
            return self.answer(400, b"no such schema")
        is_chat = self.path == "/v1/chat/completions"
        wanted = asked.get("structured_outputs", {})
        text = wanted.get("choice", ["free"])[0] if "wrong" not in str(asked) else "wrong"
        running.append(self)
        if asked.get("prompt") == "count":
            text = str(len(running))
        events = [{"choices": [{"delta": {"content": c}} if is_chat else {"text": c}]}
                  for c in ("", text[:3], text[3:])]
        events.append({"choices": [], "usage": {"completion_tokens": 4}})
        if "broken" in str(asked):
            events[2:] = [{"error": {"message": "out of memory"}}]
        if "cut off" in str(asked):
            events.pop()
        self.send_response(200)
        self.end_headers()
        for event in events:
            self.wfile.write(b"data: " + json.dumps(event).encode() + bytes([10, 10]))
            time.sleep(0.01)
        running.remove(self)
        self.wfile.write(b"data: [DONE]" + bytes([10, 10]))
    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""


def write_stand_in(folder: Path) -> None:
    """A package ``vllm`` below ``folder``: every draft of five has three accepted tokens.

    It loads plugins and worker extensions as vLLM does, and cannot draft with n-grams. Its server
    writes the first of the choices that it is asked for, in two pieces and four tokens.
    """
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(_SOURCE)
    (package / "sampling_params.py").write_text("from vllm import SAMPLING\nexec(SAMPLING)\n")
    server = package / "entrypoints" / "openai" / "api_server.py"
    server.parent.mkdir(parents=True)
    server.write_text(_SERVER)
