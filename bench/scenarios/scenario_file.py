"""Reads scenario files. bench/measuring.md describes the format; unknown keys are errors with a line number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from adaptrt import ConfigError
from adaptrt.tools.bench.scenario_types import (
    NO_ADAPTERS,
    AdapterMix,
    Decode,
    Popularity,
    Prefill,
    RunSettings,
    Scenario,
    Serve,
)

from .kinds import (
    Comparison,
    CrowdedDecode,
    EngineSpec,
    FirstToken,
    Generation,
    Load,
    Memory,
    Overhead,
    Perplexity,
    Reuse,
    ScenarioFile,
    VariedMix,
)
from .model import BenchModel
from .scenario_comparisons import check_comparisons
from .scenario_errors import Place
from .scenario_tables import (
    AdaptersTable,
    CompareTable,
    DecodeTable,
    EngineTable,
    FileTable,
    FirstTokenTable,
    GenerationTable,
    LoadTable,
    MemoryTable,
    OverheadTable,
    PerplexityTable,
    PopularityTable,
    PrefillTable,
    ReuseTable,
    ScenarioTable,
    ServeTable,
)
from .toml_places import Path as TomlPath
from .toml_places import line_numbers

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_scenarios(path: Path) -> ScenarioFile:
    """Reads a scenario file. Raises ConfigError that lists all problems."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8: {error}") from None
    return parse_scenarios(text, path)


def parse_scenarios(text: str, path: Path) -> ScenarioFile:
    """Reads a file's text. Relative engine directories are relative to the file."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    place = Place(line_numbers(text))
    try:
        table = FileTable.model_validate(data)
    except ValidationError as error:
        place.complain_of(error)
        raise ConfigError(f"{path}: " + "; ".join(place.problems)) from None
    file = _Reader(table, place).read(path, text)
    if place.problems:
        raise ConfigError(f"{path}: " + "; ".join(place.problems))
    return file


@dataclass(frozen=True)
class _Engines:
    """The engines of a file."""

    specs: dict[str, EngineSpec]
    """Specs by name. If a table makes several engines, each name is the table's name and a suffix."""
    variants: dict[str, dict[str | None, str]]
    """Names by suffix, for each table. Tables of one engine have the suffix None."""

    def of(self, table: ScenarioTable) -> Mapping[str | None, str]:
        """Returns the names of a scenario's engines, by the suffix of the scenario's name."""
        if len(table.engine) == 1:
            return self.variants.get(table.engine[0], {})
        found = [(suffix or name, engine) for name in table.engine for suffix, engine in self.variants[name].items()]
        return dict(found)


