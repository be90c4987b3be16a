"""Stop strings: find the first one in a text that arrives in pieces, and hold back only what may still become one.

Pure: it knows text alone. What comes out does not depend on where the text was cut.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """A request's stop strings, prepared once and shared by its choices."""

    def __init__(self, texts: Sequence[str], *, include_in_output: bool = False) -> None:
        """texts: none empty. include_in_output: the text ends behind the match instead of before it."""
        self.texts = tuple(texts)
        self.include_in_output = include_in_output
        self.borders = tuple(_borders(text) for text in self.texts)
        self.first_characters = frozenset(text[0] for text in self.texts)


class StopFilter:
    """One choice's text on its way out. The match that is complete first wins, the longest of those complete together.

    Each stop string keeps how many of its characters the text so far ends with (Knuth-Morris-Pratt), so a character
    costs the same however long the strings are; the longest of these counts is what is held back.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._lengths = [0] * len(stops.texts)
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def push(self, text: str) -> str:
        """The part of the text so far that is new and certain. After a match: nothing."""
        if self.matched is not None:
            return ""
        if not self._held and self._stops.first_characters.isdisjoint(text):
            return text  # nearly every token
        for offset, character in enumerate(text, start=1):
            match = self._advance(character)
            if match is not None:
                self.matched = match
                seen = self._held + text[:offset]
                self._held = ""
                return seen if self._stops.include_in_output else seen[: len(seen) - len(match)]
        seen = self._held + text
        certain = len(seen) - max(self._lengths, default=0)
        self._held = seen[certain:]
        return seen[:certain]

    def finish(self) -> str:
        """What was held back, when no more text follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Take one character; the longest stop string it completes."""
        match: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops.texts, self._stops.borders, strict=True)):
            length = self._lengths[i]
            while length and stop[length] != character:
                length = borders[length - 1]
            if stop[length] == character:
                length += 1
            self._lengths[i] = length
            if length == len(stop) and (match is None or len(stop) > len(match)):
                match = stop
        return match


def _borders(text: str) -> tuple[int, ...]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return tuple(borders)
