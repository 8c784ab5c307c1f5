"""A call of each of SGLang's tool parsers, as its model writes it."""

# ruff: noqa: RUF001

FORMS = {
    "apertus2509": '<|tools_prefix|>[{"weather": {"city": "Oslo"}}]<|tools_suffix|>',
    "cohere_command4": (
        "<|START_ACTION|>"
        '[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Oslo"}}]'
        "<|END_ACTION|>"
    ),
    "deepseekv3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Oslo"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv31": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>"
        '{"city": "Oslo"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    ),
    "deepseekv32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "deepseekv4": (
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
    "dots": (
        "<dots_function_call>"
        '{"name": "weather", "arguments": {"city": "Oslo"}}</dots_function_call>'
    ),
    "gemma4": '<|tool_call>call:weather{city:<|"|>Oslo<|"|>}<tool_call|>',
    "gigachat3": '<|function_call|>{"name": "weather", "arguments": {"city": "Oslo"}}',
    "gigachat35": (
        '<｜GCML｜tool_calls>\n<｜GCML｜invoke name="weather">\n'
        '<｜GCML｜parameter name="city" string="true">Oslo</｜GCML｜parameter>\n'
        "</｜GCML｜invoke>\n</｜GCML｜tool_calls>"
    ),
    "glm": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    ),
    "glm45": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    ),
    "glm47": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
    "gpt-oss": (
        "<|start|>assistant<|channel|>commentary to=functions.weather<|constrain|>"
        'json<|message|>{"city": "Oslo"}<|call|>'
    ),
    "hermes": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "hunyuan": (
        "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>"
        "Oslo</arg_value>\n</tool_call>\n</tool_calls>"
    ),
    "inkling": (
        "<|message_model|>weather<|content_invoke_tool_json|>"
        '{"name":"weather","args":{"city": "Oslo"}}<|end_message|>'
    ),
    "interns1": (
        "<|action_start|> <|plugin|>\n"
        '{"name": "weather", "parameters": {"city": "Oslo"}}<|action_end|>'
    ),
    "iquest_q1": (
        "<iquest_tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>"
        "\n</iquest_tool_call>"
    ),
    "k2_horizon": (
        "<ifm|tool_calls><ifm|tool_call>"
        '{"name": "weather", "arguments": {"city": "Oslo"}}</ifm|tool_call>'
        "</ifm|tool_calls>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>"
        'functions.weather:0<|tool_call_argument_begin|>{"city": "Oslo"}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    ),
    "kimi_k3": (
        '<|open|>tools<|sep|><|open|>call tool="weather" index="1"<|sep|><|open|>'
        'argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|><|close|>'
        "call<|sep|><|close|>tools<|sep|>"
    ),
    "lfm2": '<|tool_call_start|>[weather(city="Oslo")]<|tool_call_end|>',
    "ling3": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    ),
    "llama3": '<|python_tag|>{"name": "weather", "arguments": {"city": "Oslo"}}',
    "mimo": (
        "<tool_call>\n<function=weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
        "</tool_call>"
    ),
    "minicpm5": '<function name="weather"><param name="city">Oslo</param></function>',
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
        "Oslo</parameter>\n</invoke>\n</minimax:tool_call>"
    ),
    "minimax-m3": (
        ']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="weather">]<]minimax[>'
        "[<city>Oslo]<]minimax[>[</city>]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>"
    ),
    "mistral": '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}}]',
    "muse": (
        'to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
        '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n'
        "</atem:function_calls>"
    ),
    "nanbeige": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "poolside_v1": (
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
    ),
    "pythonic": '[weather(city="Oslo")]',
    "qwen": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen25": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
    "qwen3_coder": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "spark25": "<tool_call>weather<arg_key>city</arg_key><arg_value>Oslo</arg_value></tool_call>",
    "step3": (
        "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
        '<steptml:invoke name="weather">\n<steptml:parameter name="city">'
        "Oslo</steptml:parameter>\n</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜>"
    ),
    "step3p5": (
        "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n"
        "</function>\n</tool_call>"
    ),
    "trinity": '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>',
}
# DeepSeek-V4.1's tags are those of V4 with spaces; Beam's and response templates come with a model.
UNFORMED = {"deepseekv41", "beam", "response_template"}
