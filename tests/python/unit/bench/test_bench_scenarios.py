"""Scenario files: shipped files load, and errors in a file are reported with their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptrt import ConfigError
from adaptrt.common.byte_size import ALL_WEIGHTS
from adaptrt.tools.bench.scenario_types import Decode, Prefill, Serve
from scenarios.command import known_files, select
from scenarios.kinds import ScenarioFile, engines_of
from scenarios.scenario_file import load_scenarios, parse_scenarios

SMALL = """schema = 1
[model]
num_hidden_layers = 2

[[engine]]
name = "e"

[[scenario]]
name = "a"
kind = "decode"
engine = "e"
requests = 2

[[scenario]]
name = "b"
kind = "serve"
engine = "e"
requests = 4
input = [8, 16]
output = 4
concurrency = 2
adapters = { count = [1, 4], ranks = [8] }
popularity = { zipf = 0.9 }
  [[scenario.compare]]
  with = "a"
  at_least = 0.5
"""


def parse(text: str) -> ScenarioFile:
    return parse_scenarios(text, Path("some.toml"))


def problems(text: str) -> str:
    with pytest.raises(ConfigError, match=r"some\.toml") as caught:
        parse(text)
    return str(caught.value)


@pytest.mark.parametrize("name", sorted(known_files()))
def test_shipped_files_are_valid(name: str) -> None:
    file = load_scenarios(known_files()[name])
    assert file.scenarios
    assert {scenario.engine for scenario in file.scenarios} <= set(file.engines)


def test_the_default_file_holds_adaptrt_to_its_targets() -> None:
    file = load_scenarios(known_files()["default"])
    assert (
        sum(c.at_least is not None or c.at_most is not None for found in file.comparisons.values() for c in found) >= 12
    )


def test_a_cpu_with_amx_can_have_a_target_of_its_own() -> None:
    file = parse(SMALL.replace("at_least = 0.5", "at_least = 0.5\n  at_least_with_amx = 0.25"))
    (comparison,) = file.comparisons["b-1"]
    assert comparison.on_cpu(amx=False).holds(0.4) is False
    assert comparison.on_cpu(amx=True).holds(0.4) is True
    assert comparison.on_cpu(amx=True).holds(0.2) is False
    (plain,) = parse(SMALL).comparisons["b-1"]
    assert plain.on_cpu(amx=True) == plain


def test_values_are_read() -> None:
    file = parse(SMALL)
    first, *swept = file.scenarios
    assert isinstance(first, Decode)
    assert (first.requests, first.input_length, first.adapters.count) == (2, 64, 0)
    assert [scenario.name for scenario in swept] == ["b-1", "b-4"]
    assert all(isinstance(scenario, Serve) and scenario.sweep == "b" for scenario in swept)
    assert isinstance(swept[0], Serve)
    assert (swept[0].input_length, swept[0].output_length) == ((8, 16), (4, 5))
    assert swept[0].popularity.zipf == 0.9
    assert file.model is not None
    assert file.model.num_hidden_layers == 2
    assert isinstance(load_scenarios(known_files()["quick"]).scenarios[0], Prefill)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("requests = 2", "requests = 2\nrequets = 3",
         'line 13: scenario[1].requets is unknown; accepted: name, title, engine, compare, kind, adapters, requests, '),
        ("requests = 2", "requests = 0",
         "line 12: scenario[1].requests is 0: input should be greater than or equal to 1"),
        ("requests = 2", "", "line 8: scenario[1] has no requests"),
        ("requests = 2", "requests = true", "line 12: scenario[1].requests is true"),
        ('kind = "decode"', 'kind = "decod"',
         'line 10: scenario[1].kind is "decod"; expected one of prefill, decode, '),
        ('engine = "e"\nrequests = 2', 'engine = "f"\nrequests = 2',
         "line 11: scenario[1].engine is \"f\"; the file's engines: \"e\""),
        ("num_hidden_layers = 2", "layers = 2", "line 3: model.layers is unknown; accepted: vocab_size, "),
        ("num_hidden_layers = 2", "num_attention_heads = 6", "line 2: model has 6 heads for 4 key-value heads"),
        ("concurrency = 2", "", "line 14: scenario[2].concurrency or rate: expected exactly one"),
        ("concurrency = 2", "concurrency = 2\nrate = 1.0", "scenario[2].concurrency or rate: expected exactly one"),
        ("concurrency = 2", "concurrency = 2\ncv = 2.0", "line 22: scenario[2].cv has no effect on a closed loop"),
        ("input = [8, 16]", "input = [16, 8]",
         "line 19: scenario[2].input is [16, 8]; expected an integer of at least 1, or"),
        ("zipf = 0.9", "zipf = 0.9, power = 1.0", "line 23: scenario[2].popularity has neither or both"),
        ("zipf = 0.9", "zipf = -1", "line 23: scenario[2].popularity.zipf is -1"),
        ("ranks = [8]", "ranks = [8], rank = 8",
         "line 22: scenario[2].adapters.rank is unknown; accepted: count, ranks, dora_share"),
        ('with = "a"', 'with = "z"', 'compares "b-1" with "z", which is not a scenario'),
        ('with = "a"', 'measure = "ratio"', 'line 25: scenario[2].compare[1].measure is "ratio"; without "with"'),
        ('with = "a"', 'with = "a"\n  measure = "roofline"', 'compares "b-1" by roofline; only prefill and decode'),
        ("schema = 1", "schema = 2", "line 1: schema is 2: input should be 1"),
        ("schema = 1", "", "the file has no schema"),
        ("[model]\nnum_hidden_layers = 2", "", "model is missing"),
        ('name = "b"', 'name = "a"\nseed = -1', "line 16: scenario[2].seed is -1"),
        ('name = "e"', 'name = "e"\ndirectory = "x"\nlora = false',
         "line 8: engine[1].lora has no effect on an existing engine"),
        ("[[engine]]", '[[engine]]\nname = "e"\n[[engine]]',
         'line 8: engine[2].name is "e", as is an engine before it'),
        ("schema = 1", "schema = 1\nschema = 1", "not TOML"),
        ("schema = 1", "schema = 1\nextra = 1",
         "line 2: extra is unknown; accepted: schema, run, model, engine, scenario"),
    ],
)  # fmt: skip
def test_errors_name_their_line(old: str, new: str, complaint: str) -> None:
    assert old in SMALL
    assert complaint in problems(SMALL.replace(old, new, 1))


def test_everything_that_is_wrong_is_said_at_once() -> None:
    message = problems(SMALL.replace("requests = 2", "requests = 0").replace("output = 4", "output = 0"))
    assert "scenario[1].requests" in message
    assert "scenario[2].output" in message


ENGINES = """schema = 1
[model]

