"""`multigrad explain`: print a section of the documentation, without imports of Keras or a framework.

A wheel contains the pages as `multigrad/pages/` (see `hatch_build.py`). A clone has them in `docs/`.
"""

import difflib
import math
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
# The limits come first, because errors name their sections.
PAGES = (
    "limits.md",
    "faq.md",
    "which-op.md",
    "getting-started/*.md",
    "guides/*.md",
    "migrate/*.md",
    "performance/*.md",
)
_TITLE = r"(?P<title>.+?)"
_ANCHOR = r" \{#(?P<anchor>[\w-]+)[^}\n]*\}"
_HEADING = re.compile(rf"^(?:\A# |## |###+ (?=.*\{{#)){_TITLE}(?:{_ANCHOR})?$", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_MOST = 10  # sections that a search lists
_OF_QUESTIONS = re.compile(r"an?|the|i|my|is|do|does|can|how|what|why|where|to|in|of")
"""Words that say nothing about a section."""


class Section(NamedTuple):
    """A section of a page."""

    page: str
    anchor: str
    title: str
    text: str

    @property
    def name(self) -> str:
        """The name in the last line of an error, such as `limits#forward-mode`."""
        return f"{self.page}#{self.anchor}"

    @property
    def heading(self) -> str:
        """The text in which a search finds the section first."""
        return f"{self.title} {self.anchor}"

    @property
    def all(self) -> str:
        """The heading and the text, each sentence on one line."""
        return " ".join(f"{self.heading} {self.text}".split())


def explain(words: str = "") -> int:
    """Print the section that an error names, or the sections in which words occur.

    ```python
    from multigrad.cli.explain import explain

    status = explain("limits#closed-over-tensors")
    ```

    Arguments:
        words: the name of a section, such as `limits#forward-mode` or `forward-mode`, the name of a page, or
            words of a section. Without words, all sections are listed.

    Returns:
        The exit status: 0, or 1 if there is no such section.
    """
    everything = sections()
    wanted = words.lower().removeprefix("#").strip()
    named = [section for section in everything if wanted in ("", section.name, section.anchor, section.page)]
    found = named or search(wanted, everything)
    if not found:
        _print_nearest(words, everything)
        return 1
    if len(found) == 1:
        _print_section(found[0], {section.page for section in everything})
    else:
        _print_list(found, len(found) if named else _MOST)
    return 0


def sections() -> list[Section]:
    """Return the sections of all pages. The first one of a page is the text below its title."""
    folder = _PACKAGE / "pages"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "docs"
    found = []
    for path in [path for pattern in PAGES for path in sorted(folder.glob(pattern))]:
        if path.stem == "index":  # it lists the sections of the other pages
            continue
        page = path.read_text(encoding="utf-8")
        needs_anchor = path.name == "limits.md"
        headings = [match for match in _HEADING.finditer(page) if match["anchor"] or not needs_anchor]
        ends = [heading.start() for heading in headings[1:]] + [len(page)]
        for heading, end in zip(headings, ends, strict=True):
            title = heading["title"].replace("`", "")
            anchor = heading["anchor"] or re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))
            found.append(Section(path.stem, anchor, title, page[heading.end() : end].strip()))
    return found


def search(words: str, among: list[Section]) -> list[Section]:
    """Return the sections in which the words occur, the best first.

    Sections with all words in their titles are followed by those with the phrase in their text. If there are
    none, sections with all words are returned, and otherwise those with any of the words. Words of questions,
    such as "how", count in the phrase only.
    """
    phrase = [_term(word) for word in words.split()]
    terms = [term for term in phrase if not _OF_QUESTIONS.fullmatch(term)] or phrase
    titles = [section for section in among if all(_count(term, section.heading) for term in terms)]
    # `save` is a word of "Save a model", and not of "SavedModel".
    titles.sort(key=lambda section: -len({*terms} & {*map(_term, section.title.lower().split())}))
    phrases = _most_frequent(terms, [section for section in among if _count(" ".join(phrase), section.text)])
    with_all = [section for section in among if all(_count(term, section.all) for term in terms)]
    return (
        titles + [section for section in phrases if section not in titles]
        or _most_frequent(terms, with_all)
        or _with_any(terms, among)
    )


def _with_any(terms: list[str], among: list[Section]) -> list[Section]:
    """Return the sections with any of the terms. Rare terms, and those in titles, have a larger weight."""
    weights = dict.fromkeys(among, 0.0)
    for term in terms:
        having = [section for section in among if _count(term, section.all)]
        for section in having:
            weights[section] += math.log(len(among) / len(having)) * (
                3 if _count(term, section.heading) else 1
            )
    return sorted([section for section in among if weights[section]], key=lambda section: -weights[section])


def _term(word: str) -> str:
    """Return a word without punctuation, and without the "s" of a plural."""
    word = word.strip(".,:;?!()`'\"")
    return word if len(word) < 5 or word.endswith("ss") else word.removesuffix("s")


def _most_frequent(terms: list[str], among: list[Section]) -> list[Section]:
    """Return the sections, sorted by the number of times that the terms occur in them."""
    return sorted(among, key=lambda section: -sum(_count(term, section.all) for term in terms))


def _count(term: str, text: str) -> int:
    """Return how often words of the text begin with the term. A short term must be a whole word."""
    end = r"s?\b" if len(term) < 4 else ""
    return len(re.findall(rf"(?<!\w){re.escape(term)}{end}", text, re.IGNORECASE))


def _print_list(found: list[Section], most: int) -> None:
    width = max(len(section.name) for section in found[:most])
    for section in found[:most]:
        print(f"{section.name:<{width}}  {section.title}")
    if len(found) > most:
        print(f"\n{len(found) - most} more sections have these words. Add a word to find fewer.")
    print("\nTo read one: python -m multigrad explain NAME")


def _print_section(section: Section, pages: set[str]) -> None:
    text = _LINK.sub(lambda link: _link_text(link["text"], link["target"], section.page, pages), section.text)
    markdown = f"## {section.title} ({section.name})\n\n{text}"
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)


def _link_text(text: str, target: str, page: str, pages: set[str]) -> str:
    """Return a link as text: a section or a page by its name, another site by its address."""
    file, mark, anchor = target.partition("#")
    if "//" in file:
        return f"{text} ({target})"
    linked = Path(file).stem if file else page
    return f"{text} ({linked}{mark}{anchor})" if linked in pages else text


def _print_nearest(words: str, among: list[Section]) -> None:
    names = {name: section for section in among for name in (section.name, section.anchor, section.title)}
    lower = {name.lower(): section for name, section in names.items()}
    nearest = difflib.get_close_matches(words.lower(), lower, n=3, cutoff=0.6)
    print(f"multigrad explain: no section contains {words!r}.", file=sys.stderr)
    for section in dict.fromkeys([lower[name] for name in nearest]):
        print(f"  nearest: {section.name}  {section.title}", file=sys.stderr)
    print("`multigrad explain` without a name lists all sections.", file=sys.stderr)
