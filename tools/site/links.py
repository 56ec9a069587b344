"""A hook of mkdocs: links that leave docs/ lead to the repository, or are plain text without one.

On the repository's own pages such links lead to the files themselves.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(
    r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>(?:\.\./)+[^)#\s]*)(?P<rest>#[^)\s]*)?\)"
)


def on_page_markdown(markdown: str, /, *, page: Any, config: Any, **_: Any) -> str:
    """Called for each page. page.file.src_uri: its path below docs/."""
    return rewritten(markdown, page.file.src_uri, config.get("repo_url"))


def rewritten(markdown: str, page: str, repository: str | None) -> str:
    """The Markdown of a page, with its links out of docs/ rewritten.

    page: its path below docs/. repository: the address of the repository; None where there is none.
    """

    def replaced(found: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), found["target"]))
        if path.startswith("docs/"):
            return found[0]
        if repository is None:
            return found["text"]
        return f"[{found['text']}]({repository.rstrip('/')}/blob/main/{path}{found['rest'] or ''})"

    return _LINK.sub(replaced, markdown)
