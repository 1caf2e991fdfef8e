"""Fields of vLLM's requests that have one effect here: accepted with the values that ask for it, else refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from ..common.shown_value import shown
from ..runtime.sampling_fields import MAX_LOG_PROBS
from ..runtime.vllm_arguments import Accepted, is_among, listed

_ONE_WAY: Final = "images are read as the model's image processor does"
_LIKELY: Final = f"logprobs and prompt_logprobs give up to {MAX_LOG_PROBS} of the most likely tokens"
_ONE_MACHINE: Final = "prompts are computed where answers are generated"
_ONLY_TEXTS: Final = "give the text in input; /tokenize renders conversations"
_NO: Final = (False,)

GENERATION_FIELDS: Final[Mapping[str, Accepted]] = {
    "watermarking": Accepted(_NO, "texts have no watermarks"),
    "logprob_token_ids": Accepted((), _LIKELY),
    "repetition_detection": Accepted((), "give repetition_penalty or max_tokens"),
    "stream_interval": Accepted((1,), "streams have each piece at once"),
    "routed_experts_prompt_start": Accepted((0,), "answers have no data about experts"),
    "return_token_offsets": Accepted(_NO, "text_offset of logprobs has the tokens' positions"),
    "return_prompt_text": Accepted(_NO, "return_token_ids gives the prompt's tokens, and /detokenize their text"),
    "return_mm_kwargs": Accepted((True, False), "answers have no rendered images"),
    "media_io_kwargs": Accepted(({},), _ONE_WAY),
    "prompt_embeds": Accepted((), "give the prompt as a text or as token ids"),
    "kv_transfer_params": Accepted(({},), _ONE_MACHINE),
    "ec_transfer_params": Accepted(({},), _ONE_MACHINE),
    "session_id": Accepted((), "give cache_salt to separate the prefixes of clients, or X-Request-Id for the log"),
}
"""Fields of completions and chats."""

COMPLETION_FIELDS: Final[Mapping[str, Accepted]] = {
    **GENERATION_FIELDS,
    "thinking_token_budget": Accepted((-1,), "chats take it; give max_tokens"),
}
"""Fields of completions."""

POOLED_FIELDS: Final[Mapping[str, Accepted]] = {
    "padding": Accepted(("do_not_pad",), "texts are not padded"),
    "mm_processor_kwargs": Accepted(({},), _ONE_WAY),
    "media_io_kwargs": Accepted(({},), _ONE_WAY),
    "embed_dtype": Accepted(("float32",), "embeddings are float32"),
    "endianness": Accepted(("little",), "encoding_format base64 has little-endian numbers"),
    "use_activation": Accepted((), "the model's files decide, or --normalize-embeddings of the server"),
    "normalize": Accepted((), "the model's files decide, or --normalize-embeddings of the server"),
    "messages": Accepted((), _ONLY_TEXTS),
    "chat_template": Accepted((), _ONLY_TEXTS),
    "chat_template_kwargs": Accepted(({},), _ONLY_TEXTS),
    "add_generation_prompt": Accepted(_NO, _ONLY_TEXTS),
    "continue_final_message": Accepted(_NO, _ONLY_TEXTS),
    "data": Accepted((), "no plugin reads requests; give the text in input"),
}
"""Fields of requests that end in rows."""


class VllmFields:
    """Mixin of bodies that have the fields of a table only to refuse them."""

    vllm_fields: ClassVar[Mapping[str, Accepted]] = {}

    @classmethod
    def without_neutral(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a body without those fields whose value asks for what happens anyway."""
        table = cls.vllm_fields
        return {
            name: value
            for name, value in content.items()
            if name not in table or not is_among(value, table[name].values)
        }

    @classmethod
    def advice(cls, name: str, value: Any) -> str:
        """Returns what an error says about a field that the body does not have."""
        accepted = cls.vllm_fields.get(name)
        if accepted is None:
            return "is not known here"
        if not accepted.values:
            return f"is not supported; {accepted.reason}"
        return f"is {shown(value)}; expected {listed(accepted.values)}: {accepted.reason}"
