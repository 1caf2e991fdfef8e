"""Receipts in answers to requests that ask for them (return_receipt)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..runtime.adapter_tokenizers import TextTokenizer
from ..runtime.receipts import FORMAT, AnswerDigest, adapters_in, digest_of_text, environment_of, request_content
from .conversation import Conversation
from .generation import TextPiece, TextRequest
from .openai_chat_fields import ChatRequest
from .openai_fields import GenerationFields
from .service import Service
from .work import WorkKind


def receipt_field(receipt: ReceiptMaker | None, pieces: Iterable[TextPiece] = ()) -> dict[str, Any]:
    """Returns the field of an answer with its receipt, after these last pieces; nothing without a receipt."""
    if receipt is None:
        return {}
    for piece in pieces:
        receipt.add(piece.index, piece)
    return {"receipt": receipt.content()}


class ReceiptMaker:
    """Makes the receipt of one answer while its pieces arrive."""

    def __init__(
        self,
        environment: dict[str, Any],
        requests: Sequence[dict[str, Any]],
        adapter: str | None,
        own: TextTokenizer,
        template: str | None,
    ) -> None:
        """Called only by of()."""
        self._head = {
            "format": FORMAT,
            "environment": environment,
            "adapters": adapters_in(adapter),
            "tokenizer": own.content.hex(),
            "template": None if template is None else digest_of_text(template),
        }
        self._requests = requests
        self._answers: dict[int, AnswerDigest] = defaultdict(AnswerDigest)

    @classmethod
    async def of(
        cls,
        service: Service,
        fields: GenerationFields,
        requests: Sequence[TextRequest],
        own: TextTokenizer,
        template: str | None = None,
    ) -> ReceiptMaker | None:
        """Returns the maker for these requests of one client; None: the client asks for no receipt.

        own: their tokenizer. template: source of the template that wrote a chat.
        """
        if not fields.return_receipt:
            return None
        environment = await service.executor.work.run(WorkKind.FILES, environment_of, service.executor.executor)
        contents = [
            request_content(
                service.generator.executor_request(request, own.end_ids),
                with_prompt=fields.return_receipt_prompt,
                seen_prompt=None if request.virtual_prompt is None else request.prompt,
                images=() if request.virtual_prompt is None else request.virtual_prompt.digests,
            )
            for request in requests
        ]
        return cls(environment, contents, requests[0].adapter, own, template)

    @classmethod
    async def of_chat(cls, service: Service, fields: ChatRequest, conversation: Conversation) -> ReceiptMaker | None:
        """Returns the maker for a conversation; None: the client asks for no receipt."""
        if not fields.return_receipt:
            return None
        template = await service.prompts.template_for(fields, conversation.adapter)
        source = None if template is None else template.text(with_tools=bool(fields.called_tools))
        return await cls.of(service, fields, [conversation.request], conversation.tokenizer, source)

    def add(self, index: int, piece: TextPiece) -> None:
        """Adds a piece of the answer at this index: that of its request times the answers of each, plus its own."""
        self._answers[index].add(piece.token_ids, (entry.log_prob for entry in piece.log_probs))

    def content(self) -> dict[str, Any]:
        """Returns the receipt for JSON, after the last piece."""
        num_answers = max((int(one["num_answers"] or 1) for one in self._requests), default=1)
        of_beams = max((int(one["sampling"].get("beam_width", 1)) for one in self._requests), default=1)
        each = max(num_answers, of_beams)
        return self._head | {
            "requests": [
                request
                | {
                    "answers": [
                        answer.content()
                        for index, answer in sorted(self._answers.items())
                        if at * each <= index < (at + 1) * each
                    ]
                }
                for at, request in enumerate(self._requests)
            ]
        }
