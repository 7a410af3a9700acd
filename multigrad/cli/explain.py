"""`multigrad explain`: print a section of the pages about limits, without imports of Keras or a framework.

A wheel contains the pages as `multigrad/limits/` (see `hatch_build.py`). A clone has them in `docs/limits/`.
"""

import difflib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).parents[1]
_HEADING = re.compile(r"^##+ (?P<title>.+?) \{#(?P<anchor>[\w-]+)[^}\n]*\}$", re.MULTILINE)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")


class Section(NamedTuple):
    """A section of a page."""

    page: str
    anchor: str
    title: str
    text: str

    @property
    def name(self) -> str:
        """The name in the last line of an error, such as `jax#forward-mode`."""
        return f"{self.page}#{self.anchor}"


def explain(words: str = "") -> int:
    """Print the section that an error names, or the sections in which words occur.

    ```python
    from multigrad.cli.explain import explain

    status = explain("general#closed-over-tensors")
    ```

    Arguments:
        words: the name of a section, such as `jax#forward-mode` or `forward-mode`, the name of a page, or
            words of a section. Without words, all sections are listed.

    Returns:
        The exit status: 0, or 1 if there is no such section.
    """
    everything = sections()
    found = find(words, everything)
    if not found:
        _print_nearest(words, everything)
        return 1
    if len(found) == 1:
        _print_section(found[0])
    else:
        _print_list(found)
    return 0


def sections() -> list[Section]:
    """Return the sections of all pages."""
    folder = _PACKAGE / "limits"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "docs" / "limits"
    found = []
    for path in sorted(folder.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        headings = list(_HEADING.finditer(page))
        ends = [heading.start() for heading in headings[1:]] + [len(page)]
        for heading, end in zip(headings, ends, strict=False):  # without headings, `ends` has one item
            text = page[heading.end() : end].strip()
            found.append(Section(path.stem, heading["anchor"], heading["title"].replace("`", ""), text))
    return found


def find(words: str, among: list[Section]) -> list[Section]:
    """Return the sections with this name, those of this page, or those in which the words occur.

    Sections with the words in their titles come first, then those with the phrase in their text. If there
    are none, the sections with all words in their text are returned.
    """
    wanted = words.lower().removeprefix("#").strip()
    named = [section for section in among if wanted in (section.name, section.anchor, section.page)]
    if named or not wanted:
        return named or among
    titles = [section for section in among if _has_all(f"{section.title} {section.anchor}", wanted)]
    others = [section for section in among if section not in titles]
    phrases = [section for section in others if wanted in " ".join(section.text.lower().split())]
    return [*titles, *phrases] or [section for section in among if _has_all(section.text, wanted)]


def _has_all(text: str, words: str) -> bool:
    """Return whether each of the words begins a word of the text."""
    return all(re.search(rf"\b{re.escape(word)}", text, re.IGNORECASE) for word in words.split())


def _print_list(found: list[Section]) -> None:
    width = max(len(section.name) for section in found)
    for section in found:
        print(f"{section.name:<{width}}  {section.title}")
    print("\nTo read one: python -m multigrad explain NAME")


def _print_section(section: Section) -> None:
    text = _LINK.sub(lambda link: _link_text(section.page, link["text"], link["target"]), section.text)
    markdown = f"## {section.title} ({section.name})\n\n{text}"
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)


def _link_text(page: str, text: str, target: str) -> str:
    """Return a link as text: a section by its name, another site by its address."""
    file, _, anchor = target.partition("#")
    if "//" in file:
        return f"{text} ({target})"
    if anchor and "/" not in file:
        return f"{text} ({file.removesuffix('.md') or page}#{anchor})"
    return text


def _print_nearest(words: str, among: list[Section]) -> None:
    names = {name: section for section in among for name in (section.name, section.anchor, section.title)}
    lower = {name.lower(): section for name, section in names.items()}
    nearest = difflib.get_close_matches(words.lower(), lower, n=3, cutoff=0.5)
    print(f"multigrad explain: no section contains {words!r}.", file=sys.stderr)
    for section in dict.fromkeys([lower[name] for name in nearest]):
        print(f"  nearest: {section.name}  {section.title}", file=sys.stderr)
    print("`multigrad explain` without a name lists all sections.", file=sys.stderr)
