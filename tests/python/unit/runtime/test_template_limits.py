"""No operation of a chat template exceeds the limits; below them, the results are those of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jinja2.filters import FILTERS
from jinja2.utils import _PassArg
from transformers.utils.chat_template_utils import render_jinja_template

from adaptrt import ConfigError, RequestError
from adaptrt.runtime.chat_template import ChatTemplate
from adaptrt.runtime.template_limits import TemplateLimits
from adaptrt.runtime.template_operations import _UNCOUNTED, bounded_filters
from adaptrt.runtime.template_sandbox import ChatEnvironment

SMALL = TemplateLimits(max_characters=1 << 22, max_work=1 << 26, max_seconds=30)
MESSAGES = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "One two  three\n\tfour 'x' \"y\" é"},
    {"role": "assistant", "content": "b\na\nc"},
]


def rendered(source: str, limits: TemplateLimits = SMALL, **variables: Any) -> str:
    return ChatTemplate({"default": source}, {}, "t", limits=limits).render(MESSAGES, variables=variables)


NESTED = "{% set ns = namespace(x=['a']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
# jinja2 itself makes tuples of arguments.
ARGUMENTS = (
    "{% set ns = namespace(x=1) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{% set y = f(ns.x, ns.x) %}{% endfor %}"
)
DEEP = (
    "{% set ns = namespace(x=1) %}{% macro f() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(20000) %}{% set y = f(ns.x) %}{% endfor %}"
)
WIDTH = "it asks for"
LENGTH = "it makes a value of"
WORK = "it does more work"
MALICIOUS = [
    *(
        (source, WIDTH)
        for source in (
            "{{ 'x' | center(1000000000) }}",
            "{{ 'x' | center(width=10 ** 9) }}",
            "{{ 'x'.center(10 ** 9) }}",
            "{{ 'x'.ljust(10 ** 9) }}",
            "{{ 'x'.rjust(10 ** 9) }}",
            "{{ 'x'.zfill(10 ** 9) }}",
            "{{ '\t'.expandtabs(10 ** 9) }}",
            "{{ 'x'.expandtabs(tabsize=10 ** 9) }}",
            "{{ ['x'] | batch(10 ** 9, 'y') | list }}",
            "{{ ['x'] | slice(10 ** 9) | list }}",
            "{{ 'x\n' | indent(10 ** 9) }}",
            "{{ messages | tojson(indent=10 ** 9) }}",
            "{{ '%1000000000d' % 1 }}",
            "{{ '%.1000000000f' % 1 }}",
            "{{ '%-+ #01000000000d' % 1 }}",
            "{{ '%ld%1000000000ld' % (1, 1) }}",
            "{{ '%1000000000d' | format(1) }}",
            "{{ '{:>1000000000}'.format(1) }}",
            "{{ '{:{}}'.format(1, 10 ** 9) }}",
            "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
            "{{ ('{:>1000000000}' | safe).format(1) }}",
            "{{ (1).to_bytes(10 ** 9, 'big') }}",
            "{{ 1 | round(10 ** 9) }}",
            "{{ 'x'.encode().center(10 ** 9) }}",
            "{% filter center(10 ** 9) %}x{% endfilter %}",
            "{% autoescape 'a' | center(10 ** 9) %}x{% endautoescape %}",
            "{{ messages | map('string') | map('center', 10 ** 9) | list }}",
        )
    ),
    *(
        (source, LENGTH)
        for source in (
            "{{ ('x\n' * 100000) | indent(60000) }}",
            "{{ ('x\n' * 100000) | indent('y' * 1000) }}",
            "{{ ('x' * 1000000) | join('y' * 1000000) }}",
            "{{ ('y' * 1000000).join('x' * 1000000) }}",
            "{{ ['x' * 1000000] * 1000000 }}",
            "{{ (['x' * 100000] * 100000) | join }}",
            "{{ 'y'.join(['x' * 100000] * 100000) }}",
            "{{ (range(10000) | map('attr', 'q') | map('default', 'x' * 10000)) | join }}",
            "{{ ('x' * 1000000) | replace('x', 'y' * 1000000) }}",
            "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
            "{{ ('x' * 1000000).replace('', ('y' * 1000000) | safe) }}",
            "{{ (('x' * 1000000) | safe).replace('x', 'y' * 1000000) }}",
            "{% set s = 'x' * 3000000 %}{{ s ~ s }}",
            "{% set s = 'x' * 3000000 %}{{ s + s }}",
            "{{ ('x' * 3000000 ~ '<') | e }}{{ ('<' * 3000000) | e }}",
            "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
            ARGUMENTS + "{{ ns.x }}",
            ARGUMENTS + "{{ {ns.x: 1} }}",
            ARGUMENTS + "{{ ns.x == (ns.x, 1) }}",
            ARGUMENTS + "{{ [ns.x] | unique | list }}",
            ARGUMENTS + "{{ [ns.x, ns.x] | sort }}",
            ARGUMENTS + "{{ messages[ns.x] }}",
            ARGUMENTS + "{{ messages[0].get(ns.x) }}",
            ARGUMENTS + "{{ ns.x in messages[0] }}",
            ARGUMENTS + "{{ ns.x in messages }}",
            ARGUMENTS + "{% if ns.x is eq((1,)) %}{% endif %}",
            ARGUMENTS + "{{ ns.x is in([1]) }}",
            ARGUMENTS + "{{ [1].index(ns.x) }}",
            ARGUMENTS + "{{ '' ~ ns.x }}",
            ARGUMENTS + "{{ '%s' % (ns.x,) }}",
            ARGUMENTS + "{{ '{}'.format(ns.x) }}",
            ARGUMENTS + "{{ ns.x | tojson }}",
            ARGUMENTS + "{{ ns.x | string }}",
            ARGUMENTS + "{{ raise_exception(ns.x) }}",
            ARGUMENTS + "{% if 1 < 2 < ns.x %}{% endif %}",
        )
    ),
    *(
        (source, WORK)
        for source in (
            "{{ ['x' * 4000000] }}",
            "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
            "{{ ('{a}' * 100000).format(a='x' * 1000000) }}",
            "{{ ('{0:>60000}' * 10000).format(1) }}",
            "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}",
            "{{ ('a ' * 2000000).split() }}",
            "{{ ('\n' * 4000000).splitlines() }}",
            "{{ ('ab' * 2000000).split('a') }}",
            "{{ ('a ' * 2000000) | wordcount }}",
            "{{ ('a ' * 2000000) | title }}",
            "{{ ('a ' * 1000000) | wordwrap(1) }}",
            "{{ ('a' * 4000000) | list }}",
            "{{ ('a' * 4000000) | urlize }}",
            "{{ ('<a' * 2000000) | striptags }}",
            "{{ ('a' * 4000000) | urlencode }}",
            "{{ (['a'] * 1000000) | pprint }}",
            "{{ (['a'] * 1000000) | tojson(indent=1000) }}",
            "{{ (['a'] * 1000000) | tojson(separators=('x' * 1000000, ':')) }}",
            "{{ {'a' * 2000000: 'b'} | xmlattr }}",
            "{{ ([[1] * 300] * 300) | sum(start=[]) }}",
            "{{ range(100000) | map('center', 60000) | list }}",
            "{{ range(100000) | reject('defined') | list }}" * 99,
            "{% for i in range(100000) if range(9999) | list %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
            (
                "{% for a in range(99999) %}{% block b scoped %}{% for b in range(99999) %}{% endfor %}"
                "{% endblock %}{% endfor %}"
            ),
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            "{% macro f() %}" + "x" * 50000 + "{% endmacro %}{% for i in range(9999) %}{% set y = f() %}{% endfor %}",
            "{% for i in range(9999) %}{% set y %}" + "x" * 50000 + "{% endset %}{% endfor %}",
            "{% for i in range(9999) %}{% set x = [" + "1," * 50000 + "] %}{% endfor %}",
            "{% set s = 'x' * 4000000 %}{% for i in range(9999) %}{% set y = s[1:] %}{% endfor %}",
            "{% set s = 'x' * 4000000 %}" + "{% if 'y' in s %}{% endif %}" * 99,
            "{% set s = 'x' * 4000000 %}{% set t = 'x' * 4000000 %}" + "{% if s == t %}{% endif %}" * 999,
            "{% set l = range(99999) | list %}" + "{{ 'x' in l }}" * 99,
            "{% set l = range(99999) | list %}{% set m = [l + [1]] %}{% set n = l + [2] %}" + "{{ n in m }}" * 999,
            "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [i] %}{% endfor %}",
        )
    ),
    (NESTED + "{{ ns.x }}", LENGTH),
    (DEEP + "{{ {ns.x: 1} }}", "nest"),
    (DEEP + "{{ messages[0].get(ns.x) }}", "nest"),
    (
        "{% set ns = namespace(x=(1,)) %}{% for i in range(200) %}{% set ns.x = (ns.x,) %}{% endfor %}",
        "nests values more than 100",
    ),
    ("{{ '%*d' % (10 ** 9, 1) }}", "precision '*'"),
    ("{{ '%(a)s%((a))1000000000d' % {'a': 1, '(a)': 1} }}", "parenthesis"),
    ("{{ '%1000000000d'.encode() % 1 }}", "formats bytes"),
    ("{{ strftime_now('%Y' * 1000) }}", "formats the time with 2000 characters"),
    ("{{ 2 ** 1000000000 }}", "integer of more than 1024 bits"),
    ("{{ ('f' * 100000) | int(base=16) }}", "integer of more than 1024 bits"),
    (
        "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "integer of more",
    ),
    ("{% for i in [1] recursive %}{{ loop([1]) }}{% endfor %}", "recursion"),
    ("{{ lipsum(n=1000000) }}", "undefined"),
]

ATTEMPTS = """
import json, resource, sys
from adaptrt.runtime.chat_template import ChatTemplate
from adaptrt.runtime.template_limits import TemplateLimits
limits = TemplateLimits(**json.loads(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
ChatTemplate({"default": "x"}, {}, "t").render([{"role": "user", "content": "x"}])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
answers = []
for source in json.load(sys.stdin):
    try:
        written = ChatTemplate({"default": source}, {}, "t", limits=limits).render([{"role": "user", "content": "x"}])
        answers.append(f"wrote {len(written)} characters")
    except Exception as error:
        answers.append(str(error))
print(json.dumps([answers, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10]))
"""


def test_no_operation_makes_more_than_the_limits_allow() -> None:
    """Runs in a separate process, whose memory shows if a value was made before it was rejected."""
    given = json.dumps({"max_characters": SMALL.max_characters, "max_work": SMALL.max_work, "max_seconds": 60})
    sources = json.dumps([source for source, _ in MALICIOUS])
    run = subprocess.run(
        [sys.executable, "-c", ATTEMPTS, given], input=sources, capture_output=True, text=True, check=True
    )
    answers, num_bytes = json.loads(run.stdout)
    wrong = [
        (source[-80:], answer[:200])
        for (source, expected), answer in zip(MALICIOUS, answers, strict=True)
        if not answer.startswith("t: the messages cannot be rendered: ") or expected not in answer
    ]
    assert wrong == []
    assert num_bytes < 512 << 20


def test_a_rendering_takes_a_limited_time() -> None:
    source = "{% for i in range(100000) %}{% set x = messages | map(attribute='role') | list %}{% endfor %}"
    limits = TemplateLimits(max_work=1 << 60, max_seconds=0.1)
    with pytest.raises(RequestError, match=r"it takes more than 0\.1 seconds"):
        rendered(source, limits)
    assert rendered("{{ messages | length }}", limits) == "3"  # each rendering has its own time limit


def test_limits_are_named_and_count_for_each_rendering() -> None:
    limits = TemplateLimits(max_characters=2000, max_work=100000)
    turns = "{% for i in range(n) %}{% endfor %}"
    template = ChatTemplate({"default": turns}, {}, "t", limits=limits)
    for n in (300, 300, 300):
        assert template.render(MESSAGES, variables={"n": n}) == ""
    with pytest.raises(RequestError, match="it does more work than 100000 bytes, of which a loop turn counts for 256"):
        template.render(MESSAGES, variables={"n": 400})
    assert len(rendered("{{ x }}{{ x }}", limits, x="x" * 1000)) == 2000
    with pytest.raises(RequestError, match="value of 2002 characters or items; at most 2000 are allowed"):
        rendered("{{ x }}{{ x }}", limits, x="x" * 1001)


def test_long_conversations_stay_below_the_limits() -> None:
    source = (
        "{% set ns = namespace(text='', list=[]) %}{% for m in messages %}{% set ns.text = ns.text + m.content %}"
        "{% set ns.list = ns.list + [m] %}{% endfor %}{{ ns.text | length }} {{ ns.list | length }} "
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ (messages | tojson) | length > 0 }}"
    )
    template = ChatTemplate({"default": source}, {}, "t")
    for number, length in ((1000, 500), (40, 100000)):
        messages = [{"role": "user", "content": "x" * length}] * number
        assert template.render(messages) == f"{number * length} {number} {number} True"


def test_errors_do_not_repeat_long_values() -> None:
    for source in ("{{ raise_exception('x' * 1000000) }}", "{{ messages['x' * 1000000].y }}"):
        with pytest.raises(RequestError) as caught:
            rendered(source)
        assert len(str(caught.value)) < 2200


def test_halves_of_characters_are_refused() -> None:
    with pytest.raises(RequestError, match="surrogates not allowed"):
        rendered("{{ '%c' % 55296 }}")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ messages[1:2, 3] }}", "invalid syntax"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "recursion"),
        ("{{ " + "9" * 5000 + " }}", "limit"),
        ("{{ f(a=1, a=2) }}", "repeated"),
        ("x" * ((1 << 17) + 1), "131073 characters of templates; expected at most 131072"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_refused(source: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^t: .*{expected}"):
        ChatTemplate({"default": source}, {}, "t")


def test_the_templates_of_a_model_are_bounded_together() -> None:
    half = "x" * (1 << 16)
    ChatTemplate({"default": half, "tool_use": half}, {}, "t")
    with pytest.raises(
        ConfigError, match="template 'rag': with this template there are 131073 characters of templates"
    ):
        ChatTemplate({"default": half, "tool_use": half, "rag": "x"}, {}, "t")


def test_no_filter_is_computed_when_a_template_is_compiled() -> None:
    """jinja2 computes filters that do not take the context."""
    assert set(bounded_filters()) == set(FILTERS)
    for name, function in bounded_filters().items():
        assert name in _UNCOUNTED or _PassArg.from_obj(function) is _PassArg.context, name
    assert ChatEnvironment().optimized is False


FILTERED = [
    "{{ -3 | abs }}",
    "{{ messages[0] | attr('x') is defined }}",
    "{{ [1, 2, 3, 4, 5] | batch(2, 0) | list }}",
    "{{ 'aB c' | capitalize }}",
    "{{ 'x' | center(7) }}|",
    "{{ messages | count }}",
    "{{ nothing | d('y') }}",
    "{{ nothing | default('y') }}",
    "{{ '' | default('y', true) }}",
    "{{ {'b': 1, 'A': 2} | dictsort }}",
    "{{ {'b': 1, 'A': 2} | dictsort(by='value', reverse=true) }}",
    "{{ '<a>' | e }}",
    "{{ '<a>' | escape | e }}",
    "{{ 1234567 | filesizeformat }}",
    "{{ messages | first }}",
    "{{ '1.5' | float }}",
    "{{ '<a>' | e | forceescape }}",
    "{{ '%s-%05.1f' | format('a', 2.25) }}",
    "{{ '%(a)s' | format(a=1) }}",
    "{% for g in messages | groupby('role') %}{{ g.grouper }}{{ g.list | length }}{% endfor %}",
    ("{{ 'a\nb\n\nc' | indent }}|{{ 'a\nb' | indent(2, true) }}|{{ 'a\n\nb' | indent(width='> ', blank=true) }}"),
    "{{ '12' | int }}{{ 'x' | int(7) }}{{ 'ff' | int(base=16) }}",
    "{% for k, v in {'a': 1} | items %}{{ k }}{{ v }}{% endfor %}",
    "{{ messages | map(attribute='content') | join('|') }}",
    "{{ messages | join(', ', attribute='role') }}",
    "{{ 'abc' | join('-') }}",
    "{{ (1, 2) | join }}",
    "{{ messages | last }}",
    "{{ 'abc' | length }}",
    "{{ 'abc' | list }}",
    "{{ range(3) | list }}",
    "{{ 'ABC' | lower }}",
    "{{ ['b', 'A'] | map('upper') | list }}",
    "{{ ['b', 'A'] | max }}{{ ['b', 'A'] | min }}",
    "{{ {'a': [1, 2]} | pprint }}",
    "{{ messages | rejectattr('role', 'equalto', 'user') | list | length }}",
    "{{ [1, 2, 3] | reject('odd') | list }}",
    "{{ 'aaa' | replace('a', 'b', 2) }}",
    "{{ [1, 2] | reverse | list }}{{ 'ab' | reverse }}",
    "{{ 2.567 | round(2) }}{{ 2.1 | round(0, 'ceil') }}",
    "{{ '<' | safe }}",
    "{{ [1, 2, 3] | select('odd') | list }}",
    "{{ messages | selectattr('role', 'in', ['user', 'system']) | map(attribute='role') | list }}",
    "{{ [1, 2, 3, 4] | slice(3, 0) | list }}",
    "{{ ['b', 'A', 'c'] | sort }}{{ [1, 3, 2] | sort(reverse=true) }}",
    "{{ messages | sort(attribute='role') | map(attribute='role') | list }}",
    "{{ 12 | string }}{{ [1] | string }}",
    "{{ '<b>a  b</b>' | striptags }}",
    "{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}",
    "{{ [{'a': 1}, {'a': 2}] | sum('a', 10) }}",
    "{{ 'a b-c' | title }}",
    "{{ {'a': '<é>', 'b': [1, none]} | tojson }}",
    "{{ {'b': '<é>', 'a': [1]} | tojson(ensure_ascii=true, indent=2, sort_keys=true) }}",
    "{{ [1, 2] | tojson(separators=(',', ':')) }}",
    "{{ '  a ' | trim }}|{{ 'xax' | trim('x') }}",
    "{{ 'a long text here' | truncate(9) }}",
    "{{ [1, 1, 'A', 'a'] | unique | list }}",
    "{{ 'abc' | upper }}",
    "{{ 'a b/c?' | urlencode }}{{ {'a': 'é'} | urlencode }}",
    "{{ 'see http://x.org' | urlize }}",
    "{{ 'a b c' | wordcount }}",
    "{{ 'aaa bbb ccc' | wordwrap(4) }}",
    "{{ {'a': 'b\"'} | xmlattr }}",
]
OTHERS = [
    "{{ 'a' ~ 1 ~ none ~ [1] ~ 2.5 ~ true }}",
    "{{ 'a' + 'b' }}{{ [1] + [2] }}{{ (1,) + (2,) }}{{ 1 + 2.5 }}",
    "{{ 'ab' * 3 }}{{ [1] * 2 }}{{ 3 * 'x' }}",
    "{{ 7 % 3 }}{{ '%d %s' % (1, 'x') }}{{ '%(a)s' % {'a': 2} }}{{ '100%%' % () }}{{ '%s' % 'x' }}",
    "{{ 2 ** 10 }}{{ 7 // 2 }}{{ 7 / 2 }}{{ -3 }}",
    (
        "{{ 'One' in messages[1].content }}{{ 'role' in messages[0] }}{{ 'x' not in 'xyz' }}"
        "{{ 2 in [1, 2] }}{{ 5 in range(9) }}"
    ),
    (
        "{{ 1 < 2 < 3 }}{{ 1 < messages | length < 3 }}{{ messages[0].role == messages[1].role }}"
        "{{ messages == messages[:] }}{{ 'a' < 'b' }}"
    ),
    (
        "{% set a = 1 %}{% set b = 2 %}{{ a < b <= b != a }}{{ a in [a] in [[a]] }}{{ a not in [b] }}"
        "{{ a >= b }}{{ a > b }}"
    ),
    (
        "{{ messages[0]['role'] }}{{ messages[-1].role }}{{ messages[1:] | length }}{{ 'abc'[::-1] }}"
        "{{ 'abc'[1] }}{{ messages[loop_index or 0].role }}"
    ),
    (
        "{{ {'a': 1, 2: 'b', (1, 2): 3}[(1, 2)] }}{{ {'a': {'b': 1}}.a.b }}{{ {} }}{{ [] }}{{ () }}"
        "{{ (1,) }}{{ [messages[0].role, 1] }}{{ {messages[0].role: 1} }}"
    ),
    (
        "{{ 'a,b,c'.split(',') }}{{ ' a b '.split() }}{{ 'a\nb'.splitlines() }}"
        "{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a=b'.partition('=') }}"
    ),
    (
        "{{ 'x'.join(['a', 'b']) }}{{ ''.join(messages | map(attribute='role')) }}"
        "{{ 'aXb'.lower().upper().title().swapcase() }}"
    ),
    (
        "{{ 'abc'.startswith('a') }}{{ 'abc'.endswith(('c', 'd')) }}{{ 'abcabc'.find('c', 3) }}"
        "{{ 'abc'.count('b') }}{{ '12'.isdigit() }}"
    ),
    (
        "{{ ' a '.strip() }}|{{ 'xa'.lstrip('x') }}|{{ 'ax'.rstrip('x') }}|{{ 'a'.center(5) }}|"
        "{{ '7'.zfill(3) }}|{{ 'a\tb'.expandtabs(4) }}"
    ),
    (
        "{{ 'aaa'.replace('a', 'b') }}{{ 'aaa'.replace('a', 'b', 1) }}{{ 'abc'.translate({97: 'x'}) }}"
        "{{ 'a'.encode() }}{{ 'é'.encode('utf-8').hex() }}"
    ),
    (
        "{{ '{} {x} {0!r:>5}'.format('a', x=1) if false else '{0} {x} {0!r:>5}'.format('a', x=1) }}"
        "{{ '{a}'.format_map({'a': 1}) }}{{ '{:,.2f}'.format(1234.5) }}"
    ),
    (
        "{{ ('{}' | safe).format('<') }}{{ ('%s' | safe) % '<' }}{{ ('a' | safe) + '<' }}"
        "{{ ('<' | e).replace('l', 'L') }}"
    ),
    (
        "{{ messages[0].items() | list }}{{ messages[0].keys() | list }}{{ messages[0].get('role') }}"
        "{{ messages[0].get('x', 'y') }}{% for k, v in messages[0].items() %}{{ k }}{% endfor %}"
    ),
    (
        "{% set ns = namespace(x=1, y=[]) %}{% set ns.x = ns.x + 1 %}{% set ns.y = ns.y + [ns.x] %}"
        "{{ ns.x }}{{ ns.y }}{{ ns.z is defined }}"
    ),
    (
        "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ f(1) }}"
        "{{ f(1, 2, 3, c=4) }}{% call f(1) %}{% endcall %}"
    ),
    (
        "{% macro f() %}[{{ caller() }}]{% endmacro %}{% call f() %}x{{ 1 }}{% endcall %}{% set x %}a"
        "{{ 1 }}{% endset %}{{ x }}{% filter upper %}a{{ 'b' }}{% endfilter %}"
    ),
    (
        "{% for m in messages if m.role != 'system' %}{{ loop.index }}{{ loop.last }}"
        "{{ loop.previtem is defined }}{% else %}none{% endfor %}"
    ),
    (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
        "{% endfor %}{% for x in [] %}{% else %}none{% endfor %}"
    ),
    (
        "{% for x in [[1, [2]], 3] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}"
        "{% endif %}{% endfor %}"
    ),
    (
        "{% for a, b in [(1, 2), (3, 4)] %}{{ a + b }}{{ loop.cycle('x', 'y') }}{{ loop.changed(a) }}"
        "{% endfor %}{% set a, b = 1, 2 %}{{ a }}{{ b }}"
    ),
    (
        "{{ 'x' if messages else 'y' }}{{ nothing }}{{ nothing is undefined }}{{ none is none }}"
        "{{ messages is sequence }}{{ messages[0] is mapping }}{{ 'a' is string }}"
    ),
    (
        "{{ 3 is odd }}{{ 4 is divisibleby(2) }}{{ 'a' is in(['a']) }}{{ 1 is eq(1) }}{{ 1 is lt(2) }}"
        "{{ 'a' is lower }}{{ 'A' is upper }}{{ [1] is sameas([1]) }}"
    ),
    (
        "{% block b %}x{{ 1 }}{% endblock %}{{ self.b() }}{% set c = cycler('a', 'b') %}{{ c.next() }}"
        "{{ c.next() }}{% set j = joiner(',') %}{{ j() }}{{ j() }}"
    ),
    (
        "{% autoescape true %}{{ '<' }}{{ '<' | safe }}{{ '<' ~ '>' }}{% endautoescape %}{{ dict(a=1) }}"
        "{{ dict([('b', 2)]) }}{{ range(1, 9, 3) | list }}"
    ),
    (
        "{% generation %}{{ 'x' }}{% endgeneration %}"
        "{{ messages | map(attribute='content') | map('replace', 'b', 'B') | map('length') | sum }}"
    ),
]


@pytest.mark.parametrize("source", [*FILTERED, *OTHERS])
def test_templates_below_the_limits_work_as_in_transformers(source: str) -> None:
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, add_generation_prompt=True)
    assert rendered(source) == expected


def test_every_filter_is_compared() -> None:
    used = {name for name in FILTERS if any(f"| {name}" in source for source in FILTERED)}
    assert set(FILTERS) - used == {"random"}


def test_templates_in_a_directory_have_the_limits(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ 'x' * 99 }}")
    template = ChatTemplate.load(tmp_path, limits=TemplateLimits(max_characters=98))
    assert template is not None
    with pytest.raises(RequestError, match="value of 99 characters"):
        template.render(MESSAGES)
