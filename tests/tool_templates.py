"""How chat templates of public models write tools, calls and results, in as few lines as tell them apart.

Written after the models' own templates (Apache-2.0 or MIT: Qwen2.5, Qwen3-Coder, Qwen3.5, Mistral v3, v7 and v13,
Granite 3.3, Phi-4-mini, SmolLM3, DeepSeek-V3.1, GLM-4.6, MiniMax-M2, Seed-OSS, Gemma 4) and the published prompt
formats of Llama 3.1, LFM2, Firefunction and Command R+.
"""

_TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
_HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "\n</tools><|im_end|>\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' and message.tool_calls %}"
    "<|im_start|>assistant{% if message.content %}\n{{ message.content }}{% endif %}"
    "{% for tool_call in message.tool_calls %}{% if tool_call.function %}{% set tool_call = tool_call.function %}"
    "{% endif %}\n<tool_call>\n"
    '{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}\n</tool_call>{% endfor %}'
    "<|im_end|>\n{% elif message.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response><|im_end|>\n{% else %}" + _TURN + "{% endif %}{% endfor %}"
)
_QWEN3_CODER = _HERMES[: _HERMES.index("\n<tool_call>\n")] + (
    "\n<tool_call>\n<function={{ tool_call.name }}>\n{% for name, value in tool_call.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% elif message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n{% else %}" + _TURN + "{% endif %}{% endfor %}"
)


# One that writes arguments of a call as XML, after Qwen3-Coder's.
def _xml_template(opening: str, call: str, argument: str, closing: str) -> str:
    return _HERMES[: _HERMES.index("{% for tool_call")] + (
        f"\n{opening}{{% for tool_call in message.tool_calls %}}{{% set tool_call = tool_call.function %}}{call}"
        f"{{% for name, value in tool_call.arguments.items() %}}{argument}{{% endfor %}}{closing}<|im_end|>\n"
        + _HERMES[_HERMES.index("{% elif message.role == 'tool' %}") :]
    )


