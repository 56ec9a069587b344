"""The arguments of calls: each by its name, those that have one meaning wherever they stand."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar, get_origin

from guided_spec.engine.outputs import match_params
from guided_spec.errors import ConfigError
from guided_spec.grammar.spec import GrammarSpec
from guided_spec.kinds import nearest_names, require_kind, require_known
from guided_spec.types import SamplingParams, require_no_sampling

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def read_params(
    params: Any, grammar: Any, response_format: Any, default: SamplingParams
) -> SamplingParams | Sequence[SamplingParams]:
    """The parameters of a call, with its grammar.

    params: a grammar too, where it is a type or a GrammarSpec; None is ``default``. Raises
    ConfigError for two grammars.
    """
    form = None if response_format is None else GrammarSpec.from_response_format(response_format)
    if form is not None:  # None: free text
        grammar = _with({"grammar": grammar}, "grammar", form)["grammar"]
    if _is_grammar(params):
        if grammar is not None:
            raise ConfigError("grammar", grammar, "params is a grammar too; leave one of them out")
        params, grammar = None, params
    asked: SamplingParams | Sequence[SamplingParams] = default if params is None else params
    if grammar is None:
        return asked
    is_one = not isinstance(asked, Sequence)
    listed = match_params(asked, len(asked) if isinstance(asked, Sequence) else 1)
    if any(one.grammar is not None for one in listed):
        raise ConfigError("grammar", grammar, "params have one too; leave one of them out")
    changed = [replace(one, grammar=grammar) for one in listed]
    return changed[0] if is_one else changed


def _is_grammar(value: object) -> bool:
    """Whether it is a grammar and can be nothing else."""
    if isinstance(value, list | tuple | set | frozenset):
        return bool(value) and all(isinstance(option, str) for option in value)
    return isinstance(value, type | GrammarSpec | re.Pattern) or get_origin(value) is not None


def named_options(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The method, with a ConfigError instead of each TypeError of a call.

    An unknown keyword names the argument that is nearest, or says that it belongs to
    ``SamplingParams``. Parameters, grammars and forms are known by their kind, wherever they stand.
    """
    signature = _Signature(function)

    @wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        return function(self, **signature.sort(args, options))

    @wraps(function)
    async def acall(self: Any, *args: Any, **options: Any) -> Any:
        return await function(self, **signature.sort(args, options))  # type: ignore[misc]

    is_async = inspect.iscoroutinefunction(function)
    return acall if is_async else call  # type: ignore[return-value]


_KINDS = {"bool": bool}  # what nothing else reads, by its annotation


class _Signature:
    """What a method takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        params = list(inspect.signature(function).parameters.values())[1:]
        named = [one for one in params if one.kind is not one.VAR_KEYWORD]
        self._takes_others = len(named) < len(params)
        self._names = {one.name for one in named}
        self._positional = [one.name for one in named if one.kind is one.POSITIONAL_OR_KEYWORD]
        self._required = [one.name for one in named if one.default is one.empty]
        kinds = ((one.name, _KINDS.get(str(one.annotation))) for one in named)
        self._kinds = {name: kind for name, kind in kinds if kind is not None}
        self._name = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]
        self._is_chat = "messages" in self._names

    def sort(self, args: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name. Raises ConfigError."""
        found = dict(options)
        if not self._takes_others:
            self._require_known(found)
        for at, value in enumerate(args):
            is_alone = len(args) == 2 and "params" not in found  # noqa: PLR2004 - the first is no option
            found = _with(found, self._name_of(at, value, is_alone=is_alone), value)
        for name in self._required:
            if name not in found:
                raise ConfigError(name, None, f"is missing: {self._name} needs it")
        for name in found.keys() & self._kinds.keys():
            require_kind(name, found[name], self._kinds[name])
        return found

    def _require_known(self, options: Mapping[str, Any]) -> None:
        for name in options.keys() - self._names:
            if not nearest_names(name, self._names):
                require_no_sampling(name, options[name])
            require_known(name, options[name], self._names)

    def _name_of(self, at: int, value: Any, *, is_alone: bool) -> str:
        """The argument that a value without a name is. is_alone: no other may be ``params``."""
        name = self._positional[at] if at < len(self._positional) else None
        if at and self._is_chat:
            if isinstance(value, SamplingParams):
                return "params"
            if not isinstance(value, list | tuple) and (_is_grammar(value) or name is None):
                return "response_format"
        if at and "grammar" in self._names and not is_alone:
            return "grammar" if _is_grammar(value) else "params"
        if name is None:
            listed = ", ".join(self._positional)
            raise ConfigError(self._name, value, f"takes {listed}; give the others by name")
        return name


def _with(found: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    if found.get(name) is not None:
        raise ConfigError(name, value, "is given twice; leave one of the two out")
    return {**found, name: value}
