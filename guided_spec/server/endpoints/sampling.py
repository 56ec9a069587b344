"""What a request asks of the engine: sampling parameters and a grammar."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from guided_spec.errors import ConfigError, GuidedSpecError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.server.endpoints.bodies import (
    ChatBody,
    CompletionBody,
    SamplingBody,
    StructuredOutputs,
)
from guided_spec.server.faults import ApiError, api_error, invalid_value
from guided_spec.server.middleware import cache_salt
from guided_spec.types import MAX_SEED, SamplingParams

_SAME_NAMES = (
    *("n", "temperature", "top_p", "frequency_penalty", "presence_penalty", "logit_bias", "stop"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids"),
    *("allowed_token_ids", "bad_words", "on_short"),
)


class AskedGrammar(NamedTuple):
    """What the text must match, None for free text, and the argument that said so."""

    spec: GrammarSpec | None
    param: str | None


def sampling_params(
    body: ChatBody | CompletionBody, defaults: SamplingParams, max_tokens: int
) -> SamplingParams:
    """The parameters of a body, without its grammar.

    defaults: what holds where the body says nothing. Raises ConfigError.
    """
    given = {name: getattr(body, name) for name in _SAME_NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    if body.seed is not None:
        given["seed"] = body.seed % (MAX_SEED + 1)  # OpenAI's may be negative
    if isinstance(body, CompletionBody):
        given |= {"logprobs": body.logprobs, "echo": bool(body.echo)}
    elif body.logprobs or (body.logprobs is None and body.top_logprobs is not None):
        given["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise ConfigError("top_logprobs", body.top_logprobs, "logprobs is false: make it true")
    salt = cache_salt(body.cache_salt)
    return replace(defaults, max_tokens=max_tokens, cache_salt=salt, **given)


def asked_grammar(body: SamplingBody, max_bytes: int) -> AskedGrammar:
    """The grammar of a body: OpenAI's ``response_format``, or one of vLLM's fields.

    max_bytes: of its source, in UTF-8. Raises ApiError.
    """
    found = [AskedGrammar(None, None)]
    for param, make in _MAKERS.items():
        value = getattr(body, param)
        if value is not None:
            spec = _made(param, make, value)
            found += [AskedGrammar(spec, param)] if spec is not None else []
    if len(found) > 2:
        names = " and ".join(str(one.param) for one in found[1:])
        raise invalid_value(f"{names}: pass one of them", found[1].param)
    asked = found[-1]
    if asked.spec is not None:
        require_length(asked.spec.source, max_bytes, asked.param)
    return asked


def _made(param: str, make: Callable[[Any], GrammarSpec | None], value: Any) -> GrammarSpec | None:
    """The spec of an argument. Raises ApiError, which names it and not what ``make`` calls it."""
    try:
        return make(value)
    except ConfigError as error:
        argument = error.argument if error.argument.startswith(param) else param
        raise api_error(type(error)(argument, error.value, error.fix)) from error
    except GuidedSpecError as error:
        raise api_error(error, param) from error


def require_length(source: str, max_bytes: int, param: str | None) -> None:
    """Raise ApiError for a source of more bytes in UTF-8."""
    length = len(source.encode("utf-8", errors="surrogatepass"))
    if length > max_bytes:
        message = f"{param} has {length} bytes, and this server takes {max_bytes}; ask for less"
        raise ApiError(400, message, code="schema_too_large", param=param)


def _structured(outputs: StructuredOutputs) -> GrammarSpec | None:
    given = outputs.model_dump(exclude_none=True)
    if outputs.json_object is False:
        given.pop("json_object")
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(name.rstrip("_") for name in given)
        message = f"structured_outputs has {names}; pass one of them"
        raise invalid_value(message, "structured_outputs")
    makers: dict[str, Callable[[Any], GrammarSpec]] = {
        "json_": GrammarSpec.json_schema,
        "regex": GrammarSpec.regex,
        "choice": GrammarSpec.choice,
        "grammar": _grammar,
        "json_object": lambda _wanted: GrammarSpec.json_object(),
        "structural_tag": GrammarSpec.structural_tag,
    }
    ((name, value),) = given.items()
    return _made(f"structured_outputs.{name.rstrip('_')}", makers[name], value)


def _grammar(text: str) -> GrammarSpec:
    """vLLM takes both dialects; only the rules of EBNF have this sign."""
    return GrammarSpec.ebnf(text) if "::=" in text else GrammarSpec.lark(text)


_MAKERS: Mapping[str, Callable[[Any], GrammarSpec | None]] = {
    "response_format": GrammarSpec.from_response_format,
    "structured_outputs": _structured,
    "guided_json": GrammarSpec.json_schema,
    "guided_regex": GrammarSpec.regex,
    "guided_choice": GrammarSpec.choice,
    "guided_grammar": _grammar,
}