_VALUE = "{{ value if value is string else value | tojson }}"
_MISTRAL_RESULT = (
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}"
    "[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]{% elif message.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "[INST]{{ message.content }}[/INST]{% else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
_MISTRAL_CALLS = (
    "{% for message in messages %}{% if message.tool_calls %}OPENING{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]</s>" + _MISTRAL_RESULT
)
_LLAMA = (
    "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ message.tool_calls[0].function.name }}", "parameters": '
    "{{ message.tool_calls[0].function.arguments | tojson }}}<|eot_id|>{% elif message.role in ['tool', 'ipython'] %}"
    "<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>{% else %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{% if tools and loop.first %}"
    "Given the following functions, please respond with a JSON for a function call.{% for tool in tools %}"
    "{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}{{ message.content }}<|eot_id|>{% endif %}{% endfor %}"
)
_GRANITE = (
    "{% if tools %}<|start_of_role|>system<|end_of_role|>When a tool is required to answer the user's query, respond "
    "only with <|tool_call|> followed by a JSON list of tools used.<|end_of_text|>\n"
    "<|start_of_role|>available_tools<|end_of_role|>{{ tools | tojson(indent=4) }}<|end_of_text|>\n{% endif %}"
    "{% for message in messages %}<|start_of_role|>{{ message.role }}<|end_of_role|>{{ message.content }}"
    "<|end_of_text|>\n{% endfor %}"
)
_PHI = (
    "{% for message in messages %}{% if message.role == 'system' and message.tools %}<|system|>{{ message.content }}"
    "<|tool|>{{ message.tools }}<|/tool|><|end|>{% else %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endif %}"
    "{% endfor %}"
)
_LFM2 = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if tools and loop.first %}"
    "<|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>{% endif %}{{ message.content }}"
    "{% if message.tool_calls %}<|tool_call_start|>[{% for call in message.tool_calls %}{{ call.function.name }}("
    "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %}){% if not loop.last %}, {% endif %}{% endfor %}]<|tool_call_end|>"
    "{% endif %}<|im_end|>\n{% endfor %}"
)
# LFM2's own, which only lists tools; LFM2.5's, without control tokens around the list; and one that shows past calls.
_LFM2_LIST = (
    "{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}<|tool_list_end|>"
    "<|im_end|>\n{% endif %}{% for message in messages %}" + _TURN + "{% endfor %}"
)
_LFM25_LIST = (
    "{% if tools %}<|im_start|>system\n{{ 'List of tools: [' }}{% for tool in tools %}{{ tool | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]<|im_end|>\n{% endif %}{% for message in messages %}"
    + _TURN
    + "{% endfor %}"
)
_LFM25_CALLS = _LFM2.replace(
    "{{ name }}={{ value | tojson }}",
    "{{ name }}={% if value is string %}'{{ value }}'{% elif value is mapping %}{{ value | tojson }}"
    "{% else %}{{ value | string }}{% endif %}",
)
# After Qwen3.5's: the generation prompt opens the reasoning, and past reasoning is shown after the last question alone.
_QWEN35 = (
    "{% if tools %}<|im_start|>system\n# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}"
    "\n</tools>\n<tool_call>\n<function=example_function_name>\n</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% set last = namespace(user=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set last.user = loop.index0 %}{% endif %}{% endfor %}{% if last.user < 0 %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|im_start|>assistant\n{% if loop.index0 > last.user %}<think>\n"
    "{{ message.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' if not loop.first }}<tool_call>\n"
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% elif message.role == 'tool' %}<|im_start|>user\n"
    "<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n{% else %}" + _TURN + "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n\n</think>\n\n' if enable_thinking is false else '<think>\n' }}{% endif %}"
)
_FIREFUNCTION = (  # it works with tools alone
    "{% for tool in functions or tools %}{{ tool.function.name }}{{ tool.function.missing.other }}{% endfor %}"
)
_DEEPSEEK = (
    "{% if tools %}## Tools\n{{ tools | tojson }}{% endif %}{% for message in messages %}{% if message.tool_calls %}"
    "<｜Assistant｜></think><｜tool▁calls▁begin｜>{% for call in message.tool_calls %}<｜tool▁call▁begin｜>"
    "{{ call.function.name }}<｜tool▁sep｜>{{ call.function.arguments }}<｜tool▁call▁end｜>{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% elif message.role == 'tool' %}<｜tool▁output▁begin｜>"
    "{{ message.content }}<｜tool▁output▁end｜>{% else %}{{ message.content }}{% endif %}{% endfor %}"
)
_FUNCTOOLS = (
    "{% for message in messages %}{{ message.role }}: {% if tools and loop.first %}{{ tools | tojson }}{% endif %}"
    "{{ message.content }}{% if message.tool_calls %} functools[{% for call in message.tool_calls %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}\n{% endfor %}"
)
# After FunctionGemma's published format.
_FUNCTION_GEMMA = (
    "{% for tool in tools or [] %}declaration:{{ tool.function.name }}"
    "{description:<escape>{{ tool.function.description }}<escape>}{% endfor %}"
    "{% for message in messages %}<start_of_turn>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}<start_function_call>call:{{ call.function.name }}{{ '{' }}"
    "{% for name, value in call.function.arguments | dictsort %}"
    "{{ name }}:{{ '<escape>' + value + '<escape>' if value is string else value | tojson }}{{ ',' if not loop.last }}"
    "{% endfor %}}<end_function_call>{% endfor %}{{ message.content }}<end_of_turn>\n{% endfor %}"
)
# After Gemma 4's: results follow their calls in the model's turn, and a prompt without thinking has an empty thought.
_GEMMA4_WORDS = (
    "{% macro write(value) %}{% if value is string %}<|\"|>{{ value }}<|\"|>{% elif value is mapping %}{{ '{' }}"
    "{% for key, each in value | dictsort %}{{ key }}:{{ write(each) }}{{ ',' if not loop.last }}{% endfor %}{{ '}' }}"
    "{% elif value is sequence %}[{% for each in value %}{{ write(each) }}{{ ',' if not loop.last }}{% endfor %}]"
    "{% else %}{{ value | tojson }}{% endif %}{% endmacro %}"
    "{% macro said(text) %}{% set kept = namespace(text='') %}{% for part in text.split('<channel|>') %}"
    "{% set kept.text = kept.text + part.split('<|channel>')[0] %}{% endfor %}{{ kept.text | trim }}{% endmacro %}"
    "{% macro result(name, value) %}<|tool_response>response:{{ name }}{value:{{ write(value) }}}<tool_response|>"
    "{% endmacro %}{{ bos_token }}{% set begins = messages[0].role in ['system', 'developer'] %}"
    "{% if enable_thinking or tools or begins %}<|turn>system\n{{ '<|think|>\n' if enable_thinking }}"
    "{{ messages[0].content | trim if begins }}{% for tool in tools or [] %}{% set tool = tool.function %}"
    '<|tool>declaration:{{ tool.name }}{description:<|"|>{{ tool.description }}<|"|>,'
    "parameters:{{ write(tool.parameters or {}) }}}<tool|>{% endfor %}<turn|>\n{% endif %}"
    "{% set rest = messages[1:] if begins else messages %}{% set last = namespace(user=-1, part='', role='') %}"
    "{% for message in rest %}{% if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
)
_GEMMA4_CALLS = (
    "{% if message.tool_calls and message.reasoning_content and loop.index0 > last.user %}"
    "<|channel>thought\n{{ message.reasoning_content }}\n<channel|>{% endif %}"
    "{% for call in message.tool_calls or [] %}{% set last.part = 'call' %}<|tool_call>call:{{ call.function.name }}"
    "{{ write(call.function.arguments) }}<tool_call|>{% endfor %}"
)
_GEMMA4_END = (
    "{% set content = message.content or '' %}{{ said(content) if message.role == 'assistant' else content | trim }}"
    "{% if (last.part != 'result' or content) and not goes_on %}<turn|>\n{% endif %}"
)
_GEMMA4_PROMPT = (
    "{% if add_generation_prompt %}{{ '<|turn>model\n' if last.part != 'result' }}"
    "{{ '<|channel>thought\n<channel|>' if not enable_thinking }}{% endif %}"
)
_GEMMA4 = (
    _GEMMA4_WORDS
    + "{% for message in rest %}{% if message.role != 'tool' %}{% set last.part = '' %}"
    + "{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' "
    + "if message.role != 'assistant' or last.role != 'assistant' }}{% set last.role = message.role %}"
    + _GEMMA4_CALLS
    + "{% set next = namespace(role='tool') %}{% for each in rest[loop.index:] if next.role == 'tool' %}"
    + "{% set next.role = each.role %}{% for call in message.tool_calls or [] if next.role == 'tool' and "
    + "call.id == each.tool_call_id %}{{ result(call.function.name, each.content) }}{% set last.part = 'result' %}"
    + "{% endfor %}{% endfor %}{% set goes_on = message.role == next.role == 'assistant' %}"
    + _GEMMA4_END
    + "{% endif %}{% endfor %}"
    + _GEMMA4_PROMPT
)
# The first one, which reads the results in the message that calls.
_GEMMA4_FIRST = (
    _GEMMA4_WORDS
    + "{% for message in rest %}{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' "
    + "if last.part != 'result' or not message.tool_calls }}{% set last.part = '' %}"
    + _GEMMA4_CALLS
    + "{% for each in message.tool_responses or [] %}{{ result(each.name, each.response) }}"
    + "{% set last.part = 'result' %}{% endfor %}"
    + _GEMMA4_END
    + "{% endfor %}"
    + _GEMMA4_PROMPT
)
# After gpt-oss's published format. As there, reasoning is shown only beside a call that no later text answers.
_HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}"
    "{% if builtin_tools %}\n# Tools\n{{ builtin_tools | join }}{% endif %}<|end|>"
    "{% set begins = messages[0].role in ['system', 'developer'] %}{% if begins or tools %}"
    "<|start|>developer<|message|>{% if begins %}# Instructions\n\n{{ messages[0].content }}{% endif %}{% if tools %}"
    "# Tools\n\nnamespace functions {{ '{' }}{% for tool in tools %}\n// {{ tool.function.description }}\n"
    "type {{ tool.function.name }} = any;{% endfor %}}{% endif %}<|end|>{% endif %}"
    "{% set rest = messages[1:] if begins else messages %}{% set last = namespace(name=none) %}"
    "{% for message in rest %}{% if message.role == 'assistant' and 'tool_calls' in message %}"
    "{% set later = namespace(found=false) %}{% for each in rest[loop.index:] %}"
    "{% if each.role == 'assistant' and 'tool_calls' not in each %}{% set later.found = true %}{% endif %}{% endfor %}"
    "{% if message.content and message.thinking %}{{ raise_exception('content and thinking') }}"
    "{% elif (message.content or message.thinking) and not later.found %}"
    "{{ '<|start|>assistant<|channel|>analysis<|message|>' + (message.content or message.thinking) + '<|end|>' }}"
    "{% endif %}{% set last.name = message.tool_calls[0].function.name %}"
    "{{ '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' }}"
    "{{ message.tool_calls[0].function.arguments | tojson }}<|call|>{% elif message.role == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}"
    "{% elif message.role == 'tool' %}{% if last.name is none %}{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>{{ message.content | tojson }}"
    "<|end|>{% elif message.role == 'user' %}{{ '<|start|>user<|message|>' + message.content + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_PLAIN = "{% for message in messages %}" + _TURN + "{% endfor %}"