class _Reader:
    """Creates scenarios from the tables, and notes inconsistencies."""

    def __init__(self, table: FileTable, place: Place) -> None:
        self._table = table
        self._place = place

    def read(self, path: Path, text: str) -> ScenarioFile:
        engines = self._engines(path.parent)
        model = self._model(needed=any(engine.is_of_model for engine in engines.specs.values()))
        groups: dict[str, tuple[str, ...]] = {}
        found = list(self._scenarios(engines, groups))
        if not found:
            self._place.complain((), "has no [[scenario]]")
        file = ScenarioFile(
            path=path,
            run=RunSettings(**self._table.run.model_dump()),
            model=model,
            engines=engines.specs,
            scenarios=tuple(scenario for scenario, _ in found),
            comparisons={scenario.name: comparisons for scenario, comparisons in found},
            text=text,
            groups=groups,
        )
        check_comparisons(file, self._place)
        return file

    def _model(self, *, needed: bool) -> BenchModel | None:
        table = self._table.model
        if table is None:
            if needed:
                self._place.complain(("model",), "is missing, and an engine is built of it")
            return None
        model = BenchModel(**table.model_dump())
        for problem in model.problems():
            self._place.complain(("model",), problem)
        return model

    def _engines(self, directory: Path) -> _Engines:
        engines = _Engines({}, {})
        for index, table in enumerate(self._table.engine):
            where: TomlPath = ("engine", index)
            if table.name in engines.variants:
                self._place.complain((*where, "name"), f'is "{table.name}", as is an engine before it')
            made = {suffix: _engine(table, suffix, directory) for suffix in table.family or table.weights or [None]}
            engines.variants[table.name] = {suffix: spec.name for suffix, spec in made.items()}
            engines.specs.update({spec.name: spec for spec in made.values()})
            if table.weights and (table.lora or table.build_flags or table.convert_flags or table.family):
                self._place.complain(
                    (*where, "weights"), "needs lora = false, and no build_flags, convert_flags or family"
                )
            if table.directory is not None:
                for name in sorted(table.model_fields_set - {"name", "directory", "weight_memory", "optional"}):
                    self._place.complain((*where, name), "has no effect on an existing engine: it has a directory")
        return engines

    def _scenarios(
        self, engines: _Engines, groups: dict[str, tuple[str, ...]]
    ) -> Iterator[tuple[Scenario, tuple[Comparison, ...]]]:
        """Yields the scenarios with their comparisons, and notes the names of each table's scenarios."""
        names: set[str] = set()
        for index, table in enumerate(self._table.scenario):
            where: TomlPath = ("scenario", index)
            known = ", ".join(f'"{name}"' for name in engines.variants) or "none"
            unknown = [name for name in table.engine if name not in engines.variants]
            for name in unknown:
                self._place.complain((*where, "engine"), f'is "{name}"; the file\'s engines: {known}')
            if isinstance(table, PerplexityTable) and table.reference not in engines.specs:
                self._place.complain((*where, "reference"), f'is "{table.reference}"; expected an engine')
            if isinstance(table, ReuseTable) and table.alora and (table.adapters is None or not table.question):
                self._place.complain((*where, "alora"), "needs adapters and a question, which they change")
            if isinstance(table, ServeTable):
                self._check_serve(where, table)
            for number, compare in enumerate(table.compare):
                self._check_comparison((*where, "compare", number), compare)
            for suffix, engine in ({None: ""} if unknown else engines.of(table)).items():
                for scenario in _variants(table, suffix, engine):
                    if scenario.name in names:
                        self._place.complain((*where, "name"), f'is "{scenario.name}", as is a scenario before it')
                    names.add(scenario.name)
                    groups[table.name] = (*groups.get(table.name, ()), scenario.name)
                    compared = (_comparison(compare, suffix, groups) for compare in table.compare)
                    # One of several engines may be the base; it is not compared with itself.
                    yield scenario, tuple(one for one in compared if suffix is None or one.base != scenario.name)

    def _check_serve(self, where: TomlPath, table: ServeTable) -> None:
        if (table.concurrency is None) == (table.rate is None):
            self._place.complain(
                (*where, "concurrency"), "or rate: expected exactly one of them, for a closed or an open loop"
            )
        if table.rate is None and "cv" in table.model_fields_set:
            self._place.complain((*where, "cv"), "has no effect on a closed loop: there is no rate")
        if (table.popularity.power is None) == (table.popularity.zipf is None):
            self._place.complain((*where, "popularity"), "has neither or both of power and zipf; expected one of them")

    def _check_comparison(self, where: TomlPath, table: CompareTable) -> None:
        measure = _measure_of(table)
        if table.base is None and measure == "ratio":
            self._place.complain((*where, "measure"), 'is "ratio"; without "with" there is nothing to divide by')
        if table.base is None and measure == "alternating":
            self._place.complain(
                (*where, "measure"), 'is "alternating"; without "with" there is nothing to alternate with'
            )
        if table.base is not None and measure == "value":
            self._place.complain(
                (*where, "measure"), 'is "value", which is held against the targets alone; "with" has no effect'
            )
        if "pairs" in table.model_fields_set and measure != "alternating":
            self._place.complain(
                (*where, "pairs"), f'has no effect on a comparison by {measure}; only "alternating" has pairs'
            )
        elif table.pairs % 2 == 1:
            self._place.complain(
                (*where, "pairs"),
                f"is {table.pairs}; expected an even number, half of whose pairs begin with either scenario",
            )


def _engine(table: EngineTable, suffix: str | None, directory: Path) -> EngineSpec:
    values = table.model_dump()
    for name in ("directory", "model_dir"):
        values[name] = None if values[name] is None else directory / Path(values[name]).expanduser()
    values["dora"] = table.lora if table.dora is None else table.dora
    values["family"], values["weights"] = suffix if table.family else None, suffix if table.weights else None
    values["build_flags"], values["convert_flags"] = tuple(table.build_flags), tuple(table.convert_flags)
    values["name"] = table.name if suffix is None else f"{table.name}-{suffix}"
    return EngineSpec(**values)


def _variants(table: ScenarioTable, suffix: str | None, engine: str) -> Iterator[Scenario]:
    """The scenarios of a table on one of its engines."""
    for scenario in _MADE[type(table)](table):
        if suffix is None:
            yield replace(scenario, engine=engine)
            continue
        named = replace(scenario, name=f"{scenario.name}-{suffix}", title=f"{scenario.title}, {suffix}", engine=engine)
        if isinstance(named, Serve) and named.sweep is not None:
            named = replace(named, sweep=f"{named.sweep}-{suffix}")
        yield named


def _measure_of(table: CompareTable) -> str:
    return table.measure or ("ratio" if table.base is not None else "roofline")


