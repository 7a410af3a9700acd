"""Hooks of MkDocs: notebooks and CONTRIBUTING.md as pages, and no page that needs another host.

The notebooks keep their formulas in LaTeX. They become MathML here, which browsers draw without a script:
MathJax would come from another host.
"""

import html
import re
from pathlib import Path
from typing import Any

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


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Return the text of a page. The page about contributing is CONTRIBUTING.md, whose links are changed."""
    if page.file.src_uri != "contributing.md":
        return text
    text = Path("CONTRIBUTING.md").read_text(encoding="utf-8")
    return _SOURCE.sub(r"\1", text).replace("](docs/", "](")


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


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Raise if a page loads something from another host."""
    found = _FOREIGN.search(_CODE.sub("", output))
    if found:
        raise PluginError(f"{page.file.src_uri} loads from another host: {found[0][:200]}")
    return output
