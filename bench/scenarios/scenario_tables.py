"""Tables of a scenario file as pydantic models. bench/measuring.md describes the format."""

from __future__ import annotations

from dataclasses import fields as fields_of
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, create_model

from adaptrt import ConfigError
from adaptrt.common.byte_size import parse_weight_memory

from .families import FAMILIES
from .kinds import KV_FROM, TEXTS
from .model import BenchModel
from .weight_formats import FORMATS

SCHEMA: Final = 1
MAX_INTEGER: Final = 1 << 31
PAIRS: Final = 8
"""Default number of pairs in a sample of an alternating comparison."""


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _as_range(value: Any) -> Any:
    """Converts to (low, high); a single number becomes a range with only this number."""
    is_pair = isinstance(value, list) and len(value) == 2
    low, high = value if is_pair else (value, value)
    if any(isinstance(bound, bool) or not isinstance(bound, int) for bound in (low, high)):
        low = 0
    if low < 1 or (is_pair and low >= high):
        raise ValueError("expected an integer of at least 1, or [low, high] with 1 <= low < high")
    return low, high if is_pair else high + 1


def _as_weight_memory(value: Any) -> Any:
    try:
        return parse_weight_memory(value, "it")
    except ConfigError as error:
        raise ValueError(str(error).partition("; ")[2]) from None


