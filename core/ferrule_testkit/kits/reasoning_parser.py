"""The kit of reasoning parsers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from ferrule.interfaces.parsers import ChoiceContext, Content, Reasoning, ReasoningParser, TextDelta
from ferrule_testkit.kits.base import Kit, does_not_apply, promise, shown
from ferrule_testkit.kits.cuts import cuts
from ferrule_testkit.kits.parsers import FOREIGN, PLAIN, Fold, fold, linear, same, squeezed
from ferrule_testkit.tokenizers import ByteTokenizer

_HELD_BACK = 256  # characters that may wait for a decision


@dataclass(frozen=True)
class Thought:
    """An answer of the model, markup included, and what it means."""

    text: str
    reasoning: str
    content: str


class ReasoningParserKit(Kit):
    """A reasoning parser parts thoughts from the answer the same way however the text is cut, and loses nothing.

    Give `samples`: answers in the parser's own protocol. Without them only the promises that hold for any text are
    proved.
    """

    kind = "reasoning_parser"
    samples: Sequence[Thought] = ()

    context: ChoiceContext = ChoiceContext()

    def make(self) -> ReasoningParser:
        """Make a parser at the beginning of a choice, with a tokenizer of bytes where `context` has none."""
        parser: ReasoningParser = self.new()
        parser.begin(replace(self.context, tokenizer=self.context.tokenizer or ByteTokenizer()))
        return parser

    def texts(self) -> Iterator[str]:
        yield from (sample.text for sample in self.samples)
        yield from PLAIN
        yield from FOREIGN

    # ------------------------------------------------------------------------------------ promises

    def test_thoughts_and_answer_are_parted(self) -> None:
        """Split each sample into its reasoning and its content."""
        for sample in self._samples():
            folded = fold(self.make(), [sample.text])
            got, wanted = (folded.reasoning, folded.content), (sample.reasoning, sample.content)
            promise(got == wanted, f"{shown(sample.text)} gives {shown(got)}, not {shown(wanted)}")

    def test_any_cut_gives_the_same(self) -> None:
        """Return events that sum to the same answer, however a text is cut into deltas."""
        for text in self.texts():
            whole = fold(self.make(), [text])
            for pieces in cuts(text):
                same(whole, fold(self.make(), pieces), text, pieces)

    def test_short_texts_in_every_cut(self) -> None:
        """Return the same for short texts, and for the beginnings and ends of the samples, in each of their cuts."""
        long = [sample.text for sample in self.samples] + list(FOREIGN[-4:])
        for text in dict.fromkeys(part for each in long for part in (each[:9], each[-9:])):
            whole = fold(self.make(), [text])
            for pieces in cuts(text):
                same(whole, fold(self.make(), pieces), text, pieces)

    def test_truncation_loses_nothing(self) -> None:
        """Keep, wherever a text ends, all of the reasoning and the content that came, in order."""
        for sample in self._samples():
            first = sample.text.find(sample.reasoning)
            last = sample.text.rfind(sample.content)
            for end in range(len(sample.text)):
                seen = sample.text[first : min(end, first + len(sample.reasoning))] if end > first else ""
                seen += sample.text[last : min(end, last + len(sample.content))]
                got = fold(self.make(), [sample.text[:end]]).text
                place = f"{shown(sample.text)} that ends after {end} characters"
                promise(squeezed(seen) in squeezed(got), f"{place} gives {shown(got)}, not {shown(seen)}")
                came = sample.text[:end]
                promise(
                    len(squeezed(got)) <= len(squeezed(came)), f"{place} gives {shown(got)}, more than {shown(came)}"
                )

    def test_truncation_never_raises(self) -> None:
        """Raise nothing and make nothing up, wherever any text ends."""
        for text in self.texts():
            for end in range(len(text)):
                got = fold(self.make(), [text[:end]]).text
                promise(len(got) <= end, f"{shown(text[:end])} becomes {shown(got)}, which is longer")

    def test_text_without_markup_survives(self) -> None:
        """Keep all of a text without markup, as reasoning or as content, to the last white space."""
        for text in PLAIN:
            got = fold(self.make(), list(text)).text
            promise(got == text, f"{shown(text)} becomes {shown(got)}")

    def test_only_reasoning_and_content(self) -> None:
        """Emit no events but reasoning and content: calls are the tool parser's."""
        for text in self.texts():
            parser = self.make()
            for event in [*parser.feed(TextDelta(text)), *parser.finish()]:
                promise(isinstance(event, Reasoning | Content), f"{shown(text)} gives {shown(event)}")

    def test_text_is_not_held_back(self) -> None:
        """Hand on reasoning and content while they come, not at the end."""
        words = "The quick brown fox jumps over the lazy dog. " * 40
        beginnings = ["", *(sample.text[: sample.text.rfind(sample.content)] for sample in self.samples)]
        for beginning in beginnings:
            got = fold(self.make(), beginning + words, finish=False).text
            late = len(words) - len(got)
            promise(late <= _HELD_BACK, f"after {shown(beginning)} {late} of {len(words)} characters wait for the end")

    def test_requests_share_nothing(self) -> None:
        """Parse several texts at the same time, or after one that broke off, as each alone."""
        texts = [text for text in self.texts() if text]
        alone = [fold(self.make(), [text]).answer() for text in texts]
        parsers = [self.make() for _ in texts]
        folds = [Fold() for _ in texts]
        for at in range(max(map(len, texts))):
            for parser, folded, text in zip(parsers, folds, texts, strict=True):
                folded.add(parser.feed(TextDelta(text[at : at + 1])))
        for parser, folded, text, wanted in zip(parsers, folds, texts, alone, strict=True):
            folded.add(parser.finish())
            promise(folded.answer() == wanted, f"{shown(text)} beside others gives {shown(folded.answer())}")

    def test_work_is_linear(self) -> None:
        """Work in proportion to the length of a text, one character at a time, in reasoning and in content."""
        for text in ("word ", "<", "</", "\n", *(sample.text for sample in self.samples)):
            linear(self.make, text)

    # ------------------------------------------------------------------------------------ parts

    def _samples(self) -> Sequence[Thought]:
        if not self.samples:
            does_not_apply("no `samples` are given")
        return self.samples
