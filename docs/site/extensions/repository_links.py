"""Sphinx extension: links of the pages, as GitHub resolves them.

A page may link to CONTRIBUTING.md, to a folder of the code, or to an anchor that it sets with `<a id="..."></a>`. The
site includes some files from outside docs/; links to them lead to their page. Other files are not on the site: links to
them become plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[3]
# File of the repository: its page on the site.
PAGES = {"README.md": "site/quickstart", "CONTRIBUTING.md": "site/contributing", "CHANGELOG.md": "site/changelog"}
ANCHOR = re.compile(r'<a id="([^"]+)">')


class RepositoryLinks(SphinxTransform):
    """Runs before MyST resolves links."""

    default_priority = 5

    def apply(self) -> None:
        """Rewrites the links of one page, and makes its anchors known."""
        slugs = self.env.metadata[self.env.docname].setdefault("myst_slugs", {})
        for raw in self.document.findall(nodes.raw):
            for name in ANCHOR.findall(raw.astext()):
                slugs[name] = (raw.line, name, "")
        for link in [
            *self.document.findall(addnodes.download_reference),
            *self.document.findall(addnodes.pending_xref),
        ]:
            if link.get("reftype") == "myst":
                self._rewrite(link)

    def _rewrite(self, link: nodes.Element) -> None:
        name, anchor = self._file_of(link)
        if name in PAGES:
            page = addnodes.pending_xref(
                "", *link.children, refdomain="doc", refdoc=self.env.docname, refexplicit=True, reftype="myst",
                reftarget=PAGES[name], reftargetid=anchor,
            )  # fmt: skip
            link.replace_self(page)
        elif not name.startswith("docs/") and (ROOT / name).exists():
            link.replace_self(link.children)

    def _file_of(self, link: nodes.Element) -> tuple[str, str | None]:
        """The linked file, relative to the repository, and the anchor in it."""
        target: str = link["reftarget"]
        if link.get("refdomain") != "doc":
            target, _, anchor = target.partition("#")
            folder = posixpath.join("docs", posixpath.dirname(self.env.docname))
            if self.env.docname in PAGES.values() and not target.startswith("../"):
                folder = ""  # A link of an included file, relative to the root.
            return posixpath.normpath(posixpath.join(folder, target)), anchor or None
        # Pages outside docs/ have an absolute path as their name.
        path = Path(self.env.srcdir, f"{target}.md")
        return posixpath.relpath(path.as_posix(), ROOT.as_posix()), link["reftargetid"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Sphinx calls this when it loads the extension."""
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True}