Text = Annotated[str, StringConstraints(pattern=r"\S")]
Positive = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
NotNegative = Annotated[int, Field(ge=0, le=MAX_INTEGER)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveNumber = Annotated[float, Field(gt=0)]
NotNegativeNumber = Annotated[float, Field(ge=0)]
Range = Annotated[tuple[int, int], BeforeValidator(_as_range)]
"""Number of tokens: one number, or a range [low, high)."""


class Table(BaseModel):
    """A table without unknown keys or type conversion."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class RunTable(Table):
    """[run]."""

    repeats: Positive = 5
    quiet_share: Share = 0.06
    extra_samples: NotNegative = 2
    quiet_wait: NotNegativeNumber = 30.0


def _model_table() -> type[Table]:
    defaults = {field.name: getattr(BenchModel(), field.name) for field in fields_of(BenchModel)}
    types: dict[type, Any] = {bool: bool, int: Positive, float: NotNegativeNumber, str: Text}
    columns: dict[str, Any] = {name: (types[type(default)], default) for name, default in defaults.items()}
    return create_model("ModelTable", __base__=Table, **columns)


ModelTable = _model_table()


class EngineTable(Table):
    """[[engine]]."""

    name: Text
    directory: Text | None = None
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    lora: bool = True
    dora: bool | None = None
    max_lora_rank: Positive = 64
    max_batch_size: Positive = 16
    max_num_tokens: Positive = 1024
    max_seq_len: Positive = 1024
    build_flags: list[str] = []
    convert_flags: list[str] = []
    model_dir: Text | None = None
    family: Annotated[list[Literal[tuple(FAMILIES)]], BeforeValidator(_as_list)] = []  # type: ignore[valid-type]
    weights: Annotated[list[Literal[tuple(FORMATS)]], BeforeValidator(_as_list)] = []  # type: ignore[valid-type]
    weight_memory: Annotated[int, BeforeValidator(_as_weight_memory)] | None = None
    optional: bool = False


class AdaptersTable(Table):
    """The adapters of a scenario; several counts form a sweep."""

    count: Annotated[list[NotNegative], BeforeValidator(_as_list), Field(min_length=1)]
    ranks: Annotated[list[Positive], BeforeValidator(_as_list), Field(min_length=1)] = [16]
    dora_share: Share = 0.0
    kind: Literal["lora", "shift", "ia3", "lm_head", "rotary", "frozen_a"] = "lora"
    storage: Literal["exact", "compressed", "int8"] = "exact"


class PopularityTable(Table):
    """Popularity of adapters. Exactly one of the two keys must be given."""

    power: PositiveNumber | None = None
    zipf: PositiveNumber | None = None


class CompareTable(Table):
    """[[scenario.compare]]."""

    base: Text | None = Field(default=None, alias="with")
    measure: Literal["ratio", "alternating", "roofline", "value"] | None = None
    at_least: NotNegativeNumber | None = None
    at_most: NotNegativeNumber | None = None
    at_least_with_amx: NotNegativeNumber | None = None
    pairs: Annotated[int, Field(ge=2, le=MAX_INTEGER)] = PAIRS


class ScenarioTable(Table):
    """Keys of [[scenario]] that all kinds share."""

    name: Text
    title: Text | None = None
    engine: Annotated[list[Text], BeforeValidator(_as_list), Field(min_length=1)]
    compare: list[CompareTable] = []


class PrefillTable(ScenarioTable):
    """See adaptrt.tools.bench.scenario_types.Prefill."""

    kind: Literal["prefill"]
    adapters: AdaptersTable | None = None
    input: Positive = 512
    threads: Positive | None = None


class DecodeTable(ScenarioTable):
    """A generating batch."""

    kind: Literal["decode"]
    adapters: AdaptersTable | None = None
    requests: Positive
    input: Positive = 64
    output: Annotated[int, Field(ge=4, le=MAX_INTEGER)] = 64
    threads: Positive | None = None
    competing_processes: NotNegative = 0


class OverheadTable(ScenarioTable):
    """Time outside of the engine."""

    kind: Literal["overhead"]
    adapters: AdaptersTable | None = None
    requests: Positive
    input: Positive = 64
    output: Annotated[int, Field(ge=4, le=MAX_INTEGER)] = 64


class FirstTokenTable(ScenarioTable):
    """Time to first token."""

    kind: Literal["first_token"]
    adapters: AdaptersTable
    input: Positive = 512
    adapter_from: Literal["device", "host", "disk"]


class MemoryTable(ScenarioTable):
    """Memory of a process."""

    kind: Literal["memory"]
    adapters: AdaptersTable | None = None
    requests: Positive
    input: Positive = 64
    output: Positive = 64


class LoadTable(ScenarioTable):
    """Time to load an engine."""

    kind: Literal["load"]
    input: Positive = 16


class ServeTable(ScenarioTable):
    """A stream of requests."""

    kind: Literal["serve"]
    adapters: AdaptersTable | None = None
    popularity: PopularityTable = PopularityTable(power=1.0)
    base_share: Share = 0.0
    device_adapters: Positive | None = None
    requests: Positive
    input: Range
    output: Range
    concurrency: Positive | None = None
    rate: PositiveNumber | None = None
    cv: PositiveNumber = 1.0
    first_token_target: PositiveNumber = 6.0
    seed: NotNegative = 42


class GenerationTable(ScenarioTable):
    """Requests with a restricted text."""

    kind: Literal["generate"]
    requests: Positive
    input: Positive = 64
    output: Annotated[int, Field(ge=2, le=MAX_INTEGER)] = 64
    text: Literal[TEXTS] = "greedy"  # type: ignore[valid-type]
    drafts: NotNegative = 0


class ReuseTable(ScenarioTable):
    """A prompt that was computed before."""

    kind: Literal["reuse"]
    adapters: AdaptersTable | None = None
    input: Positive = 4096
    question: NotNegative = 0
    kv_from: Literal[KV_FROM]  # type: ignore[valid-type]
    alora: bool = False


class PerplexityTable(ScenarioTable):
    """Quality of an engine of the demo's model."""

    kind: Literal["perplexity"]
    tokens: Positive = 4096
    reference: Text


AnyScenario = (
    PrefillTable
    | DecodeTable
    | OverheadTable
    | FirstTokenTable
    | MemoryTable
    | LoadTable
    | ServeTable
    | PerplexityTable
    | GenerationTable
    | ReuseTable
)
KINDS: Final[dict[str, type[ScenarioTable]]] = {
    get_args(table.model_fields["kind"].annotation)[0]: table for table in get_args(AnyScenario)
}


class FileTable(Table):
    """The whole file."""

    schema_: Literal[1] = Field(alias="schema")
    run: RunTable = RunTable()
    model: ModelTable | None = None  # type: ignore[valid-type]
    engine: list[EngineTable] = []
    scenario: list[Annotated[AnyScenario, Field(discriminator="kind")]] = []


NESTED: Final[dict[tuple[str, ...], type[Table]]] = {
    (): FileTable,
    ("run",): RunTable,
    ("model",): ModelTable,
    ("engine",): EngineTable,
    ("scenario", "compare"): CompareTable,
    ("scenario", "adapters"): AdaptersTable,
    ("scenario", "popularity"): PopularityTable,
}
"""Tables by their path in a file; KINDS has the tables of each scenario kind."""
