"""`multigrad explain`: print a section of the documentation, without imports of Keras or a framework.

A wheel contains the pages as `multigrad/pages/` (see `hatch_build.py`). A clone has them in `docs/`. The
sections of the API are the docstrings of the package.
"""

import ast
import difflib
import math
import re
import sys
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
PAGES = {
    "glossary.md": 1.0,
    "which-op.md": 1.0,
    "faq.md": 1.0,
    "getting-started/*.md": 1.0,
    "guides/*.md": 1.0,
    "gradients-of-keras-ops.md": 0.9,
    "performance/*.md": 0.8,
    "limits.md": 0.7,
    "migrate/*.md": 0.6,
}
"""The pages, and the weights of their sections in a search: guides come before limits."""
_PUBLIC = (
    "__init__.py",
    "ops/__init__.py",
    "layers/__init__.py",
    "testing/__init__.py",
    "callbacks/__init__.py",
)
_OF_API = 0.6
_TITLE = r"(?P<title>.+?)"
_ANCHOR = r" \{#(?P<anchor>[\w-]+)[^}\n]*\}"
_HEADING = re.compile(rf"^(?:\A# |## |###+ (?=.*\{{#)){_TITLE}(?:{_ANCHOR})?$", re.MULTILINE)
_KEYWORDS = re.compile(r"<!-- keywords: (.*?) -->", re.DOTALL)
_LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)")
_BLOCK = re.compile(r"^```python(?P<title>[^\n]*)\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)
_IMPORT = re.compile(r"^(?:import|from) .+$", re.MULTILINE)
# HTML, images and the first lines of notes, whose text is indented.
_MARKUP = re.compile(
    r"<!--.*?-->\n*|^</?div.*>\n*|!\[[^\]]*\]\([^)]*\)|^!!! \w+ (?=\")", re.DOTALL | re.MULTILINE
)
_OF_QUESTIONS = re.compile(
    r"an?|the|i|me|my|you|is|are|be|do|does|did|can|should|how|what|why|where|when|which|to|in|of|on|at|for|with|"
    r"from|and|or|it|its|this|that|there|get|becomes?|any|use|using|so|multigrad"
)
"""Words that say nothing about a section."""
_SUFFIX = re.compile(r"(?<=\w{4})(?:izations?|izing|ize[ds]?|ations?|ings?|als?|e?[ds]|e)$")


class Section:
    """A section of a page, or the docstring of a public name."""

    def __init__(
        self, page: str, anchor: str, title: str, text: str, weight: float, before: str = ""
    ) -> None:
        self.page, self.anchor, self.title = page, anchor, title
        self.text = text
        self.weight = weight
        self.before = before  # the page above the section
        self.name = f"{page}.{anchor}" if page.startswith("multigrad") else f"{page}#{anchor}"

    @cached_property
    def keywords(self) -> list[str]:
        """The questions that the section answers, in words that it does not use."""
        found = _KEYWORDS.search(self.text)
        return [" ".join(_terms(words)) for words in found[1].split(",")] if found else []

    @cached_property
    def heading(self) -> str:
        """The title, the anchor and the keywords, in the form of terms."""
        words = f"{self.title} {self.anchor} {self.anchor.replace('_', ' ').replace('-', ' ')}"
        return " ".join([*_terms(words), *self.keywords])

    @cached_property
    def body(self) -> str:
        """The text without line breaks."""
        return " ".join(_MARKUP.sub("", self.text).split())

    def with_imports(self) -> str:
        """Return the text. Each block of code also has the imports of earlier blocks that it needs."""
        blocks = list(_BLOCK.finditer(self.before))
        known = {line: block["title"] for block in blocks for line in _IMPORT.findall(block["code"])}

        def complete(block: re.Match[str]) -> str:
            needed = [
                line
                for line, title in known.items()
                if title in ("", block["title"]) and line not in block["code"]
                if any(re.search(rf"(?<![\w.]){name}\b", block["code"]) for name in _names(line))
            ]
            return (
                block[0].replace(block["code"], "\n".join([*needed, "", block["code"]]), 1)
                if needed
                else block[0]
            )

        return _MARKUP.sub("", _BLOCK.sub(complete, self.text)).strip()


def explain(words: str = "") -> int:
    """Print the section that an error names, the docstring of a name, or the answer to a question.

    ```python
    from multigrad.cli.explain import explain

    status = explain("limits#closed-over-tensors")
    ```

    Arguments:
        words: the name of a section, such as `limits#forward-mode`, the name of a page, a public name, such
            as `fake_quantize`, or words of a question. Without words, all sections are listed.

    Returns:
        The exit status: 0, or 1 if there is no such section.
    """
    everything = sections()
    wanted = words.lower().removeprefix("#").strip()
    if not wanted:
        _print_list(everything)
        return 0
    of_page = [section for section in everything if section.page == wanted]
    found = [section for section in everything if wanted in _names_of(section)] or of_page
    is_named = bool(found)
    found = found or search(wanted, everything)
    if not found:
        _print_nearest(words, everything)
        return 1
    if not is_named and _coverage(_terms(wanted), found[0]) < 1.0:
        print("No section has all of these words. The nearest ones:\n")
        _print_list(found[:3])
    else:
        _print_section(found[0], {section.page for section in everything})
        others = of_page or ([] if "#" in wanted else search(wanted, everything)[:6])
        others = [section for section in others if section is not found[0]]
        if others:
            print("\nSee also:")
            _print_list(others)
    return 0


def sections() -> list[Section]:
    """Return the sections of all pages, and the docstrings. The first section of a page has its title."""
    folder = _PACKAGE / "pages"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "docs"
    found = []
    for path, weight in [
        (path, PAGES[pattern]) for pattern in PAGES for path in sorted(folder.glob(pattern))
    ]:
        page = path.read_text(encoding="utf-8")
        headings = list(_HEADING.finditer(page))
        ends = [heading.start() for heading in headings[1:]] + [len(page)]
        for heading, end in zip(headings, ends, strict=True):
            title, text = heading["title"].replace("`", ""), page[heading.end() : end].strip()
            anchor = heading["anchor"] or re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))
            if text:  # and not only the title of a group
                found.append(Section(path.stem, anchor, title, text, weight, page[: heading.start()]))
    return found + _api()


