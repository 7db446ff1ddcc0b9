"""Settings of the documentation site; ``make_docs.py`` lays out its pages and builds them."""

import json
import re
from typing import Any, Final

from docutils.nodes import document
from myst_parser.sphinx_ import Parser
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx

project = author = "ppstream"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
root_doc = "index"
# Pages come from here; a link to any other file of the source becomes a download.
include_patterns = ["*.md", "runbooks/*.md", "runbooks/*.ipynb", "api/*.rst"]
exclude_patterns = ["kernels", "ppstream", "stages", "tests", "tools"]
source_suffix = {".md": "markdown", ".rst": "restructuredtext", ".ipynb": "notebook"}
default_role = "literal"
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "ignore-module-all": True}
napoleon_use_ivar = True
autodoc_inherit_docstrings = False
autodoc_use_type_comments = False
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 90
add_module_names = False

html_theme = "furo"
html_title = project
html_copy_source = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses for files
html_theme_options = {"top_of_page_buttons": []}

#: An annotation of msgspec with its bounds.
BOUNDS: Final = re.compile(r"Annotated\[([^,\[\]]+), msgspec\.Meta\([^()]*\)\]")


class Notebook(Parser):
    """A notebook as a page: its texts, its code, and the file itself."""

    supported = ("notebook",)

    def parse(self, inputstring: str, tree: Any) -> None:
        """Parse the notebook's cells as Markdown."""
        cells = json.loads(inputstring)["cells"]
        parts = ["".join(cell["source"]) for cell in cells]
        code = [cell["cell_type"] == "code" for cell in cells]
        texts = [f"```python\n{p}\n```" if c else p for p, c in zip(parts, code, strict=True)]
        super().parse("\n\n".join(texts), tree)


def name_exactly(_: Sphinx, tree: document) -> None:
    """Let names in docstrings mean one thing; the search among all endings takes half a minute."""
    for reference in tree.findall(pending_xref):
        reference.attributes.pop("refspecific", None)


def without_bounds(*event: Any) -> tuple[str | None, str | None]:
    """Show a field's type; configuration.md tells its bounds."""
    signature, returned = event[-2:]
    return BOUNDS.sub(r"\1", signature or "") or None, returned


def is_alias(*event: Any) -> bool | None:
    """Leave the fields of named tuples to their class, which has them in its signature."""
    return True if (event[3].__doc__ or "").startswith("Alias for field number") else None


def setup(app: Sphinx) -> None:
    """Let Sphinx read notebooks, and our docstrings as they are meant."""
    app.add_source_parser(Notebook)
    app.connect("doctree-read", name_exactly)
    app.connect("autodoc-process-signature", without_bounds)
    app.connect("autodoc-skip-member", is_alias)
