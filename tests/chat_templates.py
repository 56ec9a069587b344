"""Small chat templates in the manner of model families: their markers, our words."""

from __future__ import annotations

_CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {% for tool in tools %}{{ tool | tojson }}\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}%CALL%{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CALLS = "{% for call in m.tool_calls or [] %}%CALL%{% endfor %}"
_HERMES = (
    '\n<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>"
)
_ARGUMENTS = "{% for key, value in call.function.arguments.items() %}%ONE%{% endfor %}"
_VALUE = "{{ value if value is string else value | tojson }}"
_GLM_45 = "\n<tool_call>{{ call.function.name }}\n%ARGS%</tool_call>".replace(
    "%ARGS%",
    _ARGUMENTS.replace(
        "%ONE%", f"<arg_key>{{{{ key }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n"
    ),
)
_GLM_47 = "<tool_call>{{ call.function.name }}%ARGS%</tool_call>".replace(
    "%ARGS%",
    _ARGUMENTS.replace("%ONE%", f"<arg_key>{{{{ key }}}}</arg_key><arg_value>{_VALUE}</arg_value>"),
)
_CODER = (
    "\n<tool_call>\n<function={{ call.function.name }}>\n%ARGS%</function>\n</tool_call>".replace(
        "%ARGS%",
        _ARGUMENTS.replace("%ONE%", f"<parameter={{{{ key }}}}>\n{_VALUE}\n</parameter>\n"),
    )
)
_MINIMAX = '<invoke name="{{ call.function.name }}">\n%ARGS%</invoke>\n'.replace(
    "%ARGS%",
    _ARGUMENTS.replace("%ONE%", f'<parameter name="{{{{ key }}}}">{_VALUE}</parameter>\n'),
)
_MIMO = "<tool_call><function={{ call.function.name }}>%ARGS%</function></tool_call>".replace(
    "%ARGS%", _ARGUMENTS.replace("%ONE%", f"<parameter={{{{ key }}}}>{_VALUE}</parameter>")
)
_EXAONE = _HERMES.replace("\n", "")
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.tool_calls %}%CALLS%{{ eos_token }}"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content }}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if tools and messages[-1].role != 'user' %}{{ tools | tojson }}{% endif %}"
)
_MISTRAL_LIST = (
    '{% for call in m.tool_calls %}{"name": "{{ call.function.name }}", "arguments": '
    '{{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{{ ', ' if not loop.last else ']' }}{% endfor %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>"
    "{% else %}<｜Assistant｜>{{ m.content }}{% if m.tool_calls %}<｜tool▁calls▁begin｜>"
    "{% for call in m.tool_calls %}%CALL%<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
    "{% endif %}{% endif %}{% endfor %}{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"
)


_DSML_CALL = '<｜DSML｜invoke name="{{ call.function.name }}">\n%ARGS%</｜DSML｜invoke>\n'.replace(
    "%ARGS%",
    _ARGUMENTS.replace(
        "%ONE%",
        '<｜DSML｜parameter name="{{ key }}" string="'
        "{{ 'true' if value is string else 'false' }}\">" + _VALUE + "</｜DSML｜parameter>\n",
    )
    + "{% if not call.function.arguments %}%NONE%{% endif %}",
)
_DSML = _DEEPSEEK.replace("<｜tool▁calls▁begin｜>", "<｜DSML｜%BLOCK%>\n").replace(
    "%CALL%<｜tool▁call▁end｜>", _DSML_CALL
)
_DSML = _DSML.replace("<｜tool▁calls▁end｜>", "</｜DSML｜%BLOCK%>")

_KIMI_K3 = (
    "{% macro open(tag, attributes=[]) %}<|open|>{{ tag }}"
    '{% for key, value in attributes %} {{ key }}="{{ value }}"{% endfor %}<|sep|>{% endmacro %}'
    "{% macro close(tag) %}<|close|>{{ tag }}<|sep|>{% endmacro %}"
    "{% macro kind(value) %}{% if value is string %}string{% elif value is boolean %}boolean"
    "{% elif value is none %}null{% elif value is number %}number{% elif value is mapping %}object"
    "{% else %}array{% endif %}{% endmacro %}"
    "{% if tools %}{{ open('message', [('role', 'system'), ('type', 'tool-declare')]) }}"
    "{{ tools | tojson }}{{ close('message') }}<|end_of_msg|>{% endif %}"
    "{% for m in messages %}{{ open('message', [('role', m.role)]) }}"
    "{% if m.role == 'assistant' %}"
    "{{ open('think') }}{{ m.reasoning_content }}{{ close('think') }}{{ open('response') }}"
    "{{ m.content }}{{ close('response') }}{% if m.tool_calls %}{{ open('tools') }}"
    "{% for call in m.tool_calls %}"
    "{{ open('call', [('tool', call.function.name), ('index', loop.index)]) }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ open('argument', [('key', key), ('type', kind(value))]) }}"
    + _VALUE
    + "{{ close('argument') }}"
    "{% endfor %}{{ close('call') }}{% endfor %}{{ close('tools') }}{% endif %}"
    "{% else %}{{ m.content }}{% endif %}{{ close('message') }}<|end_of_msg|>{% endfor %}"
    "{% if add_generation_prompt %}{{ open('message', [('role', 'assistant')]) }}"
    "{{ open('response' if thinking is defined and not thinking else 'think') }}{% endif %}"
)