[[engine]]
name = "f"
family = ["llama", "mixtral"]
lora = false
weight_memory = "all"

[[engine]]
name = "w"
weights = ["bf16", "nf4-64"]
lora = false

[[engine]]
name = "d"
directory = "there"
weight_memory = "1KiB"

[[scenario]]
name = "a"
title = "tokens"
kind = "prefill"
engine = ["f", "d"]

[[scenario]]
name = "b"
kind = "prefill"
engine = "f"
threads = 1
  [[scenario.compare]]
  with = "a"

[[scenario]]
name = "c"
kind = "prefill"
engine = "w"
  [[scenario.compare]]
  with = "c-bf16"

[[scenario]]
name = "p"
kind = "perplexity"
engine = "w"
reference = "w-bf16"
"""


def test_a_scenario_runs_on_each_of_its_engines() -> None:
    file = parse(ENGINES)
    assert [(scenario.name, scenario.engine) for scenario in file.scenarios] == [
        ("a-llama", "f-llama"), ("a-mixtral", "f-mixtral"), ("a-d", "d"), ("b-llama", "f-llama"),
        ("b-mixtral", "f-mixtral"), ("c-bf16", "w-bf16"), ("c-nf4-64", "w-nf4-64"), ("p-bf16", "w-bf16"),
        ("p-nf4-64", "w-nf4-64"),
    ]  # fmt: skip
    assert [scenario.title for scenario in file.scenarios][:2] == ["tokens, llama", "tokens, mixtral"]
    bases = {name: [one.base for one in found] for name, found in file.comparisons.items() if found}
    assert bases == {"b-llama": ["a-llama"], "b-mixtral": ["a-mixtral"], "c-nf4-64": ["c-bf16"]}
    specs = file.engines
    assert (specs["f-mixtral"].family, specs["f-mixtral"].weights, specs["w-nf4-64"].weights) == (
        "mixtral", None, "nf4-64",
    )  # fmt: skip
    assert [specs[name].weight_memory for name in ("f-llama", "w-bf16", "d")] == [ALL_WEIGHTS, None, 1024]
    assert [specs[name].is_of_model for name in ("f-llama", "w-bf16", "d")] == [False, True, False]
    assert engines_of(file.scenarios[-1]) == ("w-nf4-64", "w-bf16")


def test_scenarios_of_several_engines_can_be_chosen() -> None:
    file = parse(ENGINES)
    assert [s.name for s in select(file, ["b"]).scenarios] == ["a-llama", "a-mixtral", "b-llama", "b-mixtral"]
    assert [s.name for s in select(file, ["c-nf4-64"]).scenarios] == ["c-bf16", "c-nf4-64"]


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"mixtral"]', '"mixtrl"]', "line 6: engine[1].family[2] is \"mixtrl\": input should be 'llama', "),
        ('"nf4-64"]\nlora = false', '"nf4-64"]', "engine[2].weights needs lora = false, and no build_flags"),
        ('"1KiB"', '"1KB or so"', 'engine[3].weight_memory is "1KB or so"; accepted: a number of bytes'),
        ('engine = "w"\nreference = "w-bf16"', 'engine = "w"\nreference = "w"',
         'scenario[4].reference is "w"; expected an engine'),
        ('["f", "d"]', '["f", "x"]', 'scenario[1].engine is "x"; the file\'s engines: "f", "w", "d"'),
        ('["f", "d"]', "[]", "line 24: scenario[1].engine is []: value should have at least 1 item"),
        ('kind = "perplexity"\nengine = "w"\nreference = "w-bf16"',
         'kind = "reuse"\nengine = "f"\nkv_from = "pool"\nalora = true',
         "scenario[4].alora needs adapters and a question"),
        ('kind = "perplexity"\nengine = "w"\nreference = "w-bf16"', 'kind = "reuse"\nengine = "f"\nkv_from = "tape"',
         "scenario[4].kv_from is \"tape\": input should be 'computed', 'pool', 'page_cache' or 'disk'"),
        ('directory = "there"', 'directory = "there"\nconvert_flags = ["--tp_size", "2"]',
         "engine[3].convert_flags has no effect on an existing engine"),
    ],
)  # fmt: skip
def test_engines_that_cannot_be_made_are_refused(old: str, new: str, complaint: str) -> None:
    assert ENGINES.count(old) == 1
    assert complaint in problems(ENGINES.replace(old, new))


TURNS = """schema = 1
[model]

