"""Reads scenario files. docs/performance.md describes the format; every key is used, or refused with its line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Final

from ..._core import ConfigError
from .model import BenchModel
from .scenario_comparisons import check_comparisons
from .scenario_fields import Fields, Place
from .scenario_types import (
    NO_ADAPTERS,
    AdapterMix,
    Comparison,
    Decode,
    EngineSpec,
    FirstToken,
    Load,
    Memory,
    Overhead,
    Popularity,
    Prefill,
    RunSettings,
    Scenario,
    ScenarioFile,
    Serve,
)
from .toml_places import line_numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA: Final = 1
SHIPPED: Final = Path(__file__).parent / "scenarios"
DTYPES: Final = ("bfloat16", "float16", "float32")
MEASURES: Final = ("ratio", "alternating", "roofline", "value")
PAIRS: Final = 8
"""Of a sample of an alternating comparison that says nothing else."""
ADAPTER_PLACES: Final = ("device", "host", "disk")
MAX_SEED: Final = 1 << 31


def shipped_files() -> dict[str, Path]:
    """Scenario files that come with the package, by name."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.toml"))}


def load_scenarios(path: Path) -> ScenarioFile:
    """Read a scenario file. Raises ConfigError with everything that is wrong with it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error}") from None
    return parse_scenarios(text, path)


def parse_scenarios(text: str, path: Path) -> ScenarioFile:
    """The same for a file's text; relative engine directories in it begin at the file's own."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    place = Place(line_numbers(text))
    top = Fields(data, (), place)
    schema = top.integer("schema")
    if schema != SCHEMA and not place.problems:
        top.complain("schema", f"is {schema}; this version reads {SCHEMA}")
    run = _read_run(top)
    engines = _read_engines(top, path.parent)
    model = _read_model(top, needed=any(engine.directory is None for engine in engines.values()))
    scenarios = tuple(_read_scenarios(top, engines))
    check_comparisons(scenarios, place)
    top.refuse_remaining("a scenario file")
    if not scenarios and not place.problems:
        place.complain((), "has no [[scenario]]")
    if place.problems:
        raise ConfigError(f"{path}: " + "; ".join(place.problems))
    return ScenarioFile(path, run, model, engines, scenarios)


def _read_run(top: Fields) -> RunSettings:
    fields = top.table("run") or Fields({}, ("run",), Place({}))
    settings = RunSettings(
        repeats=fields.integer("repeats", default=5),
        quiet_share=fields.number("quiet_share", default=0.06, maximum=1.0),
        extra_samples=fields.integer("extra_samples", default=2, minimum=0),
        quiet_wait=fields.number("quiet_wait", default=30.0),
    )
    fields.refuse_remaining("[run]")
    return settings


def _read_model(top: Fields, *, needed: bool) -> BenchModel | None:
    fields = top.table("model")
    if fields is None:
        if needed:
            top.complain("model", "is missing, and an engine without a directory is built of it")
        return None
    default = BenchModel()
    values: dict[str, Any] = {}
    for field in fields_of(BenchModel):
        usual = getattr(default, field.name)
        read = fields.boolean if isinstance(usual, bool) else fields.integer
        values[field.name] = read(field.name, default=usual)
    fields.refuse_remaining("[model]")
    model = BenchModel(**values)
    for problem in model.problems():
        top.complain("model", problem)
    return model


def _read_engines(top: Fields, directory: Path) -> dict[str, EngineSpec]:
    engines: dict[str, EngineSpec] = {}
    for fields in top.tables("engine"):
        name = fields.text("name")
        if name in engines:
            fields.complain("name", f'is "{name}", as is an engine before it')
        there = fields.text("directory", default="") if "directory" in fields else ""
        lora = fields.boolean("lora", default=True)
        engines[name] = EngineSpec(
            name=name,
            directory=directory / Path(there).expanduser() if there else None,
            dtype=fields.text("dtype", default="bfloat16", choices=DTYPES),
            lora=lora,
            dora=fields.boolean("dora", default=lora),
            max_lora_rank=fields.integer("max_lora_rank", default=64),
            max_batch_size=fields.integer("max_batch_size", default=16),
            max_num_tokens=fields.integer("max_num_tokens", default=1024),
            max_seq_len=fields.integer("max_seq_len", default=1024),
            convert_flags=fields.texts("convert_flags"),
            build_flags=fields.texts("build_flags"),
            optional=fields.boolean("optional", default=False),
        )
        if there:
            _refuse_beside_directory(fields)
        fields.refuse_remaining("an engine")
    return engines