_ALTERNATING = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ message.role }}\n{{ message.content }}<end_of_turn>\n{% endfor %}"
)

TEMPLATES = {
    "hermes": _HERMES,
    "qwen3-coder": _QWEN3_CODER,
    "mistral": _MISTRAL_CALLS.replace("OPENING", "[TOOL_CALLS]["),
    "mistral-v3": _MISTRAL_CALLS.replace("OPENING", "[TOOL_CALLS] ["),
    "mistral-v11": (
        "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
        "[TOOL_CALLS]{{ call.function.name }}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}</s>"
    ) + _MISTRAL_RESULT,
    "mistral-call-id": (
        "{% for message in messages %}{% if message.tool_calls %}{% for call in message.tool_calls %}"
        "[TOOL_CALLS]{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}"
        "{% endfor %}</s>"
    ) + _MISTRAL_RESULT,
    "glm-4.5": _xml_template(
        "",
        "<tool_call>{{ tool_call.name }}\n",
        f"<arg_key>{{{{ name }}}}</arg_key>\n<arg_value>{_VALUE}</arg_value>\n",
        "</tool_call>{% endfor %}",
    ),
    "minimax-m2": _xml_template(
        "<minimax:tool_call>\n",
        '<invoke name="{{ tool_call.name }}">\n',
        f'<parameter name="{{{{ name }}}}">{_VALUE}</parameter>\n',
        "</invoke>\n{% endfor %}</minimax:tool_call>",
    ),
    "seed-oss": _xml_template(
        "",
        "<seed:tool_call>\n<function={{ tool_call.name }}>\n",
        f"<parameter={{{{ name }}}}>{_VALUE}</parameter>\n",
        "</function>\n</seed:tool_call>{% endfor %}",
    ),
    "llama": _LLAMA,
    "granite": _GRANITE,
    "phi-4-mini": _PHI,
    "lfm2": _LFM2,
    "deepseek-v3.1": _DEEPSEEK,
    "functools": _FUNCTOOLS,
    "functiongemma": _FUNCTION_GEMMA,
    "gemma-4": _GEMMA4,
    "harmony": _HARMONY,
    "json": _PLAIN,
}  # fmt: skip
ALTERNATING = _ALTERNATING
LFM2_LISTS = {"<|tool_list_start|>": _LFM2_LIST, "List of tools: [": _LFM25_LIST}
LFM25_CALLS = _LFM25_CALLS
QWEN35 = _QWEN35
GEMMA4_FIRST = _GEMMA4_FIRST
TOOLS_ALONE = _FIREFUNCTION
