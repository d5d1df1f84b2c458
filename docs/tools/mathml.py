"""A Markdown extension: `$x^2$` becomes MathML, which browsers draw without a script, a font or a server."""

import re
from xml.etree import ElementTree

from latex2mathml.converter import convert_to_element
from markdown import Extension, Markdown
from markdown.inlinepatterns import InlineProcessor


INLINE = r"(?<![\\$])\$(?![\s$])((?:\\.|[^\\$\n]|\n(?!\n))+?)(?<!\s)\$(?![\d$])"
DISPLAY = r"(?<![\\$])\$\$((?:\\.|[^\\$])+?)\$\$"


class MathML(Extension):
    def extendMarkdown(self, md: Markdown) -> None:
        # Before escapes (180), which would take the backslashes, and after code (190), which may hold dollars.
        md.inlinePatterns.register(_Formula(DISPLAY, md, display="block"), "math-display", 186)
        md.inlinePatterns.register(_Formula(INLINE, md, display="inline"), "math-inline", 185)


class _Formula(InlineProcessor):
    def __init__(self, pattern: str, md: Markdown, display: str) -> None:
        super().__init__(pattern, md)
        self._display = display

    def handleMatch(self, m: re.Match, data: str) -> tuple[ElementTree.Element, int, int]:  # pyright: ignore
        del data
        math = convert_to_element(m.group(1), display=self._display)
        math.set("title", m.group(1))
        return math, m.start(0), m.end(0)


def makeExtension(**kwargs) -> MathML:
    return MathML(**kwargs)