[[engine]]
name = "e"

[[scenario]]
name = "a"
kind = "decode"
engine = "e"
requests = 2

[[scenario]]
name = "b"
kind = "decode"
engine = "e"
requests = 2
threads = 1
  [[scenario.compare]]
  with = "a"
  measure = "alternating"
"""


def test_scenarios_can_alternate() -> None:
    file = parse(TURNS)
    first, second = file.scenarios
    assert file.alternating(first) is None
    comparison = file.alternating(second)
    assert comparison is not None
    assert (comparison.base, comparison.pairs) == ("a", 8)
    again = parse(TURNS + "  pairs = 2\n").alternating(second)
    assert again is not None
    assert again.pairs == 2


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('measure = "alternating"', 'measure = "alternating"\n  pairs = 3',
         "line 22: scenario[2].compare[1].pairs is 3; expected an even number"),
        ('measure = "alternating"', 'measure = "ratio"\n  pairs = 4',
         'line 22: scenario[2].compare[1].pairs has no effect on a comparison by ratio; only "alternating" has pairs'),
        ('  with = "a"\n', "", 'line 20: scenario[2].compare[1].measure is "alternating"; without "with"'),
        ('with = "a"', 'with = "z"', 'compares "b" with "z", which is not a scenario'),
        ("threads = 1", "threads = 1\noutput = 40",
         'compares "b" with "a" by alternating, but output is 40 here and 64 there'),
        ("requests = 2\nthreads = 1", "requests = 3\ninput = 8",
         "requests is 3 here and 2 there"),
        ("requests = 2\nthreads = 1", "requests = 2\ninput = 8", "input is 8 here and 64 there"),
        ('kind = "decode"\nengine = "e"\nrequests = 2\n\n', 'kind = "prefill"\nengine = "e"\n\n',
         'compares "b" with "a" by alternating; only decode scenarios alternate'),
        ('measure = "alternating"', 'measure = "alternating"\n  [[scenario.compare]]\n  with = "b"\n'
         '  measure = "alternating"', 'has "b" alternate with two scenarios'),
        ('measure = "alternating"', 'measure = "alternating"\n  [[scenario.compare]]',
         'compares "b" by roofline, but "b" alternates with a scenario'),
        ("requests = 2\n\n", 'requests = 2\n  [[scenario.compare]]\n  with = "b"\n  measure = "roofline"\n\n',
         'compares "a" by roofline, but "b" alternates with a scenario'),
    ],
)  # fmt: skip
def test_scenarios_that_cannot_alternate_are_refused(old: str, new: str, complaint: str) -> None:
    assert TURNS.count(old) == 1
    assert complaint in problems(TURNS.replace(old, new))


def test_scenarios_of_one_name_are_refused() -> None:
    again = SMALL[SMALL.index("[[scenario]]") : SMALL.index('[[scenario]]\nname = "b"')]
    assert 'line 29: scenario[3].name is "a", as is a scenario before it' in problems(SMALL + "\n" + again)


def test_a_chosen_scenario_brings_the_base_of_its_base() -> None:
    third = SMALL[SMALL.index('[[scenario]]\nname = "b"') :].replace('"b"', '"c"').replace('with = "a"', 'with = "b-1"')
    chosen = select(parse(f"{SMALL}\n{third}"), ["c-4"])
    assert [scenario.name for scenario in chosen.scenarios] == ["a", "b-1", "c-4"]


def test_some_scenarios_can_be_chosen() -> None:
    file = parse(SMALL)
    assert [s.name for s in select(file, ["b"]).scenarios] == ["a", "b-1", "b-4"]
    assert [s.name for s in select(file, ["a"]).scenarios] == ["a"]
    assert select(file, []) == file
    with pytest.raises(ConfigError, match=r"--only: no scenario c; some\.toml has: a, b"):
        select(file, ["c"])
