"""One output for each tool-call parser of vLLM, in the format that the parser documents."""

from __future__ import annotations

_NS = "]<]minimax[>["
_DSML = "｜DSML｜"
_QWEN = "<function=bash>\n<parameter=command>\npytest -q\n</parameter>\n</function>"
_GLM = "<arg_key>command</arg_key><arg_value>pytest -q</arg_value>"
_JSON = '{"name": "bash", "arguments": {"command": "pytest -q"}}'
_PARAMETERS = '{"name": "bash", "parameters": {"command": "pytest -q"}}'
_PYTHONIC = '[bash(command="pytest -q")]'
_ARGUMENTS = '{"command": "pytest -q"}'


def _invoke(calls: str, prefix: str = "", attributes: str = "") -> str:
    """The call in tags that begin with ``prefix``."""
    parameter = f'<{prefix}parameter name="command"{attributes}>pytest -q</{prefix}parameter>'
    call = f'<{prefix}invoke name="bash">\n{parameter}\n</{prefix}invoke>'
    return f"<{prefix}{calls}>\n{call}\n</{prefix}{calls}>"


SAMPLES: dict[str, str] = {
    "apertus": f'<|tools_prefix|>[{{"bash": {_ARGUMENTS}}}]<|tools_suffix|>',
    "cohere_command3": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "bash", '
        f'"parameters": {_ARGUMENTS}}}\n]<|END_ACTION|>'
    ),
    "cohere_command4": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "bash", '
        f'"parameters": {_ARGUMENTS}}}\n]<|END_ACTION|>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>bash\n"
        f"```json\n{_ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>"
        f"{_ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v32": _invoke("function_calls", _DSML, ' string="true"'),
    "deepseek_v4": _invoke("tool_calls", _DSML, ' string="true"'),
    "deepseek_v41": _invoke("calls", f"{_DSML} ", ' string="true"'),
    "dots": _invoke("dots_function_call"),
    "ernie45": f"Look.\n</think>\n\n\n<tool_call>\n{_JSON}\n</tool_call>\n",
    "functiongemma": ("<start_function_call>call:bash{command:<escape>pytest -q<escape>}<end_function_call>"),
    "gemma4": '<|tool_call>call:bash{command:<|"|>pytest -q<|"|>}<tool_call|>',
    "gigachat3": f"I run them.<|function_call|>{_JSON}</s>",
    "glm45": ("<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>pytest -q</arg_value>\n</tool_call>"),
    "glm47": f"<tool_call>bash{_GLM}</tool_call>",
    "granite": f"<|tool_call|> [{_JSON}]",
    "granite-20b-fc": f"<function_call> {_JSON}",
    "granite4": f"<tool_call>\n{_JSON}\n</tool_call>",
    "hermes": f"<tool_call>\n{_JSON}\n</tool_call>",
    "hunyuan_a13b": f"<tool_calls>[{_JSON}]</tool_calls>",
    "hy_v3": (
        "<tool_calls>\n<tool_call>bash<tool_sep>\n<arg_key>command</arg_key>\n"
        "<arg_value>pytest -q</arg_value>\n</tool_call>\n</tool_calls>"
    ),
    "hy_v4": f"<tool_calls><tool_call>bash{_GLM}</tool_call></tool_calls>",
    "inkling": (
        f'<|message_model|><|content_invoke_tool_json|>{{"name":"bash","args":{_ARGUMENTS}}}<|end_message|>'
    ),
    "internlm": f"I run them.<|action_start|><|plugin|>\n{_PARAMETERS}<|action_end|>\n",
    "jamba": f"<tool_calls>[\n    {_JSON}\n]</tool_calls>",
    "k2_horizon": (
        "<ifm|tool_calls><ifm|tool_call>bash<ifm|arg_key>command</ifm|arg_key>"
        "<ifm|arg_value>pytest -q</ifm|arg_value></ifm|tool_call>"
        "</ifm|tool_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.bash:0<|tool_call_argument_begin|>"
        f"{_ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="bash" index="1"<|sep|>'
        '<|open|>argument key="command" type="string"<|sep|>pytest -q<|close|>argument<|sep|>'
        "<|close|>call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": f"<|tool_call_start|>{_PYTHONIC}<|tool_call_end|>",
    "ling3": f"<tool_call>bash{_GLM}</tool_call>",
    "llama3_json": f"<|python_tag|>{_PARAMETERS}<|eom_id|>",
    "llama4_json": _PARAMETERS,
    "llama4_pythonic": f"<|python_start|>{_PYTHONIC}<|python_end|>",
    "longcat": f"<longcat_tool_call>\n{_JSON}\n</longcat_tool_call>",
    "mimo": f"<tool_call>\n{_QWEN.replace(chr(10), '')}\n</tool_call>",
    "minicpm5": '<function name="bash"><param name="command">pytest -q</param></function>',
    "minimax_m2": _invoke("minimax:tool_call"),
    "minimax_m3": (
        f'{_NS}<tool_call>\n{_NS}<invoke name="bash">\n{_NS}<command>pytest -q{_NS}</command>\n'
        f"{_NS}</invoke>\n{_NS}</tool_call>"
    ),
    "mistral": f"[TOOL_CALLS]bash[ARGS]{_ARGUMENTS}</s>",
    "muse_glimmer": (
        "<|start|>assistant to=bash<|message|>" + _invoke("function_calls", "atem:") + "<|eom|>"
    ),
    "olmo3": '<function_calls>\nbash(command="pytest -q")\n</function_calls>',
    "openai": (f"<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{_ARGUMENTS}<|call|>"),
    "phi4_mini_json": f"functools[{_JSON}]",
    "plamo3": (
        "<|plamo:begin_tool_requests:plamo|><|plamo:begin_tool_request:plamo|>"
        "<|plamo:begin_tool_name:plamo|>bash<|plamo:end_tool_name:plamo|>"
        f"<|plamo:begin_tool_arguments:plamo|><|plamo:constrain|>json<|plamo:msg|>{_ARGUMENTS}"
        "<|plamo:end_tool_arguments:plamo|><|plamo:end_tool_request:plamo|><|plamo:end_tool_requests:plamo|>"
    ),
    "poolside_v1": f"<tool_call>bash\n{_GLM}</tool_call>",
    "pythonic": _PYTHONIC,
    "qwen3_coder": f"<tool_call>\n{_QWEN}\n</tool_call>",
    "qwen3_json": f"<tool_call>\n{_JSON}\n</tool_call>",
    "qwen3_xml": f"<tool_call>\n{_QWEN}\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n{_QWEN}\n</seed:tool_call>",
    "step3": (
        "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="bash"><steptml:parameter name="command">pytest -q</steptml:parameter>'
        "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>"
    ),
    "step3p5": f"<tool_call>\n{_QWEN}\n</tool_call>",
    "xlam": f"[{_JSON}]",
}
"""Name of a parser → an output that runs ``pytest -q`` with the tool ``bash``."""

WITHOUT_FORMAT = frozenset({"hf"})
"""Parsers without a format of their own. ``hf`` takes the format from the checkpoint."""