def _block(begin: str, call: str, end: str) -> str:
    calls = f"{{% for call in m.tool_calls %}}{call}{{% endfor %}}"
    return f"{{% if m.tool_calls %}}{begin}{calls}{end}{{% endif %}}"


PLAIN = _CHATML.replace("%CALL%", "")
"""Renders tools, and says nothing of how a call looks."""

THINKING = (
    _CHATML.replace("%CALL%", _HERMES)
    + "{% if opened %}<think>\n{% elif enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}"
)
"""Hermes, with reasoning that the model begins, that is begun (``opened``) or switched off."""

TEMPLATES = {
    "hermes": _CHATML.replace("%CALL%", _HERMES),
    "qwen3_coder": _CHATML.replace("%CALL%", _CODER),
    "glm_4_5": _CHATML.replace("%CALL%", _GLM_45),
    "glm_4_7": _CHATML.replace("%CALL%", _GLM_47),
    "mimo": _CHATML.replace("%CALL%", _MIMO),
    "exaone4": _CHATML.replace("%CALL%", _EXAONE) + "{# [|assistant|] #}",
    "kimi_k2": _CHATML.replace(
        _CALLS,
        _block(
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
            "{{ call.function.arguments | tojson }}<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ),
    ),
    "kimi_k3": _KIMI_K3,
    "minimax_m2": _CHATML.replace(
        _CALLS, _block("<minimax:tool_call>\n", _MINIMAX, "</minimax:tool_call>")
    ),
    "command_a": _CHATML.replace(
        _CALLS,
        _block(
            "<|START_ACTION|>[",
            '{{ "" if loop.first else "," }}\n    {"tool_call_id": "{{ loop.index0 }}", '
            '"tool_name": "{{ call.function.name }}", '
            '"parameters": {{ call.function.arguments | tojson }}}',
            "\n]<|END_ACTION|>",
        ),
    ),
    "llama3": (
        "{{ bos_token }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
        'Answer with {"name": a name, "parameters": a dict}. {{ tools | tojson }}<|eot_id|>'
        "{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        '{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "mistral": _MISTRAL.replace("%CALLS%", "[TOOL_CALLS] [" + _MISTRAL_LIST),
    "mistral_tekken": _MISTRAL.replace("%CALLS%", "[TOOL_CALLS][" + _MISTRAL_LIST),
    "mistral_v11": _MISTRAL.replace(
        "%CALLS%",
        "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}"
        "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
    ),
    "mistral_v13": _MISTRAL.replace(
        "%CALLS%",
        "{% for call in m.tool_calls %}[TOOL_CALLS]{{ call.function.name }}"
        "[ARGS]{{ call.function.arguments | tojson }}{% endfor %}",
    ),
    "deepseek_v3": _DEEPSEEK.replace(
        "%CALL%",
        "{{ '' if loop.first else '\n' }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
        "{{ call.function.name + '\n```json\n' + call.function.arguments + '\n```' }}",
    ),
    "deepseek_v3_1": _DEEPSEEK.replace(
        "%CALL%",
        "<｜tool▁call▁begin｜>{{ call.function.name }}<｜tool▁sep｜>"
        "{{ call.function.arguments | tojson }}",
    ),
    "deepseek_v4_1": _DSML.replace("%BLOCK%", "calls")
    .replace("%NONE%", "\n")
    .replace("｜DSML｜", "｜DSML｜ "),
    "deepseek_v3_2": _DSML.replace("%BLOCK%", "function_calls").replace("%NONE%", "\n"),
    "deepseek_v4": _DSML.replace("%BLOCK%", "tool_calls").replace("%NONE%", ""),
    "harmony": (
        "{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('one of the two') }}{% endif %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
        "{% endif %}<|start|>assistant to=functions.{{ m.tool_calls[0].function.name }}"
        "<|channel|>commentary <|constrain|>json<|message|>"
        "{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
        "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>"
        "{{ m.content }}<|end|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}
"""By the name of the format that each is of."""