def _refuse_beside_directory(fields: Fields) -> None:
    for field in fields_of(EngineSpec):
        if field.name not in ("name", "directory", "optional") and field.name in fields:
            fields.complain(field.name, "has no effect on an engine that is there already: it has a directory")


def _read_scenarios(top: Fields, engines: dict[str, EngineSpec]) -> Iterator[Scenario]:
    names: set[str] = set()
    for fields in top.tables("scenario"):
        kind = fields.text("kind", choices=READERS)
        engine = fields.text("engine")
        if engine and engine not in engines:
            known = ", ".join(f'"{name}"' for name in engines) or "none"
            fields.complain("engine", f'is "{engine}"; the file\'s engines: {known}')
        for scenario in READERS[kind](fields, _common(fields, engine)):
            if scenario.name in names:
                fields.complain("name", f'is "{scenario.name}", as is a scenario before it')
            names.add(scenario.name)
            yield scenario
        fields.refuse_remaining(f'a scenario of kind "{kind}"')


def _common(fields: Fields, engine: str) -> dict[str, Any]:
    name = fields.text("name")
    return {
        "name": name,
        "title": fields.text("title", default=name or "?"),
        "engine": engine,
        "comparisons": tuple(_read_comparisons(fields)),
    }


def _read_comparisons(fields: Fields) -> Iterator[Comparison]:
    for entry in fields.tables("compare"):
        base = entry.text("with") if "with" in entry else None
        measure = entry.text("measure", default="ratio" if base else "roofline", choices=MEASURES)
        comparison = Comparison(
            base=base,
            measure=measure,
            at_least=entry.optional_number("at_least"),
            at_most=entry.optional_number("at_most"),
            at_least_with_amx=entry.optional_number("at_least_with_amx"),
            pairs=_read_pairs(entry, measure),
        )
        if base is None and comparison.measure == "ratio":
            entry.complain("measure", 'is "ratio"; without "with" there is nothing to divide by')
        if base is None and comparison.measure == "alternating":
            entry.complain("measure", 'is "alternating"; without "with" there is nothing to alternate with')
        if base is not None and comparison.measure == "value":
            entry.complain("measure", 'is "value", which is held against the targets alone; "with" has no effect')
        entry.refuse_remaining("a comparison")
        yield comparison


def _read_pairs(entry: Fields, measure: str) -> int:
    if measure != "alternating":
        if "pairs" in entry:
            entry.complain("pairs", f'has no effect on a comparison by {measure}; only "alternating" has pairs')
            entry.integer("pairs")
        return 0
    pairs = entry.integer("pairs", default=PAIRS, minimum=2)
    if pairs % 2 == 1:
        entry.complain("pairs", f"is {pairs}; expected an even number, half of whose pairs begin with either scenario")
    return pairs


def _read_adapters(fields: Fields, *, needed: bool = False) -> AdapterMix:
    """The table `adapters`; count may be a list for a sweep, which _counts() reads."""
    table = fields.table("adapters")
    if table is None:
        if needed:
            fields.complain("adapters", "is missing; expected a table")
        return NO_ADAPTERS
    mix = AdapterMix(
        count=table.integers("count", minimum=0)[0],
        ranks=table.integers("ranks", default=[16]),
        dora_share=table.number("dora_share", default=0.0, maximum=1.0),
    )
    table.refuse_remaining("the adapters of a scenario")
    return mix


