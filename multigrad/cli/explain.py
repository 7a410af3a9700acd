"""`multigrad explain`: print a section of the documentation, without imports of Keras or a framework.

A wheel contains the pages as `multigrad/pages/` (see `hatch_build.py`). A clone has them in `docs/`. The
sections of the API are the docstrings of the package.
"""

import ast
import difflib
import re
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
PAGES = (
    "glossary.md",
    "which-op.md",
    "faq.md",
    "getting-started/*.md",
    "guides/*.md",
    "gradients-of-keras-ops.md",
    "performance/*.md",
    "limits.md",
    "migrate/*.md",
)
"""The pages. Of sections that fit a question equally well, that of the first page is shown."""
_PUBLIC = ("", "ops", "layers", "testing", "callbacks")
"""The folders whose `__init__.py` lists public names."""
_TITLE = r"(?P<title>.+?)"
_ANCHOR = r" \{#(?P<anchor>[\w-]+)[^}\n]*\}"
_HEADING = re.compile(rf"^(?:\A# |## |###+ (?=.*\{{#)){_TITLE}(?:{_ANCHOR})?$", re.MULTILINE)
_KEYWORDS = re.compile(r"<!-- keywords: (.*?) -->", re.DOTALL)
# A link. Code is matched first, because brackets in code are not links.
_LINK = re.compile(r"```.*?```|`[^`\n]+`|\[(?P<text>[^\]]+)\]\((?P<target>[^)\s]+)\)", re.DOTALL)
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


@dataclass(eq=False)
class Section:
    """A section of a page, or the docstring of a public name."""

    page: str
    anchor: str
    title: str
    text: str
    before: str = ""
    """The page above the section."""

    @property
    def name(self) -> str:
        """The name that `explain` gets, such as `limits#forward-mode` or `multigrad.ops.spike`."""
        return (
            f"{self.page}.{self.anchor}"
            if self.page.startswith("multigrad")
            else f"{self.page}#{self.anchor}"
        )

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
            code = "\n".join([*needed, "", block["code"]]) if needed else block["code"]
            return block[0].replace(block["code"], code, 1)

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
    if not is_named and not all(_places(_terms(wanted), found[0])):
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
    for path in [path for pattern in PAGES for path in sorted(folder.glob(pattern))]:
        page = path.read_text(encoding="utf-8")
        headings = list(_HEADING.finditer(page))
        ends = [heading.start() for heading in headings[1:]] + [len(page)]
        for heading, end in zip(headings, ends, strict=True):
            title, text = heading["title"].replace("`", ""), page[heading.end() : end].strip()
            anchor = heading["anchor"] or re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()))
            if text:  # and not only the title of a group
                found.append(Section(path.stem, anchor, title, text, page[: heading.start()]))
    return found + _api()


def _api() -> list[Section]:
    """Return the docstrings of the public names, read from the source."""
    public: dict[str, str] = {}
    for folder in _PUBLIC:
        source = (_PACKAGE / folder / "__init__.py").read_text(encoding="utf-8")
        listed = re.search(r"^__all__ = (\[.*?\])", source, re.DOTALL | re.MULTILINE)
        module = f"multigrad.{folder}".rstrip(".")
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
                found[node.name] = Section(public[node.name], node.name, summary, text)
    return list(found.values())


def search(words: str, among: list[Section]) -> list[Section]:
    """Return the sections in which any of the words occur, the best first.

    The best one answers this question by its keywords, or has most of the words, in its title first. Words of
    questions, such as "how", do not count.
    """
    terms = _terms(words)
    places = {section: _places(terms, section) for section in among}

    def rank(section: Section) -> tuple[float, ...]:
        in_text = [_count(term, section.body) for term in terms]
        return (
            " ".join(terms) in section.keywords,
            sum(map(bool, places[section])),
            sum(places[section]),
            not section.page.startswith("multigrad"),  # guides before docstrings
            sum([count / (count + 2.0) for count in in_text]),
        )

    return sorted([section for section in among if any(places[section])], key=rank, reverse=True)


def _places(terms: list[str], section: Section) -> list[int]:
    """Return 2 for each term in the title or the keywords of a section, 1 for one in its text, and 0."""
    return [2 if _count(term, section.heading) else int(bool(_count(term, section.body))) for term in terms]


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
    text = _LINK.sub(lambda found: _as_text(found, section.page, pages), text)
    markdown = f"## {section.title} ({section.name})\n\n{text}"
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(markdown))
    else:
        print(markdown)


def _as_text(found: re.Match[str], page: str, pages: set[str]) -> str:
    """Return a link as text: a section or a page by its name, another site by its address. Keep code."""
    text, target = found["text"], found["target"]
    if target is None:
        return found[0]
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
