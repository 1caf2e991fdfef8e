"""Chat templates render as in transformers, and cannot do anything harmful."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from adaptrt import ConfigError, RequestError
from adaptrt.runtime.chat_template import ChatTemplate
from support.tokenizers import byte_level

# Small templates in the style of supported families.
LLAMA_3 = """\
{{- bos_token }}
{%- set date = strftime_now("%Y") is string %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start|>system<|end|>\\n\\n" ~ system }}
{%- if tools is not none %}
    {{- "Functions:\\n" }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- eos_token }}
{%- for message in messages %}
    {%- if message.role == 'tool' or 'tool_calls' in message %}
        {%- if message.tool_calls %}
            {%- set call = message.tool_calls[0].function %}
            {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
        {%- else %}
            {{- "<|start|>ipython<|end|>" + message.content + eos_token }}
        {%- endif %}
    {%- else %}
        {{- '<|start|>' + message['role'] + '<|end|>\\n\\n' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start|>assistant<|end|>\\n\\n' }}
{%- endif %}
"""
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (loop.index0 % 2 == 0) %}
        {{- raise_exception("roles must alternate user and assistant") }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- else %}
        {% generation %}{{- " " + message["content"] + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}
"""
QWEN = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{%- set ns.last = messages|length - 1 - loop.index0 %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "system" and loop.first %}{%- continue %}{%- endif %}
    {{- '<|im_start|>' ~ message.role }}
    {%- if message.content is string %}{{- '\\n' ~ message.content.split('</think>')[-1].lstrip('\\n') }}{%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
        {%- if call.function.arguments is string %}
            {{- call.function.arguments }}
        {%- else %}
            {{- call.function.arguments | tojson }}
        {%- endif %}
        {{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
TEMPLATES = {"llama 3": LLAMA_3, "mistral": MISTRAL, "qwen": QWEN}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Says <what> the sky is like; 天気 & more",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
PLAIN = [{"role": "user", "content": " Grüße <b>'\"</b> \n"}]
LONGER = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "<think>\nhm</think>\n\nTwo."},
    {"role": "user", "content": "Three?"},
]
CALLED = [
    {"role": "user", "content": "Is it raining?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln", "n": [1, 2.5]}}}
        ],
    },
    {"role": "tool", "content": "no", "tool_call_id": "1"},
]


def save(directory: Path, template: str | None, **config: Any) -> Path:
    byte_level().save(str(directory / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(fields))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


def loaded(directory: Path, base: ChatTemplate | None = None) -> ChatTemplate:
    template = ChatTemplate.load(directory, base=base)
    assert template is not None
    return template


def of(template: str, **special_tokens: str) -> ChatTemplate:
    return ChatTemplate({"default": template}, special_tokens, "where.jinja")


CONVERSATIONS = [(PLAIN, None), (PLAIN, TOOLS), (LONGER, None), (LONGER, TOOLS)]


@pytest.mark.parametrize(
    ("family", "messages", "tools"),
    [
        *((family, *conversation) for family in TEMPLATES for conversation in CONVERSATIONS),
        *((family, CALLED, TOOLS) for family in ("llama 3", "qwen")),  # Mistral's template has no tools
    ],
)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(
    family: str, messages: Any, tools: Any, add_generation_prompt: bool, tmp_path: Path
) -> None:
    save(tmp_path, TEMPLATES[family])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
    )
    rendered = loaded(tmp_path).render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
    assert rendered == expected
    assert len(rendered) > 20


def test_variables_reach_the_template(tmp_path: Path) -> None:
    template = loaded(save(tmp_path, QWEN))
    assert template.render(PLAIN, variables={"enable_thinking": False}).endswith("assistant\n<think>\n\n</think>\n\n")
    assert template.render(PLAIN, variables={"enable_thinking": True}).endswith("assistant\n")
    with pytest.raises(RequestError, match="messages, tools cannot be given as a variable"):
        template.render(PLAIN, variables={"tools": [], "messages": []})


def test_openais_forms_become_what_templates_expect(tmp_path: Path) -> None:
    template = loaded(save(tmp_path, QWEN))
    parts = [{"type": "text", "text": "One"}, {"type": "text", "text": "two."}]
    assert "user\nOne\ntwo.<|im_end|>" in template.render([{"role": "user", "content": parts}])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "ü"}'}}
    rendered = template.render([*PLAIN, {"role": "assistant", "content": None, "tool_calls": [call]}])
    assert '"arguments": {"a": "ü"}}' in rendered
    assert call["function"] == {"name": "f", "arguments": '{"a": "ü"}'}  # the caller's value is unchanged