def _prefill(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield Prefill(
        **common, adapters=_read_adapters(fields), unit="tok/s", input_length=fields.integer("input", default=512)
    )


def _decode(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield Decode(
        **common,
        adapters=_read_adapters(fields),
        unit="tok/s",
        requests=fields.integer("requests"),
        input_length=fields.integer("input", default=64),
        output_length=fields.integer("output", default=64, minimum=4),
        num_threads=fields.optional_integer("threads"),
        competing_processes=fields.integer("competing_processes", default=0, minimum=0),
    )


def _overhead(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield Overhead(
        **common,
        adapters=_read_adapters(fields),
        unit="%",
        requests=fields.integer("requests"),
        input_length=fields.integer("input", default=64),
        output_length=fields.integer("output", default=64, minimum=4),
    )


def _first_token(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield FirstToken(
        **common,
        adapters=_read_adapters(fields, needed=True),
        unit="ms",
        input_length=fields.integer("input", default=512),
        adapter_from=fields.text("adapter_from", choices=ADAPTER_PLACES),
    )


def _memory(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield Memory(
        **common,
        adapters=_read_adapters(fields),
        unit="MB",
        requests=fields.integer("requests"),
        input_length=fields.integer("input", default=64),
        output_length=fields.integer("output", default=64),
    )


def _load(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    yield Load(**common, adapters=NO_ADAPTERS, unit="s", input_length=fields.integer("input", default=16))


def _serve(fields: Fields, common: dict[str, Any]) -> Iterator[Scenario]:
    counts = _counts(fields)
    mix = _read_adapters(fields)
    concurrency = fields.optional_integer("concurrency")
    rate = fields.optional_number("rate", above=True)
    if (concurrency is None) == (rate is None):
        fields.complain("concurrency", "or rate: expected exactly one of them, for a closed or an open loop")
    if rate is None and "cv" in fields:
        fields.complain("cv", "has no effect on a closed loop: there is no rate")
    values: dict[str, Any] = {
        **common,
        "unit": "tok/s",
        "popularity": _read_popularity(fields),
        "base_share": fields.number("base_share", default=0.0, maximum=1.0),
        "device_adapters": fields.optional_integer("device_adapters"),
        "requests": fields.integer("requests"),
        "input_length": fields.length("input"),
        "output_length": fields.length("output"),
        "concurrency": concurrency,
        "rate": rate,
        "cv": fields.number("cv", default=1.0, above=True),
        "first_token_target": fields.number("first_token_target", default=6.0, above=True),
        "seed": fields.integer("seed", default=42, minimum=0, maximum=MAX_SEED),
    }
    for count in counts:
        is_sweep = len(counts) > 1
        yield Serve(
            **{**values, "name": f"{common['name']}-{count}" if is_sweep else common["name"]},
            adapters=AdapterMix(count, mix.ranks, mix.dora_share),
            sweep=common["name"] if is_sweep else None,
        )


def _counts(fields: Fields) -> tuple[int, ...]:
    table = fields.table("adapters")
    return (0,) if table is None else table.integers("count", minimum=0)


def _read_popularity(fields: Fields) -> Popularity:
    table = fields.table("popularity")
    if table is None:
        return Popularity(power=1.0)
    popularity = Popularity(
        power=table.optional_number("power", above=True), zipf=table.optional_number("zipf", above=True)
    )
    if (popularity.power is None) == (popularity.zipf is None):
        fields.complain("popularity", "has neither or both of power and zipf; expected one of them")
    table.refuse_remaining("a popularity")
    return popularity


Reader = Callable[[Fields, dict[str, Any]], Iterator[Scenario]]
READERS: Final[dict[str, Reader]] = {
    "prefill": _prefill,
    "decode": _decode,
    "overhead": _overhead,
    "first_token": _first_token,
    "serve": _serve,
    "memory": _memory,
    "load": _load,
}
"""Kinds of scenarios."""
