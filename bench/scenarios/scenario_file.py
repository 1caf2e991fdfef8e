"""Reads scenario files. bench/measuring.md describes the format; unknown keys are errors with a line number."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
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

from .kinds import Comparison, CrowdedDecode, EngineSpec, FirstToken, Load, Memory, Overhead, ScenarioFile
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
    LoadTable,
    MemoryTable,
    OverheadTable,
    PopularityTable,
    PrefillTable,
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


class _Reader:
    """Creates scenarios from the tables, and notes inconsistencies."""

    def __init__(self, table: FileTable, place: Place) -> None:
        self._table = table
        self._place = place

    def read(self, path: Path, text: str) -> ScenarioFile:
        engines = self._engines(path.parent)
        model = self._model(needed=any(engine.directory is None for engine in engines.values()))
        found = list(self._scenarios(engines))
        if not found:
            self._place.complain((), "has no [[scenario]]")
        file = ScenarioFile(
            path=path,
            run=RunSettings(**self._table.run.model_dump()),
            model=model,
            engines=engines,
            scenarios=tuple(scenario for scenario, _ in found),
            comparisons={scenario.name: comparisons for scenario, comparisons in found},
            text=text,
        )
        check_comparisons(file, self._place)
        return file

    def _model(self, *, needed: bool) -> BenchModel | None:
        table = self._table.model
        if table is None:
            if needed:
                self._place.complain(("model",), "is missing, and an engine without a directory is built of it")
            return None
        model = BenchModel(**table.model_dump())
        for problem in model.problems():
            self._place.complain(("model",), problem)
        return model

    def _engines(self, directory: Path) -> dict[str, EngineSpec]:
        engines: dict[str, EngineSpec] = {}
        for index, table in enumerate(self._table.engine):
            where: TomlPath = ("engine", index)
            if table.name in engines:
                self._place.complain((*where, "name"), f'is "{table.name}", as is an engine before it')
            engines[table.name] = _engine(table, directory)
            if table.directory is not None:
                for name in sorted(table.model_fields_set - {"name", "directory", "optional"}):
                    self._place.complain((*where, name), "has no effect on an existing engine: it has a directory")
        return engines

    def _scenarios(self, engines: dict[str, EngineSpec]) -> Iterator[tuple[Scenario, tuple[Comparison, ...]]]:
        names: set[str] = set()
        for index, table in enumerate(self._table.scenario):
            where: TomlPath = ("scenario", index)
            if table.engine not in engines:
                known = ", ".join(f'"{name}"' for name in engines) or "none"
                self._place.complain((*where, "engine"), f'is "{table.engine}"; the file\'s engines: {known}')
            if isinstance(table, ServeTable):
                self._check_serve(where, table)
            for number, compare in enumerate(table.compare):
                self._check_comparison((*where, "compare", number), compare)
            for scenario in _MADE[type(table)](table):
                if scenario.name in names:
                    self._place.complain((*where, "name"), f'is "{scenario.name}", as is a scenario before it')
                names.add(scenario.name)
                yield scenario, tuple(map(_comparison, table.compare))

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


def _engine(table: EngineTable, directory: Path) -> EngineSpec:
    values = table.model_dump()
    values["directory"] = None if table.directory is None else directory / Path(table.directory).expanduser()
    values["dora"] = table.lora if table.dora is None else table.dora
    values["build_flags"] = tuple(table.build_flags)
    return EngineSpec(**values)


def _measure_of(table: CompareTable) -> str:
    return table.measure or ("ratio" if table.base is not None else "roofline")


def _comparison(table: CompareTable) -> Comparison:
    measure = _measure_of(table)
    return Comparison(
        base=table.base,
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
        "engine": table.engine,
        "unit": unit,
    }


def _mix(table: AdaptersTable | None, count: int | None = None) -> AdapterMix:
    if table is None:
        return NO_ADAPTERS
    return AdapterMix(table.count[0] if count is None else count, tuple(table.ranks), table.dora_share)


def _prefill(table: PrefillTable) -> Iterator[Scenario]:
    yield Prefill(**_common(table, "tok/s"), adapters=_mix(table.adapters), input_length=table.input)


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
}
