"""The tool formats by name, and the one that a chat template is of."""

from __future__ import annotations

from guided_spec.errors import ConfigError
from guided_spec.grammar.harmony import HarmonyFormat
from guided_spec.grammar.tool_format import DelimitedFormat, ToolFormat

__all__ = ["TOOL_FORMATS", "find_tool_format", "get_tool_format"]

_DEEPSEEK_OPENING, _DEEPSEEK_CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_JSON = "{name}\n```json\n{arguments}\n```"
_MISTRAL_CALL = '{"name": "{name}", "arguments": {arguments}}'

_FORMATS: tuple[ToolFormat, ...] = (
    HarmonyFormat(),
    DelimitedFormat(
        name="deepseek_v3",  # and R1
        hints=(_DEEPSEEK_OPENING, "```json"),
        trigger=_DEEPSEEK_OPENING,
        opening=_DEEPSEEK_OPENING,
        call=f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>{_DEEPSEEK_JSON}{_DEEPSEEK_END}",
        separator="\n",
        closing=_DEEPSEEK_CLOSING,
    ),
    DelimitedFormat(
        name="deepseek_v3_1",
        hints=(_DEEPSEEK_OPENING,),
        trigger=_DEEPSEEK_OPENING,
        opening=_DEEPSEEK_OPENING,
        call=f"{_DEEPSEEK_CALL}{{name}}<｜tool▁sep｜>{{arguments}}{_DEEPSEEK_END}",
        closing=_DEEPSEEK_CLOSING,
    ),
    DelimitedFormat(
        name="mistral_v11",  # Small 3.1 and 3.2
        hints=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    ),
    DelimitedFormat(
        name="mistral_v13",  # Magistral, Ministral 3
        hints=("[TOOL_CALLS]", "[ARGS]"),
        trigger="[TOOL_CALLS]",
        call="[TOOL_CALLS]{name}[ARGS]{arguments}",
    ),
    DelimitedFormat(
        name="mistral_tekken",  # Nemo
        hints=("[TOOL_CALLS][",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS][",
        call=_MISTRAL_CALL,
        separator=", ",
        closing="]",
    ),
    DelimitedFormat(
        name="mistral",  # 7B v0.3, Mixtral 8x22B
        hints=("[TOOL_CALLS]",),
        trigger="[TOOL_CALLS]",
        opening="[TOOL_CALLS] [",
        call=_MISTRAL_CALL,
        separator=", ",
        closing="]",
    ),
    DelimitedFormat(
        name="kimi_k2",  # and K2.5
        hints=("<|tool_calls_section_begin|>",),
        trigger="<|tool_calls_section_begin|>",
        opening="<|tool_calls_section_begin|>",
        call="<|tool_call_begin|>{id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
        closing="<|tool_calls_section_end|>",
        id_pattern="functions\\.{name}:[0-9]{1,4}",
    ),
    DelimitedFormat(
        name="minimax_m2",  # to M2.7
        hints=("<minimax:tool_call>",),
        trigger="<minimax:tool_call>",
        opening="<minimax:tool_call>\n",
        call='<invoke name="{name}">\n{arguments}</invoke>\n',
        closing="</minimax:tool_call>",
        argument='<parameter name="{key}">{value}</parameter>\n',
    ),
    DelimitedFormat(
        name="command_a",  # and R7B
        hints=("<|START_ACTION|>",),
        trigger="<|START_ACTION|>",
        opening="<|START_ACTION|>[\n    ",
        call='{"tool_call_id": "{id}", "tool_name": "{name}", "parameters": {arguments}}',
        separator=",\n    ",
        closing="\n]<|END_ACTION|>",
        id_pattern="[0-9]{1,4}",
    ),
    DelimitedFormat(
        name="glm_4_7",
        hints=("</arg_key><arg_value>",),
        trigger="<tool_call>",
        call="<tool_call>{name}{arguments}</tool_call>",
        argument="<arg_key>{key}</arg_key><arg_value>{value}</arg_value>",
    ),
    DelimitedFormat(
        name="glm_4_5",
        hints=("<arg_key>",),
        trigger="<tool_call>",
        call="<tool_call>{name}\n{arguments}</tool_call>",
        argument="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    DelimitedFormat(
        name="mimo",  # V2
        hints=("<tool_call><function=",),
        trigger="<tool_call>",
        call="<tool_call><function={name}>{arguments}</function></tool_call>",
        argument="<parameter={key}>{value}</parameter>",
    ),
    DelimitedFormat(
        name="qwen3_coder",  # and Qwen 3.5
        hints=("<tool_call>", "<function="),
        trigger="<tool_call>",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    DelimitedFormat(
        name="exaone4",
        hints=("<tool_call>", "[|assistant|]"),
        trigger="<tool_call>",
        call='<tool_call>{"name": "{name}", "arguments": {arguments}}</tool_call>',
    ),
    DelimitedFormat(
        name="hermes",  # Qwen 2.5 and 3, and many others
        hints=("<tool_call>",),
        trigger="<tool_call>",
        call='<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>',
    ),
    DelimitedFormat(
        name="llama3",  # Llama 3.1 to 3.3
        hints=("<|start_header_id|>", '"parameters": '),
        trigger='{"name": "',
        call='{"name": "{name}", "parameters": {arguments}}',
    ),
)

TOOL_FORMATS: dict[str, ToolFormat] = {known.name: known for known in _FORMATS}
"""By name; the first whose hints all stand in a chat template is its family's."""


def get_tool_format(name: str) -> ToolFormat:
    """The format of a name. Raises ConfigError."""
    if name not in TOOL_FORMATS:
        raise ConfigError("tool_format", name, f"must be one of {', '.join(TOOL_FORMATS)}")
    return TOOL_FORMATS[name]


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a chat template's family; None where it is not known."""
    for known in _FORMATS:
        if all(hint in template for hint in known.hints):
            return known
    return None
