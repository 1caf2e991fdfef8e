"""Formats in which models write their reasoning before an answer."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .form import literal, rule_until
from .reader import SPACE, Marks, Steps, TextReader
from .sink import PartSink

ReadAnswer: TypeAlias = Callable[[TextReader, PartSink], Steps[None]]
"""Parses what follows the reasoning."""


@dataclass(frozen=True)
class Answers:
    """Rules of a grammar for what may follow the reasoning."""

    calls: str | None
    """An answer that calls functions; None: it calls none."""
    text: str | None
    """An answer without calls, or with text around them; None: it only calls."""

    @property
    def any(self) -> str:
        """An expression of either answer."""
        return " | ".join(rule for rule in (self.calls, self.text) if rule is not None)


@dataclass(frozen=True)
class BudgetEnd:
    """Tokens of reasoning that ends with a text."""

    texts: str
    """Expression in Lark of a token that the reasoning may have, or of several that begin like its end."""
    ends: str
    """Expression in Lark of the tokens that end it."""
    rules: tuple[str, ...] = ()
    """Rules that the expressions need."""


@dataclass(frozen=True)
class Budget:
    """Maximum number of tokens of the reasoning."""

    num_tokens: int
    ends: Mapping[str, BudgetEnd]
    """How the reasoning can end, by the text that ends it."""

    def rule(self, name: str, mark: str) -> str:
        """Returns rules in Lark of which `name` is reasoning within the budget, and the mark that ends it."""
        end = self.ends[mark]
        first = f"{end.texts}{{0,{self.num_tokens}}} " if self.num_tokens else ""
        return "\n".join([f"{name}: {first}{end.ends}", *end.rules])


def read_text(reader: TextReader, sink: PartSink) -> Steps[None]:
    """Reads an answer that is only text."""
    yield from reader.rest(sink.text)


def begin_pattern(text: str) -> str:
    """Returns the regular expression of a text that begins reasoning. Models may write a line break before it."""
    return r"\n?" + re.escape(text).replace("/", r"\/").replace(r"\ ", " ")


def _begin_rule(text: str, token: Callable[[str], str]) -> str:
    written = token(text)
    return f"/{begin_pattern(text)}/" if written == literal(text) else rf"/\n?/ {written}"


class ReasoningForm(ABC):
    """Format in which a model writes its reasoning."""

    marks: tuple[str, ...] = ()
    """Texts that the parser must see even if they are special tokens, which answers leave out."""

    @abstractmethod
    def opened_by(self, prompt_end: str) -> str:
        """Returns the text that the parser reads before the answer, because the end of the prompt has it already."""

    def begins(self, opened: str) -> Sequence[str]:
        """Returns the texts with which an answer may begin its reasoning, if they could also begin another answer.

        opened: the text that opened_by() returned.
        """
        return ()

    @abstractmethod
    def read(self, reader: TextReader, sink: PartSink, read_answer: ReadAnswer) -> Steps[None]:
        """Parses an answer with or without reasoning up to its end."""

    @abstractmethod
    def ends(self, opened: str) -> Sequence[str]:
        """Returns the texts that may end the reasoning. opened: the text that opened_by() returned."""

    @abstractmethod
    def rules(
        self, opened: str, answers: Answers, token: Callable[[str], str], budget: Budget | None = None
    ) -> Sequence[str]:
        """Returns rules in Lark. `start` is the reasoning, which may be missing, and then an answer.

        opened: the text that opened_by() returned. token: writes a mark, which may be a special token. budget: its
        tokens end the reasoning with one of ends(); None: the reasoning may have any length.
        """


class TaggedReasoning(ReasoningForm):
    """Reasoning between two texts, at the beginning of the answer."""

    def __init__(self, begin: str, end: str, answer_tags: tuple[str, str] | None = None) -> None:
        """answer_tags: texts around the answer, which may be missing."""
        self._begin = begin
        self._end = end
        self._ends = Marks(end)
        self._answer_tags = answer_tags
        self.marks = (begin, end, *(answer_tags or ()))

    def opened_by(self, prompt_end: str) -> str:
        """See ReasoningForm."""
        return self._begin if prompt_end.rstrip().endswith(self._begin) else ""

    def read(self, reader: TextReader, sink: PartSink, read_answer: ReadAnswer) -> Steps[None]:
        """See ReasoningForm."""
        space = yield from reader.take_while(SPACE)
        if (yield from reader.skip(self._begin)):
            sink.begin_reasoning(reader.place)
            # Models repeat the tag that the prompt has.
            yield from reader.take_while(SPACE)
            yield from reader.skip(self._begin)
            if (yield from reader.until(self._ends, sink.reasoning)):
                reader.take(len(self._end))
                sink.end_reasoning(reader.place)
        else:
            sink.text(space)
        yield from self._read_answer(reader, sink, read_answer)

    def _read_answer(self, reader: TextReader, sink: PartSink, read_answer: ReadAnswer) -> Steps[None]:
        if self._answer_tags is None:
            yield from read_answer(reader, sink)
            return
        begin, end = self._answer_tags
        space = yield from reader.take_while(SPACE)
        if not (yield from reader.skip(begin)):
            sink.text(space)
        inner = TextReader()
        steps = read_answer(inner, sink)
        outer_place = sink.place
        sink.place = lambda: outer_place() - inner.num_left

        def forward(text: str) -> None:
            inner.add(text)
            next(steps, None)

        marks = Marks(end)
        while (yield from reader.until(marks, forward)):
            reader.take(len(end))
        inner.ended = True
        yield from steps

    def begins(self, opened: str) -> Sequence[str]:
        """See ReasoningForm."""
        return () if opened else (self._begin,)

    def ends(self, opened: str) -> Sequence[str]:
        """See ReasoningForm."""
        return (self._end,)

    def rules(
        self, opened: str, answers: Answers, token: Callable[[str], str], budget: Budget | None = None
    ) -> Sequence[str]:
        """See ReasoningForm."""
        begin = "" if opened else f"{_begin_rule(self._begin, token)} "
        optional = "" if opened else "?"
        return [
            f"start: reasoning{optional} ({answers.any})",
            rf"reasoning: {begin}reasoning_text /\n?\n?/",
            *(
                rule_until("reasoning_text", self._end, token)
                if budget is None
                else [budget.rule("reasoning_text", self._end)]
            ),
        ]


class GraniteReasoning(ReasoningForm):
    """Granite 3.2's reasoning between phrases, or Granite 3.3's between tags. The answer shows which one it is."""

    _PHRASES = ("Here is my thought process:", "Here's my thought process:")
    _ENDS = ("Here is my response:", "Here's my response:")

    def __init__(self) -> None:
        self._tagged = TaggedReasoning("<think>", "</think>", ("<response>", "</response>"))
        self._end_marks = Marks(*self._ENDS)
        self.marks = self._tagged.marks

    def opened_by(self, prompt_end: str) -> str:
        """See ReasoningForm."""
        return self._tagged.opened_by(prompt_end)

    def read(self, reader: TextReader, sink: PartSink, read_answer: ReadAnswer) -> Steps[None]:
        """See ReasoningForm."""
        for phrase in self._PHRASES:
            if (yield from reader.skip(phrase)):
                sink.begin_reasoning(reader.place)
                if end := (yield from reader.until(self._end_marks, sink.reasoning)):
                    reader.take(len(end))
                    sink.end_reasoning(reader.place)
                yield from read_answer(reader, sink)
                return
        yield from self._tagged.read(reader, sink, read_answer)

    def begins(self, opened: str) -> Sequence[str]:
        """See ReasoningForm."""
        return () if opened else (*self._tagged.begins(opened), self._PHRASES[0])

    def ends(self, opened: str) -> Sequence[str]:
        """See ReasoningForm. Without a beginning in the prompt, the model may use the phrases."""
        return self._tagged.ends(opened) if opened else (self._ENDS[0], *self._tagged.ends(opened))

    def rules(
        self, opened: str, answers: Answers, token: Callable[[str], str], budget: Budget | None = None
    ) -> Sequence[str]:
        """See ReasoningForm."""
        if opened:
            return self._tagged.rules(opened, answers, token, budget)
        tagged = self._tagged.rules(opened, answers, token, budget)[1:]
        return [
            f"start: (reasoning | phrases)? ({answers.any})",
            rf"phrases: {_begin_rule(self._PHRASES[0], literal)} phrases_text /\n?\n?/",
            *(
                rule_until("phrases_text", self._ENDS[0], literal)
                if budget is None
                else [budget.rule("phrases_text", self._ENDS[0])]
            ),
            *tagged,
        ]