# Templates that read different formats of contents.
READS_TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
READS_PARTS = (
    "{% for m in messages %}[{{ m.role }}]"
    "{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
)
READS_BOTH = (
    "{% macro write(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}<{{ part['text'] }}>{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages %}[{{ m.role }}]{{ write(m.content) }}{% endfor %}"
)
READS_FIRST_PART = "{% for m in messages %}[{{ m.role }}]{{ m.content[0].text }}{% endfor %}"
PRINTS_JSON = "{% for m in messages %}[{{ m.role }}]{{ m.content | tojson }}{% endfor %}"
# Assistants' contents are texts, users' contents are lists.
READS_PARTS_OF_USERS = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}"
    "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% else %}{{ m.content + '.' }}{% endif %}{% endfor %}"
)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (READS_TEXTS, "one", "[user]one"),
        (READS_TEXTS, parts("one", "two"), "[user]one\ntwo"),
        (READS_TEXTS, parts(), "[user]"),
        (READS_PARTS, "one", "[user]<one>"),
        (READS_PARTS, parts("one", "two"), "[user]<one><two>"),
        (READS_PARTS, parts(), "[user]"),
        (READS_BOTH, "one", "[user]one"),
        (READS_BOTH, parts("one", "two"), "[user]<one><two>"),
        (READS_FIRST_PART, "one", "[user]one"),
        (READS_FIRST_PART, parts("one", "two"), "[user]one\ntwo"),
        (PRINTS_JSON, parts("one", "two"), '[user]"one\\ntwo"'),
        (READS_PARTS_OF_USERS, parts("one", "two"), "[user]<one><two>"),
    ],
)
def test_contents_reach_a_template_in_the_form_that_it_reads(source: str, content: Any, expected: str) -> None:
    assert of(source).render([{"role": "user", "content": content}]) == expected


def test_the_form_of_contents_may_differ_by_role() -> None:
    messages = [{"role": role, "content": parts("one", "two")} for role in ("user", "assistant", "user")]
    expected = "[user]<one><two>[assistant]one\ntwo.[user]<one><two>"
    assert of(READS_PARTS_OF_USERS).render(messages) == expected
    asked_for_text = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    assert of(READS_PARTS_OF_USERS).render(asked_for_text) == "[user]<one>[assistant]two."


def test_tools_are_read_as_users_are_unless_a_template_shows_otherwise() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' or m.name == 'weather' %}"
        "{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "q"}, {"role": "tool", "name": "weather", "content": parts("one", "two")}]
    assert of(source).render(messages) == "<q><one><two>"


def test_parts_reach_a_template_without_what_is_not_their_text(tmp_path: Path) -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    source = (
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{{ part | length }}{% endfor %}{% endfor %}"
    )
    assert of(source).render([{"role": "user", "content": [part]}]) == "x2"


def called(arguments: Any, content: Any = "") -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
CALLS_END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "arguments", "expected"),
    [
        ("{{ 'json ' + a }}", '{"a":  1}', 'json {"a":  1}'),  # the client's own text
        ("{{ 'json ' + a }}", {"a": "ü"}, 'json {"a": "ü"}'),
        ("{{ 'json ' + a }}", '{"a": ', 'json {"a": '),
        ("{{ 'json ' + a }}", "", "json {}"),
        ("{{ a | tojson }}", '{"a":  1}', '{"a": 1}'),
        ("{{ a | tojson }}", " ", "{}"),
        ("{% for k, v in a | items %}{{ k }}={{ v }}{% endfor %}", '{"a": 1}', "a=1"),
        ("{{ a if a is string else a | tojson }}", '{"a":  1}', '{"a": 1}'),
        ("{{ a }}", '{"a":  1}', '{"a":  1}'),  # not formatted as in Python
    ],
)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_arguments_reach_a_template_in_the_form_that_it_reads(
    source: str, arguments: Any, expected: str, tools: Any
) -> None:
    assert of(CALLS + source + CALLS_END).render(called(arguments), tools=tools) == expected


@pytest.mark.parametrize(
    "call",
    [
        "f",
        {"id": "1"},
        {"id": "1", "function": "f"},
        {"id": "1", "function": {"name": "f"}},
        {"id": "1", "function": {"name": "f", "arguments": None}},
        {"id": "1", "function": {"name": "f", "arguments": [1, 2]}},
    ],
)
def test_calls_without_arguments_to_convert_reach_a_template_unchanged(call: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [call]}]
    rendered = of("{{ messages[1].tool_calls | tojson }}").render(messages)
    assert json.loads(rendered) == [call]


