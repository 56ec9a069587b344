"""Custom tools: their only argument is a text, ``input``, perhaps under a grammar of its own.

Chat templates know functions alone. So the model is shown a function of one string, and calls it
as it calls others; the grammar holds inside of the string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from guided_spec.errors import ConfigError
from guided_spec.kinds import require_known_fields, require_one_of

INPUT = "input"
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}
_FORM = '{"type": "custom", "custom": {"name": ..., "format": {"type": "text"}}}'
_KEYS = {"lark": "grammar", "regex": "pattern"}
_TOLD = {
    "lark": "The input is a text that this Lark grammar derives:\n",
    "regex": "The input is a text that this regular expression matches:\n",
}


def is_custom(tool: object) -> bool:
    """Whether a tool is OpenAI's dict of a custom one."""
    return isinstance(tool, Mapping) and tool.get("type") == "custom"


def custom_names(tools: Sequence[Any] | None) -> frozenset[str]:
    """The names of those of OpenAI's tools that are custom ones."""
    customs = [tool.get("custom") for tool in tools or () if is_custom(tool)]
    names = [custom.get("name") for custom in customs if isinstance(custom, Mapping)]
    return frozenset(name for name in names if isinstance(name, str))


def custom_of(place: str, tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The description of a custom tool, whose fields are known. Raises ConfigError."""
    require_known_fields(place, tool, ("type", "custom"))
    custom = tool.get("custom")
    if not isinstance(custom, Mapping):
        raise ConfigError(f"{place}.custom", custom, f"must be a dict, as in {_FORM}")
    require_known_fields(f"{place}.custom", custom, ("name", "description", "format"))
    return custom


def as_function(place: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """The function that a chat template shows to the model. Raises ConfigError."""
    custom = custom_of(place, tool)
    rule = _rule(f"{place}.custom.format", custom.get("format"))
    told = [str(custom.get("description") or "")]
    if rule is not None:
        told.append(f"{_TOLD[rule['syntax']]}{rule['definition']}")
    function = {
        "name": custom.get("name"),
        "description": "\n\n".join(filter(None, told)),
        "parameters": dict(PARAMETERS),
    }
    return {"type": "function", "function": function}


def input_content(place: str, custom: Mapping[str, Any]) -> dict[str, Any] | None:
    """What stands between the quotes of the text; None where any text does.

    It is a part of our structural tags. Raises ConfigError.
    """
    rule = _rule(f"{place}.custom.format", custom.get("format"))
    if rule is None:
        return None
    return {"type": "json_text", _KEYS[rule["syntax"]]: rule["definition"]}


def _rule(place: str, wanted: Any) -> Mapping[str, str] | None:
    if wanted is None:
        return None
    kind = wanted.get("type") if isinstance(wanted, Mapping) else None
    if kind not in ("text", "grammar"):
        fix = 'must be {"type": "text"} or {"type": "grammar", "grammar": {...}}'
        raise ConfigError(place, wanted, fix)
    require_known_fields(place, wanted, ("type", "grammar")[: 1 + (kind == "grammar")])
    if kind == "text":
        return None
    rule = wanted.get("grammar")
    if not isinstance(rule, Mapping):
        fix = 'must be {"syntax": "lark" or "regex", "definition": a str}'
        raise ConfigError(f"{place}.grammar", rule, fix)
    require_known_fields(f"{place}.grammar", rule, ("syntax", "definition"))
    require_one_of(f"{place}.grammar.syntax", rule.get("syntax"), _KEYS)
    if not isinstance(rule.get("definition"), str):
        raise ConfigError(f"{place}.grammar.definition", rule.get("definition"), "must be a str")
    return rule


def as_function_call(call: Any) -> Any:
    """OpenAI's dict of a custom call, as the call of a function; others stay as they are."""
    custom = call.get("custom") if is_custom(call) else None
    if not isinstance(custom, Mapping):
        return call
    function = {"name": custom.get("name"), "arguments": {INPUT: custom.get(INPUT)}}
    return {
        **{k: v for k, v in call.items() if k != "custom"},
        "type": "function",
        "function": function,
    }


_BEGIN = f'{{"{INPUT}": "'
# Half of a surrogate pair waits for the other one, if that may still come.
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_WHOLE = re.compile(
    rf'(?:[^"\\]|{_HIGH}{_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}|\\[^u]|{_HIGH}(?=[^\\]|\\[^u]))*',
    re.DOTALL,
)


class InputReader:
    """The text of a custom call, while the pieces of its arguments come as JSON."""

    def __init__(self) -> None:
        self.text = ""
        self._written = ""
        self._at = len(_BEGIN)

    def feed(self, arguments: str) -> str:
        """What the next piece of the JSON adds to the text."""
        self._written += arguments
        found = _WHOLE.match(self._written, min(self._at, len(self._written)))
        if found is None or len(self._written) < self._at:
            return ""
        self._at = found.end()
        more: str = json.loads(f'"{found[0]}"', strict=False)
        self.text += more
        return more
