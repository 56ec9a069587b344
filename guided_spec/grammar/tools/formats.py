"""The tool formats by name, and which of them a chat template is of."""

from __future__ import annotations

from guided_spec.grammar.tools.arguments import ArgumentForm
from guided_spec.grammar.tools.delimited import DelimitedFormat
from guided_spec.grammar.tools.harmony import HarmonyFormat
from guided_spec.grammar.tools.kimi_k3 import KimiK3Format
from guided_spec.kinds import require_one_of

_DEEPSEEK_OPENING, _DEEPSEEK_CLOSING = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL, _DEEPSEEK_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_DEEPSEEK_JSON = "{name}\n```json\n{arguments}\n```"
_DSML_CALL = '<｜DSML｜invoke name="{name}">\n{arguments}</｜DSML｜invoke>\n'
_DSML_ARGUMENT = '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n'
_MISTRAL_CALL = '{"name": "{name}", "arguments": {arguments}}'

ToolFormat = DelimitedFormat | HarmonyFormat | KimiK3Format
"""One family's way to write calls: a grammar and the reader of its texts.

name: what ``tool_format`` calls it. hints: a template that holds all of them is of the family.
literals: what it writes besides names and arguments. frames_text: it reads texts without tools as
well. holds_reasoning: the reasoning is part of it. reasoning: how the family marks it, where the
template does not say so in one piece.
"""

_FORMATS: tuple[ToolFormat, ...] = (
    HarmonyFormat(),
    KimiK3Format(),
    DelimitedFormat(
        name="deepseek_v4_1",
        hints=("｜DSML｜", " calls>"),
        trigger="<｜DSML｜ calls>",
        opening="<｜DSML｜ calls>\n",
        call=_DSML_CALL.replace("｜DSML｜", "｜DSML｜ "),
        closing="</｜DSML｜ calls>",
        argument=ArgumentForm(_DSML_ARGUMENT.replace("｜DSML｜", "｜DSML｜ "), none="\n"),
    ),
    DelimitedFormat(
        name="deepseek_v4",
        hints=("｜DSML｜", "tool_calls>"),
        trigger="<｜DSML｜tool_calls>",
        opening="<｜DSML｜tool_calls>\n",
        call=_DSML_CALL,
        closing="</｜DSML｜tool_calls>",
        argument=ArgumentForm(_DSML_ARGUMENT),
    ),
    DelimitedFormat(
        name="deepseek_v3_2",
        hints=("｜DSML｜", "function_calls>"),
        trigger="<｜DSML｜function_calls>",
        opening="<｜DSML｜function_calls>\n",
        call=_DSML_CALL,
        closing="</｜DSML｜function_calls>",
        argument=ArgumentForm(_DSML_ARGUMENT, none="\n"),
    ),
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
        argument=ArgumentForm('<parameter name="{key}">{value}</parameter>\n'),
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
        argument=ArgumentForm("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
    ),
    DelimitedFormat(
        name="glm_4_5",
        hints=("<arg_key>",),
        trigger="<tool_call>",
        call="<tool_call>{name}\n{arguments}</tool_call>",
        argument=ArgumentForm("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"),
    ),
    DelimitedFormat(
        name="mimo",  # V2
        hints=("<tool_call><function=",),
        trigger="<tool_call>",
        call="<tool_call><function={name}>{arguments}</function></tool_call>",
        argument=ArgumentForm("<parameter={key}>{value}</parameter>"),
    ),
    DelimitedFormat(
        name="qwen3_coder",  # and Qwen 3.5
        hints=("<tool_call>", "<function="),
        trigger="<tool_call>",
        call="<tool_call>\n<function={name}>\n{arguments}</function>\n</tool_call>",
        argument=ArgumentForm("<parameter={key}>\n{value}\n</parameter>\n"),
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
    require_one_of("tool_format", name, TOOL_FORMATS)
    return TOOL_FORMATS[name]


def find_tool_format(template: str) -> ToolFormat | None:
    """The format of a chat template's family; None where it is not known."""
    for known in _FORMATS:
        if all(hint in template for hint in known.hints):
            return known
    return None
