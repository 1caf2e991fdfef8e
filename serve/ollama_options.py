"""Options of Ollama's requests, by their names in Modelfiles: each is used, has no effect on answers, or is refused."""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import Field, model_validator

from ..common.shown_value import shown
from ..runtime.sampling_fields import INT32_MAX
from .errors import ApiError
from .openai_fields import Fields, MinP, RepetitionPenalty, Stops, Temperature, TopK, TopP, only

_UNLIMITED: Final = (-1, -2)
"""Values of num_predict that let an answer fill the context."""
_RANDOM_SEED: Final = -1
_WHOLE_CONTEXT: Final = -1
_NAMES: Final = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}
"""Names of sampling fields in Ollama's API and in OpenAI's. Both have the same meaning."""

Number = Annotated[int, Field(ge=-1, le=INT32_MAX)]


class OllamaOptions(Fields):
    """Options of a request, and parameters of a Modelfile."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    """Maximum number of tokens of the answer, cut to the context; -1 and -2: the rest of the context."""
    num_ctx: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of tokens that the context must have at least."""
    temperature: Temperature | None = None
    top_k: TopK | None = None
    top_p: TopP | None = None
    min_p: MinP | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    """-1: a random seed per request."""
    stop: Stops | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """Concerns all tokens of the prompt and the answer; the same holds for the other penalties."""
    repeat_last_n: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """With penalties only -1, the whole context."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    typical_p: Annotated[float, only(1.0, "tokens are chosen by top_k, top_p and min_p")] = 1.0
    tfs_z: Annotated[float, only(1.0, "tokens are chosen by top_k, top_p and min_p")] = 1.0
    mirostat: Annotated[int, only(0, "tokens are chosen by top_k, top_p and min_p")] = 0
    mirostat_tau: float | None = None
    """No effect: mirostat is off. The same holds for the next field."""
    mirostat_eta: float | None = None
    penalize_newline: Annotated[bool, only(True, "penalties concern all tokens")] = True
    f16_kv: Annotated[bool, only(True, "the engine decides how it stores keys and values")] = True
    logits_all: Annotated[bool, only(False, "answers have no logits; give logprobs")] = False
    vocab_only: Annotated[bool, only(False, "the model is loaded with its weights")] = False
    embedding_only: Annotated[bool, only(False, "/api/embed makes embeddings")] = False
    num_keep: Number | None = None
    """No effect: no token of a prompt is dropped."""
    num_batch: Number | None = None
    """No effect: the server's flags decide. The same holds for the fields from here on, which answers do not show."""
    num_gpu: Number | None = None
    main_gpu: Number | None = None
    num_thread: Number | None = None
    draft_num_predict: Number | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None

    @model_validator(mode="after")
    def _accepted_together(self) -> OllamaOptions:
        if self.num_predict == 0:
            raise ValueError("num_predict is 0; expected 1 or more, or -1 for the rest of the context")
        penalties = {
            "repeat_penalty": self.repeat_penalty not in (None, 1.0),
            "presence_penalty": bool(self.presence_penalty),
            "frequency_penalty": bool(self.frequency_penalty),
        }
        given = [name for name, is_given in penalties.items() if is_given]
        if given and self.repeat_last_n not in (None, _WHOLE_CONTEXT):
            raise ValueError(
                f"repeat_last_n is {shown(self.repeat_last_n)} with {given[0]}; expected -1, because penalties concern "
                "all tokens"
            )
        return self

    def sampling(self) -> dict[str, Any]:
        """Returns the options of sampling as fields of OpenAI's API; leaves out those that are not given."""
        values = {name: getattr(self, own) for own, name in _NAMES.items()}
        if self.seed != _RANDOM_SEED:
            values["seed"] = self.seed
        return {name: value for name, value in values.items() if value is not None}

    @property
    def answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None: the rest of the context."""
        return None if self.num_predict in _UNLIMITED else self.num_predict

    def check_context(self, max_tokens: int) -> None:
        """Raises ApiError if the context is larger than the engine's. max_tokens: of a prompt and its answer."""
        if self.num_ctx is not None and self.num_ctx > max_tokens:
            raise ApiError(
                f"num_ctx is {self.num_ctx}; expected at most {max_tokens}, the context of this server "
                "(--max_seq_len and --kv_cache_tokens)",
                param="num_ctx",
            )