def test_a_template_may_write_calls_only_with_tools_or_only_without_content() -> None:
    source = CALLS + "{% if tools and m.content is none %}{{ 'json ' + a }}{% endif %}" + CALLS_END
    assert of(source).render(called('{"a": 1}', None), tools=TOOLS) == 'json {"a": 1}'


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if m.content is none %}call{% else %}{{ 'text' + m.content }}{% endif %}", "call"),
        ("{{ m.content or '' }}", ""),
        ("{{ m.content }}", ""),
        ("{{ m.content + '.' }}", "."),
        ("{{ 'content' in m }}{{ m.content is none }}", "TrueTrue"),
        ("{% if m.content is defined %}{{ m.content }}{% else %}absent{% endif %}", "absent"),
        ("<{{ m.content[0].text.strip() }}>", "<>"),
    ],
)
def test_a_content_that_is_null_reaches_a_template_as_it_can_read_it(source: str, expected: str) -> None:
    template = of("{% for m in messages %}{% if m.role == 'assistant' %}" + source + "{% endif %}{% endfor %}")
    assert template.render(called({}, None)) == expected


def test_fields_that_are_null_are_undefined_and_thoughts_have_each_of_their_names() -> None:
    template = of(
        "{% for m in messages %}{{ m.tool_calls is defined }} {{ m.thinking }} {{ m.reasoning_content }}{% endfor %}"
    )
    message = {"role": "assistant", "content": "x", "tool_calls": None, "reasoning": "hm", "thinking": None}
    assert template.render([message]) == "False hm hm"


IM = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPS = "{% for m in messages %}{{ m.role }}:{{ m.content }}\n\n{% endfor %}"
TWICE = "{% for m in messages %}{{ m.content }}|{{ m.content }}|{% endfor %}end"


@pytest.mark.parametrize(
    ("source", "last", "expected"),
    [
        (IM, "<", "<|im_start|>user\nim <<|im_end|>\n<|im_start|>assistant\n<"),
        (IM, "im", "<|im_start|>user\nim <<|im_end|>\n<|im_start|>assistant\nim"),
        (IM, ">", "<|im_start|>user\nim <<|im_end|>\n<|im_start|>assistant\n>"),
        (IM, " \nim  \n", "<|im_start|>user\nim <<|im_end|>\n<|im_start|>assistant\nim"),
        (KEEPS, " x \n", "user:im <\n\nassistant: x \n"),
        (KEEPS.replace("content }}", "content | trim }}"), "x\n", "user:im <\n\nassistant:x"),
        (KEEPS.replace("content }}", "content.rstrip('\n') }}|"), "x \n", "user:im <|\n\nassistant:x "),
        (TWICE, "x", "im <|im <|x|x"),
        (TWICE, " x ", "im <|im <| x | x "),
        (TWICE.replace("content }}", "content | trim }}"), " x ", "im <|im <|x|x"),
        (READS_PARTS, "x ", "[user]<im <>[assistant]<x "),
        (READS_PARTS, [*parts("y", "x ")], "[user]<im <>[assistant]<y><x "),
        (READS_TEXTS, [*parts("y", "x ")], "[user]im <[assistant]y\nx"),
    ],
)
def test_a_prompt_may_end_with_the_last_message(source: str, last: Any, expected: str) -> None:
    messages = [{"role": "user", "content": "im <"}, {"role": "assistant", "content": last}]
    rendered = of(source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert messages[1]["content"] == last


@pytest.mark.parametrize("family", TEMPLATES)
@pytest.mark.parametrize("last", ["Sure", "user", "a ", "<|"])
def test_a_prompt_that_goes_on_is_that_of_transformers(family: str, last: str, tmp_path: Path) -> None:
    save(tmp_path, TEMPLATES[family])
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": last}]
    expected = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    template = loaded(tmp_path)
    assert template.render(messages, add_generation_prompt=False, continue_final_message=True) == expected


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (IM, "", "the last message has no text"),
        (IM, " \n", "the last message has no text"),
        (IM, [], "the last message has no text"),
        (IM, None, "the last message has no text"),
        ("{{ messages | length }}", "x", "the template changes the last message"),
        ("{{ messages[-1].content | upper }}", "x", "the template changes the last message"),
        ("{{ messages[-1].content[:3] }}", "long", "the template changes the last message"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, content: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        of(source).render(
            [{"role": "assistant", "content": content}], add_generation_prompt=False, continue_final_message=True
        )


def test_a_prompt_has_one_end() -> None:
    with pytest.raises(RequestError, match="both true; expected one of them"):
        of(IM).render(PLAIN, continue_final_message=True)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "messages is empty"),
        (["text"], r'messages\[0\] is "text"; expected an object'),
        ([{"content": "x"}], r"messages\[0\]\.role is null"),
        ([{"role": 1}], r"messages\[0\]\.role is 1"),
        ([*PLAIN, {"role": "user", "content": [{"type": "image_url"}]}], r"messages\[1\]\.content\[0\] is .*image_url"),
        ([{"role": "user", "content": float("nan")}], r"messages\[0\]: cannot be given"),
        ([{"role": "user", "content": object()}], r"object is not a type of JSON"),
        ([{"role": "user"}], r"where\.jinja: the messages cannot be rendered: .*no attribute 'content'"),
        ([{"role": "a", "tool_calls": {"a": 1}}], r"messages\[0\]\.tool_calls is .*; expected a list"),
        (
            [{"role": "a", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            r'tool_calls\[0\]\.function\.arguments is "{", not JSON',
        ),
    ],
)
def test_messages_in_another_form_are_refused(messages: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=expected):
        of("{{ messages[0].content + 'x' }}").render(messages)


def test_a_template_may_refuse_messages(tmp_path: Path) -> None:
    template = loaded(save(tmp_path, MISTRAL))
    with pytest.raises(RequestError, match=r"chat_template\.jinja: .*: roles must alternate user and assistant"):
        template.render([*PLAIN, *PLAIN])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ [].append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ dict.mro() }}",
        "{{ raise_exception.__globals__.keys() }}",
        "{% include 'file' %}",
        "{{ messages | nothing }}",
        "{{ '{0.__class__}'.format(1).x.y }}",
    ],
)
def test_whatever_goes_wrong_in_a_template_names_it(source: str) -> None:
    with pytest.raises((RequestError, ConfigError), match=r"where\.jinja: "):
        of(source).render(PLAIN)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(100) recursive %}{{ loop(range(100)) }}{% endfor %}",
        "{{ 'ab' * 1000000000000 }}",
        "{{ [1] * 1000000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x|replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
        "{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
        "{% for i in range(99999) %}" + "x" * 1000 + "{% endfor %}",
        "{{ range(1000000000) | list }}",
        "{{ lipsum(n=1000000) }}",
    ],
)
def test_a_template_cannot_run_or_grow_without_end(source: str) -> None:
    with pytest.raises(RequestError, match=r"where\.jinja: "):
        of(source).render(PLAIN)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% unknown %}", "x" * (1 << 17) + "x"])
