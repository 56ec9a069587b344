"""OpenAI's batch lines: requests as the server takes them, each with an id of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from guided_spec.batch.inputs import Line
from guided_spec.batch.results import Question, digest_of
from guided_spec.errors import GuidedSpecError
from guided_spec.kinds import did_you_mean
from guided_spec.server.endpoints.bodies import ChatBody, CompletionBody, ResponsesBody
from guided_spec.server.endpoints.reading import read_body
from guided_spec.server.faults import ApiError, api_error, fault_of_ours, require_model

if TYPE_CHECKING:  # these load torch
    from guided_spec.engine.outputs import Completion
    from guided_spec.server.service import ServedModel, Service

_LOG = logging.getLogger(__name__)

Body = ChatBody | CompletionBody | ResponsesBody
_BODIES: Mapping[str, type[Body]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
}
_FIELDS = ("custom_id", "method", "url", "body")
_ANYTHING = 2**31 - 1  # a batch waits for itself alone


@dataclass(frozen=True)
class RequestForm:
    """Lines ``{"custom_id", "method": "POST", "url", "body"}``.

    model: what is loaded. names: what bodies may call it, the first is shown.
    loras: the folders or hub ids of its adapters, by what bodies call them as their model.
    """

    model: str
    names: tuple[str, ...]
    loras: Mapping[str, str] = field(default_factory=dict)
    columns: Sequence[str] = ("custom_id", "url", "body")

    def read(self, index: int, line: Line) -> Question:
        """The request of a line. What is at fault is its ``refusal``."""
        value = line.value
        given = value.get("custom_id") if isinstance(value, dict) else None
        custom_id = given if isinstance(given, str) else None
        settings = (self.model, self.names, *sorted(self.loras.items()))
        digest = digest_of(*settings, index if line.fault else value)
        fault = line.fault or _fault_of(value)
        if fault is not None:
            error = {"code": "invalid_line", "message": fault}
            return Question(custom_id, digest, refusal={"response": None, "error": error})
        try:
            data = json.dumps(value["body"]).encode()
            body: Any = read_body(data, _BODIES[value["url"]])
            require_model(body.model, (*self.names, *self.loras))
            if body.stream:
                message = "stream: answers of a batch are whole; leave it out"
                raise ApiError(400, message, code="invalid_value", param="stream")
        except ApiError as error:
            return Question(
                custom_id, digest, refusal=_response(digest, error.status, error.body())
            )
        return Question(custom_id, digest, body)

    def runner(self, llm: ServedModel, watch: Callable[[Completion], None]) -> RequestRunner:
        """What answers them. watch: called with each text that has ended."""
        from guided_spec.server.service import ServerSettings, Service

        settings = ServerSettings(model_names=self.names, max_queue=_ANYTHING, playground=False)
        return RequestRunner(Service(llm, settings, watch=watch))


class RequestRunner:
    """Answers requests by the handlers of the server's endpoints."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def run(self, question: Question) -> Mapping[str, Any]:
        """The fields of an answer, its error among them."""
        try:
            reply = await self._reply(question.content)
        except ApiError as error:
            return _response(question.digest, error.status, error.body())
        except GuidedSpecError as error:
            fault = api_error(error)
            return _response(question.digest, fault.status, fault.body())
        except Exception as error:  # of ours: the other lines are answered
            _LOG.exception("a request of the batch failed")
            fault = fault_of_ours(error)
            return _response(question.digest, fault.status, fault.body())
        return _response(question.digest, 200, reply)

    def close(self) -> None:
        """No more requests are answered."""
        self._service.workers.close()

    async def _reply(self, body: Body) -> dict[str, Any]:
        from guided_spec.server.endpoints.chat import ChatHandler
        from guided_spec.server.endpoints.completions import CompletionHandler
        from guided_spec.server.endpoints.responses import ResponseHandler

        service = self._service
        if isinstance(body, ChatBody):
            return (await ChatHandler(service, body).whole()).model_dump()
        if isinstance(body, CompletionBody):
            return (await CompletionHandler(service, body).whole()).model_dump()
        handler = await service.workers.run(lambda: ResponseHandler(service, body))
        return (await handler.whole()).model_dump()


def _fault_of(value: Any) -> str | None:
    """What is wrong with a line around its body."""
    if not isinstance(value, dict):
        return f"the line is no object but {value!r:.80}: write {{{', '.join(_FIELDS)}}}"
    unknown = [name for name in value if name not in _FIELDS]
    if unknown:
        meant = did_you_mean(unknown[0], _FIELDS)
        return f"{unknown[0]!r:.80} is no field of a line: it has {', '.join(_FIELDS)}{meant}"
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return f"custom_id={custom_id!r:.80}: must be a non-empty str, and another on each line"
    if value.get("method", "POST") != "POST":
        return f"method={value['method']!r:.80}: must be POST"
    if not isinstance(value.get("url"), str) or value["url"] not in _BODIES:
        meant = did_you_mean(value.get("url"), _BODIES)
        return f"url={value.get('url')!r:.80}: must be one of {', '.join(_BODIES)}{meant}"
    if not isinstance(value.get("body"), dict):
        return f"body={value.get('body')!r:.80}: must be an object, the request itself"
    return None


def _response(digest: str, status: int, body: Mapping[str, Any]) -> dict[str, Any]:
    response = {"status_code": status, "request_id": digest, "body": body}
    return {"response": response, "error": None}
