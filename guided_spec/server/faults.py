"""What a client gets when its request fails, in the shape of OpenAI's errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response

from guided_spec.errors import (
    BudgetTooSmallError,
    ConfigError,
    GrammarCompileError,
    GrammarTooSlowError,
    GrammarWorkerError,
    GuidedSpecError,
    NoTokenLeftError,
    PromptError,
    PromptTooLongError,
    RequestCancelledError,
    TextCutShortError,
    UnknownOptionError,
    UnsatisfiableGrammarError,
    UnsupportedSchemaError,
    without_advice,
)

_CODES: tuple[tuple[type[GuidedSpecError], str, str | None], ...] = (
    (UnsupportedSchemaError, "unsupported_schema", None),
    (UnsatisfiableGrammarError, "unsatisfiable_grammar", None),
    (GrammarCompileError, "invalid_grammar", None),
    (GrammarTooSlowError, "grammar_too_slow", None),
    (PromptTooLongError, "context_length_exceeded", None),
    (PromptError, "invalid_prompt", None),
    (BudgetTooSmallError, "budget_too_small", "max_tokens"),
    (TextCutShortError, "text_cut_short", "max_tokens"),
    (NoTokenLeftError, "no_token_left", "logit_bias"),
    (UnknownOptionError, "unknown_parameter", None),
    (ConfigError, "invalid_value", None),
)
"""The code and the argument of errors that the client can mend; the first that fits."""


class ApiError(Exception):
    """A request ends with this status.

    param: the argument that is at fault, None where it is none. headers: of the response.
    owner: of a grammar that is at fault, see ``GrammarCompileError``.
    """

    owner: tuple[str, ...] = ()

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's word for errors of this status."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        other = "server_error" if self.status >= 500 else "invalid_request_error"
        return kinds.get(self.status, other)

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's JSON object, and as Anthropic's."""
        inner = {"message": self.message, "type": self.kind, "param": self.param}
        # The first field is Anthropic's.
        return {"type": "error", "error": {**inner, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP response."""
        return json_response(self.body(), self.status, self.headers)


def api_error(error: GuidedSpecError, param: str | None = None) -> ApiError:
    """The client's error for an error of the package.

    param: the argument that a grammar or a prompt came in.
    """
    for kind, code, argument in _CODES:
        if isinstance(error, kind):
            found = error.argument if isinstance(error, ConfigError) else argument
            # What else the library would take, clients cannot send.
            message = error.reason if isinstance(error, BudgetTooSmallError) else str(error)
            message = without_advice(message, lambda name: name != "resources")
            fault = ApiError(400, message, code=code, param=found or param)
            fault.owner = error.owner if isinstance(error, GrammarCompileError) else ()
            return fault
    if isinstance(error, RequestCancelledError):
        return stopping()
    if isinstance(error, GrammarWorkerError):
        return ApiError(503, str(error), code="grammar_worker", param=param)
    return ApiError(500, str(error), code=type(error).__name__)


def stopping() -> ApiError:
    """The request is cut off, because the server stops."""
    return ApiError(503, "the server is stopping; ask again", code="stopping")


def invalid_value(message: str, param: str | None) -> ApiError:
    """A value of the request that is not taken. param: the argument that it came in."""
    return ApiError(400, message, code="invalid_value", param=param)


def require_model(name: str | None, served: Sequence[str]) -> None:
    """Raise ApiError, 404, for a model that is not served."""
    if name is not None and name not in served:
        message = f"the model {name!r:.80} is not served here; there is {', '.join(served)}"
        raise ApiError(404, message, code="model_not_found", param="model")


@contextmanager
def named_as_sent(
    names: Mapping[str, str], flat: Callable[[str], str] = lambda path: path
) -> Iterator[None]:
    """Errors of an argument, or of a part of one, name what the client sent for it.

    names: of arguments, with those that the client knows; what is among these was sent so. flat:
    the place of a tool or choice where the client wrote it, from its place in a chat. Raises
    ApiError.
    """
    try:
        yield
    except GuidedSpecError as error:
        raise _flattened(_renamed(api_error(error), names), flat) from error
    except ApiError as fault:
        raise _flattened(_renamed(fault, names), flat) from fault


def _flattened(fault: ApiError, flat: Callable[[str], str]) -> ApiError:
    path = fault.param or ""
    if re.match(r"tools?(_choice)?\b", path):
        fault.param = flat(path)
        fault.message = fault.message.replace(path, fault.param, 1)
    return fault


def _renamed(fault: ApiError, names: Mapping[str, str]) -> ApiError:
    path = fault.param or ""
    first = re.split(r"[.\[]", path)[0]
    name, rest = names.get(first), path[len(first) :]
    if name is not None and path not in names.values():
        if rest.startswith("."):  # the parts of an item that the client did not send so
            name, rest = name + rest, ""
        fault.message = re.sub(f"^{re.escape(path)}[^=: ]*", name, fault.message)
        fault.param = name
    return fault


def json_response(
    value: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """JSON in UTF-8, whatever its strings hold."""
    # Half of a surrogate pair, which a client may have sent, becomes its escape.
    body = json.dumps(value, ensure_ascii=False).encode("utf-8", errors="backslashreplace")
    return Response(body, status, dict(headers or {}), media_type="application/json")


def add_handlers(app: FastAPI) -> None:
    """Let every error of an application have this shape."""

    @app.exception_handler(ApiError)
    async def _api_error(_request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(GuidedSpecError)
    async def _own_error(_request: Request, error: GuidedSpecError) -> Response:
        return api_error(error).response()

    @app.exception_handler(RequestValidationError)
    async def _invalid(_request: Request, error: RequestValidationError) -> Response:
        return _request_fault(error.errors()[0]).response()

    @app.exception_handler(404)
    async def _unknown_path(request: Request, _error: Exception) -> Response:
        message = f"{request.url.path}: there is nothing here; see /openapi.json"
        return ApiError(404, message, code="not_found").response()

    @app.exception_handler(405)
    async def _other_method(request: Request, error: Exception) -> Response:
        message = f"{request.url.path} does not take {request.method}"
        headers = getattr(error, "headers", None)
        return ApiError(405, message, code="method_not_allowed", headers=headers).response()

    @app.exception_handler(400)
    async def _unreadable(_request: Request, _error: Exception) -> Response:
        return unreadable_body().response()

    @app.exception_handler(Exception)
    async def _fault_of_ours(_request: Request, error: Exception) -> Response:
        return fault_of_ours(error).response()


def fault_of_ours(error: Exception) -> ApiError:
    """The client's error for one that nothing here raises on purpose."""
    message = f"the server failed: {type(error).__name__}; its log has the details"
    return ApiError(500, message, code="internal_error")


def unreadable_body() -> ApiError:
    """The error for a body that is not valid JSON, or JSON that this server cannot read."""
    message = "the body cannot be read: send JSON in UTF-8, not nested too deeply"
    return ApiError(400, message, code="invalid_json")


def _request_fault(fault: Any) -> ApiError:
    """What FastAPI says of a request whose body was not read, or of another part of it."""
    param = ".".join(str(part) for part in fault["loc"] if part != "body")
    message = (
        f"{param or 'the body'}: {fault['msg']}; send JSON with Content-Type: application/json"
    )
    return invalid_value(message, param or None)