def test_a_template_in_another_language_is_refused_when_it_is_read(source: str, tmp_path: Path) -> None:
    save(tmp_path, source)
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: "):
        ChatTemplate.load(tmp_path)


def test_the_file_goes_before_the_config_and_a_name_before_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    save(tmp_path, None, chat_template=named)
    template = loaded(tmp_path)
    assert (template.render(PLAIN), template.render(PLAIN, tools=TOOLS)) == ("plain", "tools")
    save(tmp_path, "file", chat_template=named)
    assert loaded(tmp_path).render(PLAIN, tools=TOOLS) == "file"
    save(tmp_path, None, chat_template="{{ bos_token }}one")
    (tmp_path / "chat_template.jinja").unlink()
    assert loaded(tmp_path).render(PLAIN) == "<s>one"
    save(tmp_path, None, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(RequestError, match=r"no template named 'default'; it has: 'rag'"):
        loaded(tmp_path).render(PLAIN)


def test_an_older_processors_template_comes_before_the_tokenizers(tmp_path: Path) -> None:
    save(tmp_path, None, chat_template="of the tokenizer")
    assert loaded(tmp_path).render([{"role": "user", "content": "a"}]) == "of the tokenizer"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert loaded(tmp_path).render([{"role": "user", "content": "a"}]) == "of the processor"
    (tmp_path / "chat_template.jinja").write_text("of a file")
    assert loaded(tmp_path).render([{"role": "user", "content": "a"}]) == "of a file"


def save_named(directory: Path, **templates: str) -> None:
    (directory / "additional_chat_templates").mkdir()
    for name, template in templates.items():
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(template)


def test_named_templates_have_a_file_each(tmp_path: Path) -> None:
    save(tmp_path, "{{ bos_token }}plain", chat_template="config")
    save_named(tmp_path, tool_use="{{ bos_token }}tools", rag="{{ raise_exception('bad') }}")
    (tmp_path / "additional_chat_templates" / "README.md").write_text("{{")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = loaded(tmp_path)
    for tools, expected in ((None, "<s>plain"), (TOOLS, "<s>tools")):
        assert tokenizer.apply_chat_template(PLAIN, tools=tools, tokenize=False) == expected
        assert template.render(PLAIN, tools=tools) == expected


def test_named_templates_alone_go_before_the_config(tmp_path: Path) -> None:
    save(tmp_path, None, chat_template="config")
    save_named(tmp_path, tool_use="tools")
    assert loaded(tmp_path).render(PLAIN, tools=TOOLS) == "tools"
    with pytest.raises(RequestError, match=r"no template named 'default'; it has: 'tool_use'"):
        loaded(tmp_path).render(PLAIN)


def test_errors_of_named_templates_name_their_files(tmp_path: Path) -> None:
    save(tmp_path, "plain")
    save_named(tmp_path, tool_use="{{ raise_exception('bad') }}")
    with pytest.raises(RequestError, match=r"additional_chat_templates/tool_use\.jinja: .*bad"):
        loaded(tmp_path).render(PLAIN, tools=TOOLS)
    (tmp_path / "additional_chat_templates" / "other.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=r"additional_chat_templates/other\.jinja: cannot be used"):
        loaded(tmp_path)


def test_the_number_of_named_templates_is_bounded(tmp_path: Path) -> None:
    save(tmp_path, "plain")
    save_named(tmp_path, **{f"t{i}": "x" for i in range(64)})
    assert loaded(tmp_path).render(PLAIN) == "plain"
    templates = tmp_path / "additional_chat_templates"
    (templates / "more.jinja").write_text("x")
    with pytest.raises(ConfigError, match="additional_chat_templates: has 65 templates; expected at most 64"):
        loaded(tmp_path)
    for i in range(1000):
        (templates / f"{i}.txt").touch()
    with pytest.raises(ConfigError, match="additional_chat_templates: has too many entries; expected at most 1024"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("config", "special_tokens_map"),
    [
        ({"bos_token": "<c>"}, {"bos_token": "<m>", "eos_token": "<me>"}),
        ({"bos_token": "<c>", "added_tokens_decoder": {}}, {"bos_token": "<m>", "eos_token": "<me>"}),
        ({"bos_token": None}, {"bos_token": "<m>"}),
        ({"image_token": "<i>", "other_token": True, "bos_token": "<c>"}, None),
        ({"extra_special_tokens": {"image_token": "<i>", "think": "<t>"}}, None),
        ({"extra_special_tokens": ["<a>"], "image_token": "<i>"}, {"extra_special_tokens": {"think": "<t>"}}),
        ({"image_token": {"content": "<i>", "__type": "AddedToken"}}, {"eos_token": {"content": "<e>"}}),
    ],
)
def test_special_tokens_are_those_of_transformers(
    config: dict[str, Any], special_tokens_map: dict[str, Any] | None, tmp_path: Path
) -> None:
    source = "{{ bos_token }} {{ eos_token }} {{ image_token }} {{ other_token }} {{ think }}"
    save(tmp_path, source, **{"bos_token": None, "eos_token": None, **config})
    if special_tokens_map is not None:
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(special_tokens_map))
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(PLAIN, tokenize=False)
    assert loaded(tmp_path).render(PLAIN) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"chat_template": "x", "extra_special_tokens": {"y": 3}}, r"extra_special_tokens\.y is 3; expected a token's"),
        ({"chat_template": 3}, r"tokenizer_config\.json: chat_template is 3; expected a template"),
        ({"chat_template": []}, "chat_template is "),
        ({"chat_template": [{"name": "default"}]}, r"chat_template has .*default"),
        ({"chat_template": [{"name": "a", "template": ""}] * 2}, r"chat_template has .*different names"),
        ({"chat_template": "x", "bos_token": 3}, r"tokenizer_config\.json: bos_token is 3; expected a token's text"),
    ],
)
def test_a_config_that_cannot_be_used_is_named(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        ChatTemplate.load(save(tmp_path, None, **config))


def test_special_tokens_come_from_their_files_and_an_adapters_from_its_base(tmp_path: Path) -> None:
    base_directory, adapter = tmp_path / "base", tmp_path / "adapter"
    base_directory.mkdir()
    adapter.mkdir()
    save(base_directory, "{{ bos_token }}", bos_token={"content": "<|im_start|>", "lstrip": False})
    base = loaded(base_directory)
    assert base.render(PLAIN) == "<|im_start|>"
    assert ChatTemplate.load(adapter, base=base) is None
    (adapter / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}{{ pad_token }}")
    (adapter / "special_tokens_map.json").write_text('{"eos_token": "<eot>"}')
    assert loaded(adapter, base).render(PLAIN) == "<|im_start|><eot>"