def _api() -> list[Section]:
    """Return the docstrings of the public names, read from the source."""
    public: dict[str, str] = {}
    for file in _PUBLIC:
        listed = re.search(
            r"^__all__ = (\[.*?\])", (_PACKAGE / file).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )
        module = ".".join(["multigrad", *Path(file).parent.parts])
        public |= dict.fromkeys(ast.literal_eval(listed[1]) if listed else [], module)
    found = {}
    for path in sorted(_PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if public.keys().isdisjoint(re.findall(r"^(?:def|class) (\w+)", source, re.MULTILINE)):
            continue
        for node in ast.parse(source).body:
            if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name not in public:
                continue
            if text := ast.get_docstring(node):
                summary = text.partition("\n")[0].rstrip(".")
                found[node.name] = Section(public[node.name], node.name, summary, text, _OF_API)
    return list(found.values())


def search(words: str, among: list[Section]) -> list[Section]:
    """Return the sections in which any of the words occur, the best first.

    A rare word has a larger weight, and so does a word in a title or in the keywords of a section. Words of
    questions, such as "how", do not count.
    """
    terms = _terms(words)
    weights = {}
    for term in terms:
        having = sum([bool(_count(term, section.heading) or _count(term, section.body)) for section in among])
        weights[term] = math.log(1.0 + len(among) / having) if having else 1.0
    scores = {section: _score(section, weights) for section in among}
    return sorted([section for section in among if scores[section]], key=lambda section: -scores[section])


def _score(section: Section, weights: dict[str, float]) -> float:
    phrase, score = " ".join(weights), 0.0
    for term, weight in weights.items():
        count = _count(term, section.body)
        score += weight * (4.0 * bool(_count(term, section.heading)) + count / (count + 2.0))
    if phrase in section.keywords:
        score += 40.0
    elif len(weights) > 1:
        score += 8.0 * bool(_count(phrase, section.heading)) + 3.0 * bool(_count(phrase, section.body))
    return score * section.weight * _coverage(list(weights), section) ** 2


def _coverage(terms: list[str], section: Section) -> float:
    """Return the part of the terms that the section has."""
    found = [_count(term, section.heading) or _count(term, section.body) for term in terms]
    return sum(map(bool, found)) / len(found) if found else 0.0


def _terms(words: str) -> list[str]:
    """Return the words without punctuation, words of questions and endings."""
    every = [word.strip(".,:;?!()`'\"").lower() for word in words.split()]
    told = [word for word in every if word and not _OF_QUESTIONS.fullmatch(word)] or every
    return [word if word.endswith("ss") else _SUFFIX.sub("", word) for word in told]


def _count(term: str, text: str) -> int:
    """Return how often words of the text begin with the term. A short term must be a whole word."""
    end = r"s?\b" if len(term) < 4 else ""
    return len(re.findall(rf"(?<!\w){re.escape(term)}{end}", text, re.IGNORECASE))


def _names_of(section: Section) -> tuple[str, ...]:
    """Return the words that ask for this section alone: `page#anchor`, or the name of a function."""
    is_public = section.page.startswith("multigrad")
    return (section.name.lower(), section.anchor.lower()) if is_public else (section.name,)


def _names(line: str) -> list[str]:
    """Return the names that an import defines."""
    imported = re.sub(r"^(?:from \S+ )?import ", "", line)
    return [part.split(" as ")[-1].split(".")[0].strip() for part in imported.split(",")]


def _print_list(found: list[Section]) -> None:
    width = max(len(section.name) for section in found)
    for section in found:
        print(f"{section.name:<{width}}  {section.title}")
    print("\nTo read one: python -m multigrad explain NAME")


def _print_section(section: Section, pages: set[str]) -> None:
    text = section.with_imports()
    text = _LINK.sub(lambda link: _link_text(link["text"], link["target"], section.page, pages), text)
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
    lower = {
        name.lower(): section for section in among for name in (section.name, section.anchor, section.title)
    }
    nearest = difflib.get_close_matches(words.lower(), lower, n=3, cutoff=0.6)
    print(f"multigrad explain: no section contains {words!r}.", file=sys.stderr)
    for section in dict.fromkeys([lower[name] for name in nearest]):
        print(f"  nearest: {section.name}  {section.title}", file=sys.stderr)
    print("`multigrad explain` without a name lists all sections.", file=sys.stderr)
