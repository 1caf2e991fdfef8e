"""Options of Ollama's requests, by their names in Modelfiles: each is used, has no effect on answers, or is refused."""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import Field, model_validator

from ..runtime.sampling_fields import INT32_MAX
from .errors import ApiError
from .llama_sampling import LlamaSampling
from .openai_fields import only

_UNLIMITED: Final = (-1, -2)
"""Values of num_predict that let an answer fill the context."""

Number = Annotated[int, Field(ge=-1, le=INT32_MAX)]


class OllamaOptions(LlamaSampling):
    """Options of a request, and parameters of a Modelfile."""

    num_predict: Annotated[int, Field(ge=-2, le=INT32_MAX)] | None = None
    """Maximum number of tokens of the answer, cut to the context; -1 and -2: the rest of the context."""
    num_ctx: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """Number of tokens that the context must have at least."""
    tfs_z: Annotated[float, only(1.0, "tokens are chosen by top_k, top_p and min_p")] = 1.0
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
    def _asks_for_tokens(self) -> OllamaOptions:
        if self.num_predict == 0:
            raise ValueError("num_predict is 0; expected 1 or more, or -1 for the rest of the context")
        return self

    @property
    def answer_tokens(self) -> int | None:
        """Maximum number of tokens of the answer; None: the rest of the context."""
        return None if self.num_predict in _UNLIMITED else self.num_predict

    def check_context(self, max_tokens: int) -> None:
        """Raises ApiError if the context is larger than the engine's. max_tokens: of a prompt and its answer."""
        if self.num_ctx is not None and self.num_ctx > max_tokens:
            raise ApiError(
                f"num_ctx is {self.num_ctx}; expected at most {max_tokens}, the context of this server "
                "(--max-seq-len and --kv-cache-tokens)",
                param="num_ctx",
            )
