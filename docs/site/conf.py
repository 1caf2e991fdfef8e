"""Sphinx configuration of the documentation site: `make docs` writes it to build/site. The sources are docs/."""

from __future__ import annotations

import sys
from pathlib import Path

import adaptrt

SITE = Path(__file__).parent
sys.path.insert(0, str(SITE / "extensions"))

project = "AdaptRT"
author = "The AdaptRT authors"
copyright = "AdaptRT developers, Apache-2.0"
release = version = adaptrt.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "command_reference",
    "docstrings",
    "repository_links",
]
exclude_patterns = ["grafana"]
root_doc = "index"
language = "en"
# Every warning is an error: see the Makefile.
nitpicky = False

html_theme = "furo"
html_title = f"AdaptRT {release}"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["tables.css"]

# Links to headings, as on GitHub.
myst_heading_anchors = 4

# Docstrings are plain text. Signatures of the C++ classes come with their docstrings.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
add_module_names = False
