"""Pages of the documentation in a wheel, and the links of its metadata, which depend on the repository.

`python -m multigrad explain` reads the pages. An editable install and a clone have them in `docs/`.

GitHub's CI passes the address of the repository in environment variables. The README's links are relative to
the repository. In the metadata they are absolute, because a package index does not have these files.
"""

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(?P<before>\]\(|src=\")(?P<link>(?!https?:|#)[^)\"\s]+)")


_PAGES = (
    "glossary.md",
    "which-op.md",
    "faq.md",
    "getting-started",
    "guides",
    "gradients-of-keras-ops.md",
    "performance",
    "limits.md",
    "migrate",
)


class Pages(BuildHookInterface):
    """Adds pages of `docs/` to a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "standard":  # and not "editable"
            for name in _PAGES:
                build_data["force_include"][f"docs/{name}"] = f"multigrad/pages/{name}"


class Metadata(MetadataHookInterface):
    """Sets the readme, and the URLs where they are known."""

    def update(self, metadata: dict[str, Any]) -> None:
        readme = (Path(self.root) / "README.md").read_text()
        if "GITHUB_REPOSITORY" in os.environ:
            repository = f"{os.environ['GITHUB_SERVER_URL']}/{os.environ['GITHUB_REPOSITORY']}"
            pages = f"{repository}/blob/v{metadata['version']}/"
            metadata["urls"] = {
                "Source": repository,
                "Documentation": f"{pages}docs/index.md",
                "Changelog": f"{pages}CHANGELOG.md",
                "Issues": f"{repository}/issues",
            }
            readme = _LINK.sub(lambda found: found["before"] + _absolute(pages, found["link"]), readme)
        metadata["readme"] = {"content-type": "text/markdown", "text": readme}


def _absolute(pages: str, link: str) -> str:
    return urljoin(pages, link) + ("?raw=true" if link.endswith(".png") else "")
