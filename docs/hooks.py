"""Hooks of MkDocs: notebooks and CONTRIBUTING.md as pages, and no page that needs another host.

The notebooks keep their formulas in LaTeX. They become MathML here, which browsers draw without a script:
MathJax would come from another host.
"""

import html
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

_CODE = re.compile(r"<(pre|code|style)\b.*?</\1>", re.DOTALL)
_SCRIPT = re.compile(r"<script\b.*?</script>", re.DOTALL)
_FORMULA = re.compile(r"\$\$(?P<block>.+?)\$\$|(?<![\\$\w])\$(?P<line>[^$\n]+?)\$(?![\w$])", re.DOTALL)
_FOREIGN = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b[^>]*\brel=[\"']?(?:stylesheet|icon|preconnect|preload)\b[^>]*\bhref=[\"']?(?:https?:)?//[^>]*>"
    r"|(?:@import|\bimport\(|\bfrom|url\()\s*[\"']?https?://[^\s>]*"
)


_LINK = re.compile(r'href="(?P<docs>\.\./docs/)?(?P<page>[\w/-]+)\.(?:md|ipynb)(?P<anchor>#[^"]*)?"')
"""A link to a file of the repository, as readers of GitHub follow it."""


_SOURCE = re.compile(r"\[(`[^`]+`)\]\(multigrad/[^)]+\)")
"""A link to a line of the source, which is not part of the site."""


_EXAMPLE = re.compile(r"\]\(\.\./examples/")
"""A link of a page in `docs/` to `examples/`, which is `docs/examples/` on the site."""


_OF_README = re.compile(r"^<!-- README\.md: (?P<title>.+) -->$", re.MULTILINE)
"""The place of a section of the README."""


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Return the text of a page, with the sections of the README and of CONTRIBUTING.md that it shows."""
    if page.file.src_uri == "contributing.md":
        text = Path("CONTRIBUTING.md").read_text(encoding="utf-8")
        return _SOURCE.sub(r"\1", text).replace("](docs/", "](")
    if "/" not in page.file.src_uri:
        text = _EXAMPLE.sub("](examples/", text)
    text = text.replace("<!-- version and repository -->", _version_and_repository())
    return _OF_README.sub(lambda place: _section_of_readme(place["title"]), text)


def _section_of_readme(title: str) -> str:
    readme = Path("README.md").read_text(encoding="utf-8")
    section = re.search(rf"^## {re.escape(title)}\n.*?(?=\n## |\Z)", readme, re.DOTALL | re.MULTILINE)
    if not section:
        raise PluginError(f"The README has no section {title!r}")
    return section[0].replace("](docs/", "](")


def _version_and_repository() -> str:
    """Return a line of links. Only GitHub's CI knows the address of the repository, as in hatch_build.py."""
    version = re.search(r'__version__ = "(.+)"', Path("multigrad/__init__.py").read_text(encoding="utf-8"))[1]
    links = [f"Version {version}", "[changes](changelog.md)"]
    if "GITHUB_REPOSITORY" in os.environ:
        links.append(f"[repository]({os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']})")
    return " · ".join(links)


def on_page_content(text: str, page: Any, files: Any, **_: Any) -> str:
    """Replace the formulas of a notebook, and remove the scripts of Jupyter's page."""
    if not page.file.src_uri.endswith(".ipynb"):
        return text
    text = _SCRIPT.sub(
        lambda script: "" if _FOREIGN.search(script[0]) or "athJax" in script[0] else script[0], text
    )
    kept: list[str] = []

    def keep(code: re.Match[str]) -> str:
        kept.append(code[0])
        return f"\0{len(kept) - 1}\0"

    text = _FORMULA.sub(_as_mathml, _CODE.sub(keep, text))
    pages = {file.src_uri.rpartition(".")[0] for file in files.documentation_pages()}

    def to_page(link: re.Match[str]) -> str:
        name = link["page"] if link["docs"] else f"examples/{link['page']}"
        if name not in pages:
            raise PluginError(f"{page.file.src_uri} has a link to {name}, which is not a page")
        return f'href="../../{name}/{link["anchor"] or ""}"'

    text = _LINK.sub(to_page, text)
    return re.sub(r"\0(\d+)\0", lambda index: kept[int(index[1])], text)


def _as_mathml(formula: re.Match[str]) -> str:
    block = formula["block"]
    return convert(html.unescape(block or formula["line"]), display="block" if block else "inline")


def on_post_build(config: Any, **_: Any) -> None:
    """Raise if a link leads to a place that no page has. MkDocs does not see the links in notebooks."""
    site = Path(config["site_dir"])
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(_PLACE.findall(page)) for path, page in pages.items()}
    for path, page in pages.items():
        for link in set(_TO_A_PLACE.findall(page)):
            file, _, place = html.unescape(link).partition("#")
            target = (path.parent / file).resolve() if file else path
            target = target / "index.html" if target.is_dir() else target
            if unquote(place) not in places.get(target, ()):
                raise PluginError(f"{path.relative_to(site)} has a link to {link}, which does not exist")


_PLACE = re.compile(r'\b(?:id|name)="([^"]+)"')
_TO_A_PLACE = re.compile(r'\bhref="((?![a-z]+:|//)[^"#]*#[^"]+)"')


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raise if a page loads something from another host."""
    found = _FOREIGN.search(_CODE.sub("", output))
    if found:
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0][:200]}")
    return output
