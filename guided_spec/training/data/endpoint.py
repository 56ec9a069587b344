"""A running server with OpenAI's interface, which writes responses instead of an ``LLM``."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from guided_spec.engine.outputs import Completion, OnError, RequestOutput, RequestStats
from guided_spec.errors import ConfigError, RequestError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.types import SamplingParams

_AT_ONCE = 64  # requests; a server batches what comes together
_SENT = ("max_tokens", "temperature", "seed", "grammar")
_NAMES = {  # of vLLM's ``structured_outputs``
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "lark": "grammar",
    "structural_tag": "structural_tag",
}


class Endpoint:
    """``generate`` by a server that knows vLLM's ``structured_outputs``: vLLM, or ours.

    url: as OpenAI's clients take it, up to ``/v1``. The model is the first that is served there.
    tokenizer: of that model. option: the one that holds ``url``, for errors. at_once: requests.
        The environment variable ``OPENAI_API_KEY`` holds the key, if there is one.

    Raises ConfigError where nothing answers, and where httpx is not installed.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        option: str = "regenerate_url",
        at_once: int = _AT_ONCE,
    ) -> None:
        self.tokenizer = tokenizer
        self.url = url.rstrip("/")
        self._option, self._at_once = option, at_once
        self._http = _require_httpx(option, url)
        key = os.environ.get("OPENAI_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = self._http.Client(headers=headers, timeout=None)  # noqa: S113 - as long as it takes
        try:
            self._model = self._served_model()
        except ConfigError:
            self.close()
            raise

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """``LLM.generate`` for token ids; outputs have text, an error, and of
        tokens their number alone.

        Raises ConfigError for parameters besides ``max_tokens``, ``temperature``, ``seed`` and
        ``grammar``, and where the server stops responding.
        """
        for one in params:
            if one != SamplingParams(**_sent(one)):
                fix = f"a server is only asked for {', '.join(_SENT)}"
                raise ConfigError("params", one, fix)
        with ThreadPoolExecutor(self._at_once) as pool:
            completions = list(pool.map(self._complete, prompts, params))
        for completion in completions if on_error == "raise" else ():
            if completion.error is not None:
                raise completion.error
        return [RequestOutput(at, (completion,)) for at, completion in enumerate(completions)]

    def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """What the server answers to the body of a completion by its model.

        Raises RequestError, with its reason, where it refuses, and ConfigError if it is down.
        """
        reply = self._send("POST", f"{self.url}/completions", {"model": self._model, **body})
        if reply.is_error:
            raise RequestError(f"the server answers with {reply.status_code}: {reply.text:.500}")
        answer: dict[str, Any] = reply.json()
        return answer

    def metrics(self) -> str:
        """The text of the server's ``/metrics``, which is next to ``/v1``.

        Raises ConfigError where it says nothing.
        """
        reply = self._send("GET", self.url.removesuffix("/v1") + "/metrics")
        if reply.is_error:
            raise self._refuse(f"answers with status {reply.status_code} at /metrics")
        text: str = reply.text
        return text

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _served_model(self) -> str:
        reply = self._send("GET", f"{self.url}/models")
        if reply.is_error:
            raise self._refuse(f"answers with status {reply.status_code}: {reply.text:.200}")
        name: str = reply.json()["data"][0]["id"]
        return name

    def _complete(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        body = {"prompt": list(prompt_ids), **_sent(params)}
        grammar = body.pop("grammar")
        try:
            if grammar is not None:
                body["structured_outputs"] = _structured(grammar)
        except ConfigError as error:
            return Completion("", [], "error", error, RequestStats())
        try:
            answer = self.complete(body)
        except RequestError as fault:
            return Completion("", [], "error", fault, RequestStats())
        choice, usage = answer["choices"][0], answer["usage"]
        stats = RequestStats(usage["prompt_tokens"], usage["completion_tokens"])
        if choice["finish_reason"] == "stop":
            return Completion(choice["text"], [], "stop", None, stats, is_complete=True)
        return Completion(choice["text"], [], "length", None, stats)

    def _send(self, method: str, url: str, body: Any = None) -> Any:
        """The ``httpx.Response``. Raises ConfigError where there is none."""
        try:
            return self._client.request(method, url, json=body)
        except (self._http.HTTPError, self._http.InvalidURL) as error:
            raise self._refuse(f"does not answer: {error}") from error

    def _refuse(self, why: str) -> ConfigError:
        fix = f"{why}; pass the address of a running server, such as http://127.0.0.1:8000/v1"
        return ConfigError(self._option, self.url, fix)


def _require_httpx(option: str, url: str) -> Any:
    """The library, which is of an extra: who asks no server does without."""
    if importlib.util.find_spec("httpx") is None:
        fix = "asking it needs the httpx library: pip install 'guided-spec[train]'"
        raise ConfigError(option, url, fix)
    import httpx

    return httpx


def _sent(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in _SENT}


def _structured(spec: GrammarSpec) -> dict[str, Any]:
    """In vLLM's words. Raises ConfigError for what they cannot say."""
    if spec.start is not None or spec.root != "root":
        raise ConfigError("grammar", spec.kind, "a server knows no marker and no other root rule")
    if spec.kind == "json_object":
        return {"json_object": True}
    if spec.kind == "choice":
        return {"choice": json.loads(spec.source)}
    return {_NAMES[spec.kind]: spec.source}