def _comparison(table: CompareTable, suffix: str | None, groups: Mapping[str, tuple[str, ...]]) -> Comparison:
    """Makes a comparison. If both tables have several engines, the base is the scenario on the same engine."""
    measure = _measure_of(table)
    same = f"{table.base}-{suffix}"
    return Comparison(
        base=same if table.base is not None and same in groups.get(table.base, ()) else table.base,
        measure=measure,
        at_least=table.at_least,
        at_most=table.at_most,
        at_least_with_amx=table.at_least_with_amx,
        pairs=table.pairs if measure == "alternating" else 0,
    )


def _common(table: ScenarioTable, unit: str) -> dict[str, Any]:
    return {
        "name": table.name,
        "title": table.title or table.name,
        "engine": table.engine[0],
        "unit": unit,
    }


def _mix(table: AdaptersTable | None, count: int | None = None) -> AdapterMix:
    if table is None:
        return NO_ADAPTERS
    fields = (table.count[0] if count is None else count, tuple(table.ranks), table.dora_share)
    if table.kind == "lora":
        return AdapterMix(*fields, storage=table.storage)
    return VariedMix(*fields, storage=table.storage, variant=table.kind)


def _prefill(table: PrefillTable) -> Iterator[Scenario]:
    yield Prefill(
        **_common(table, "tok/s"), adapters=_mix(table.adapters), input_length=table.input, num_threads=table.threads
    )


def _decode(table: DecodeTable) -> Iterator[Scenario]:
    fields: dict[str, Any] = {
        **_common(table, "tok/s"),
        "adapters": _mix(table.adapters),
        "requests": table.requests,
        "input_length": table.input,
        "output_length": table.output,
        "num_threads": table.threads,
    }
    if table.competing_processes:
        yield CrowdedDecode(**fields, competing_processes=table.competing_processes)
    else:
        yield Decode(**fields)


def _overhead(table: OverheadTable) -> Iterator[Scenario]:
    yield Overhead(
        **_common(table, "%"),
        adapters=_mix(table.adapters),
        requests=table.requests,
        input_length=table.input,
        output_length=table.output,
    )


def _first_token(table: FirstTokenTable) -> Iterator[Scenario]:
    yield FirstToken(
        **_common(table, "ms"),
        adapters=_mix(table.adapters),
        input_length=table.input,
        adapter_from=table.adapter_from,
    )


def _memory(table: MemoryTable) -> Iterator[Scenario]:
    yield Memory(
        **_common(table, "MB"),
        adapters=_mix(table.adapters),
        requests=table.requests,
        input_length=table.input,
        output_length=table.output,
    )


def _load(table: LoadTable) -> Iterator[Scenario]:
    yield Load(**_common(table, "s"), adapters=NO_ADAPTERS, input_length=table.input)


def _perplexity(table: PerplexityTable) -> Iterator[Scenario]:
    yield Perplexity(
        **_common(table, "perplexity"), adapters=NO_ADAPTERS, tokens=table.tokens, reference=table.reference
    )


def _generation(table: GenerationTable) -> Iterator[Scenario]:
    yield Generation(
        **_common(table, "tok/s"),
        adapters=NO_ADAPTERS,
        requests=table.requests,
        input_length=table.input,
        output_length=table.output,
        text=table.text,
        drafts=table.drafts,
    )


def _reuse(table: ReuseTable) -> Iterator[Scenario]:
    yield Reuse(
        **_common(table, "ms"),
        adapters=_mix(table.adapters),
        input_length=table.input,
        question=table.question,
        kv_from=table.kv_from,
        alora=table.alora,
    )


def _serve(table: ServeTable) -> Iterator[Scenario]:
    counts = [0] if table.adapters is None else table.adapters.count
    is_sweep = len(counts) > 1
    for count in counts:
        common = _common(table, "tok/s")
        if is_sweep:
            # Without a title, the scenarios of a sweep share its name.
            common["name"] = f"{table.name}-{count}"
        yield Serve(
            **common,
            adapters=_mix(table.adapters, count),
            popularity=_popularity(table.popularity),
            base_share=table.base_share,
            device_adapters=table.device_adapters,
            requests=table.requests,
            input_length=table.input,
            output_length=table.output,
            concurrency=table.concurrency,
            rate=table.rate,
            cv=table.cv,
            first_token_target=table.first_token_target,
            seed=table.seed,
            sweep=table.name if is_sweep else None,
        )


def _popularity(table: PopularityTable) -> Popularity:
    return Popularity(power=table.power, zipf=table.zipf)


_Making = Callable[[Any], Iterator[Scenario]]
_MADE: Final[dict[type[ScenarioTable], _Making]] = {
    PrefillTable: _prefill,
    DecodeTable: _decode,
    OverheadTable: _overhead,
    FirstTokenTable: _first_token,
    MemoryTable: _memory,
    LoadTable: _load,
    ServeTable: _serve,
    PerplexityTable: _perplexity,
    GenerationTable: _generation,
    ReuseTable: _reuse,
}
