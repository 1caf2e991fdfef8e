"""Go templates as Jinja: the texts that Go's templates make, and refusals with their lines."""

from __future__ import annotations

from typing import Any

import pytest

import adaptrt
from adaptrt.runtime.chat_template import ChatTemplate
from adaptrt.serve.go_template import translate

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "u"}
ANSWER = {"role": "assistant", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": "<"}'}}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"b": {"type": "x"}, "c": {"type": "y"}}}},
}  # fmt: skip
CHATML = "{{- range .Messages }}<{{ .Role }}>\n{{ .Content }}</>\n{{ end }}<assistant>\n"
TURNS = "{{ if .System }}[{{ .System }}]{{ end }}{{ if .Prompt }}Q{{ .Prompt }} {{ end }}A{{ .Response }}</s>"


def rendered(template: str, *messages: dict[str, Any], **more: Any) -> str:
    made = ChatTemplate.of_text(translate(template).jinja, {})
    return made.render(messages or [USER], **more)


@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, [SYSTEM, USER], "<system>\nS</>\n<user>\nu</>\n<assistant>\n"),
        # Consecutive messages of one role are one, except results of tools.
        (CHATML, [USER, USER], "<user>\nu\n\nu</>\n<assistant>\n"),
        (CHATML, [{"role": "tool", "content": "1"}] * 2, "<tool>\n1</>\n<tool>\n1</>\n<assistant>\n"),
        ("{{ .System }}|{{ range .Messages }}{{ .Content }};{{ end }}", [SYSTEM, USER, SYSTEM], "S\n\nS|S;u;S;"),
        # Without .Messages, each turn is one rendering; the last one ends with its response.
        (TURNS, [SYSTEM, USER], "[S]Qu A"),
        (TURNS, [SYSTEM, USER, ANSWER, USER], "[S]Qu Aa</s>Qu A"),
        (TURNS, [USER, ANSWER], "Qu Aa"),
        ("{{ .Prompt }}:", [USER], "u:"),
        ("{{- /* a\ncomment */ -}}\n {{- .Prompt -}} \n", [USER], "u"),
        ("{{`raw {{ }}`}}{{ \"q\\n\\\"\" }}{% x %}{{ .Prompt }}{{ 3 }}{{ true }}{{ nil }}", [USER],
         'raw {{ }}q\n"{% x %}u3true'),
        ('{{ if eq .Prompt "x" "u" }}1{{ else if .Prompt }}2{{ else }}3{{ end }}', [USER], "1"),
        ('{{ if ne .Prompt "u" }}1{{ else if not .Prompt }}2{{ else }}3{{ end }}', [USER], "3"),
        ('{{ if and .Prompt (or .System .Response) }}1{{ end }}{{ if gt (len .Prompt) 0 }}2{{ end }}', [USER], "2"),
        ('{{ with .System }}({{ . }}{{ $.Prompt }}){{ else }}none{{ end }}{{ .Prompt | printf "<%s%%>" }}', [USER],
         "none<u%>"),
        ("{{ range $i, $m := .Messages }}{{ $i }}{{ $m.Role }} {{ end }}", [SYSTEM, USER], "0system 1user "),
        ("{{ $n := 0 }}{{ range $i, $_ := .Messages }}{{ $n = $i }}{{ end }}{{ $n }}", [SYSTEM, USER, ANSWER], "2"),
        ("{{ range slice .Messages 1 }}{{ .Role }}{{ break }}{{ end }}{{ (index .Messages 0).Role }}",
         [SYSTEM, USER, ANSWER], "usersystem"),
        ("{{ range .Messages }}{{ range .ToolCalls }}{{ .Function.Name }}{{ json .Function.Arguments }}{{ end }}"
         "{{ end }}",
         [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}], 'f{"b":"\\u003c"}'),
        ("{{ range .Tools }}x{{ else }}no tools{{ end }}{{ range .Messages }}{{ end }}", [USER], "no tools"),
    ],
)  # fmt: skip
def test_a_template_makes_the_text_of_go(template: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert rendered(template, *messages) == expected


def test_tools_thinking_and_suffixes() -> None:
    inner = "{{ range $k, $v := .Function.Parameters.Properties }}{{ $k }}={{ $v.Type }} {{ end }}"
    assert (
        rendered(f"{{{{ range .Tools }}}}{inner}{{{{ end }}}}{{{{ range .Messages }}}}{{{{ end }}}}", tools=[TOOL])
        == "b=x c=y "
    )
    assert rendered("{{ .Tools }}{{ range .Messages }}{{ end }}", tools=[TOOL]).startswith('[{"type":"function",')
    thinks = "{{ if .IsThinkSet }}{{ .Think }}{{ .ThinkLevel }}{{ end }}{{ .Prompt }}"
    assert rendered(thinks) == "u"
    assert rendered(thinks, variables={"enable_thinking": True, "reasoning_effort": "low"}) == "truelowu"
    middle = translate("<PRE>{{ .Prompt }}{{ if .Suffix }}<SUF>{{ .Suffix }}<MID>{{ end }}")
    assert middle.has_suffix
    assert not translate(CHATML).has_suffix
    made = ChatTemplate.of_text(middle.jinja, {})
    assert made.render([USER], variables={"suffix": "s"}) == "<PRE>u<SUF>s<MID>"
    assert made.render([USER]) == "<PRE>u"


def test_an_answer_can_begin_with_a_message() -> None:
    made = ChatTemplate.of_text(translate(TURNS).jinja, {})
    assert made.render([USER, ANSWER], add_generation_prompt=False, continue_final_message=True) == "Qu Aa"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ('a\n{{ template "x" }}', "line 2: {{ template }} is not supported; expected ranges, conditions and fields"),
        ("\n\n{{ toTypeScriptType .Tools }}", "line 3: the function toTypeScriptType is not supported"),
        ("{{ .Nope }}", "line 1: .Nope is not known; expected one of System, Prompt"),
        ("{{ range .Messages }}\n{{ .Nope }}{{ end }}", "line 2: .Nope is not known; expected one of Role, Content"),
        ("{{ if .Prompt }}", "line 1: {{ if }} has no {{ end }}"),
        ("{{ end }}", "{{ end }} ends no block"),
        ("{{ else }}", "{{ else }} belongs to no block"),
        ("{{ if .Prompt }}{{ else }}{{ else }}{{ end }}", "{{ else }} belongs to no block"),
        ("{{ with .Prompt }}{{ else with .System }}{{ end }}", "{{ else with }} is not supported"),
        ("{{ $x }}", "the variable $x is not known"),
        ("{{ range $a := .Messages }}{{ $a = 1 }}{{ end }}", "$a cannot be set here"),
        ("{{ range $a, $b, $c := .Messages }}{{ end }}", "the variables of a range are not understood"),
        ("{{ . }}", "the root is used as a value"),
        ("{{ .Prompt", "'' is not understood here"),
        ("{{ ! }}", "is not understood here"),
        ("{{ }}", "an action is empty"),
        ("{{ break }}", "{{ break }} is outside of a range"),
        ("{{ ((.Prompt) }}", "a parenthesis is not closed"),
        ("{{ .Prompt | .System }}", "'.System' follows a pipe; expected a function"),
        ("{{ eq .Prompt }}", "eq has 1 arguments; expected 2 to 16"),
        ('{{ printf "%q" .Prompt }}', "printf has %q; expected %s, %v or %d"),
        ('{{ printf "x" .Prompt }}', "printf has 1 values too many"),
        ("{{ printf .Prompt }}", "the format of printf is not a text"),
        ('{{ "\\q" }}', "has an escape that is not supported"),
        ("{{ if .Prompt }}" * 40, "blocks are nested deeper than 32 levels"),
        ("{{ " + "(" * 40 + " }}", "parentheses are nested deeper than 32 levels"),
        ("x" * 70_000, "template has 70000 characters; expected at most 65536"),
    ],
)  # fmt: skip
def test_what_is_not_translated_is_refused_with_its_line(template: str, said: str) -> None:
    with pytest.raises(adaptrt.ConfigError) as raised:
        translate(template)
    assert said in str(raised.value)


def test_the_size_of_the_jinja_is_bounded() -> None:
    nested = ".Prompt"
    for _ in range(15):
        nested = f'(printf "%s%s" (eq {nested} "a" "b") .Prompt)'
    assert len(translate(f"{{{{ {nested} }}}}").jinja) < 10_000
