"""The site of the documentation: the pages of this repository as they are, and an API reference.
`make docs` builds it.

Nothing is loaded from a network when it is read, and the search needs no server.
"""

from sphinx.application import Sphinx

project = "specextend"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "*.md",
    "benchmarks/README.md",
    "docs/**",
    "examples/README.md",
    "models/*/README.md",
    "specextend/attention/compiled/README.md",
]
exclude_patterns = ["docs/site/conf.py"]
root_doc = "README"
html_theme = "furo"
html_title = "specextend"
html_extra_path = ["index.html"]
html_static_path = ["static"]
html_css_files = ["narrow.css"]
html_copy_source = False
html_show_sphinx = False
default_role = "code"  # docstrings are Markdown: single backticks
myst_heading_anchors = 4  # links name headings as forges do
autodoc_member_order = "bysource"
autodoc_typehints = "description"

NAVIGATION = """

```{toctree}
:hidden:
:caption: Using it
docs/first-run
docs/choosing-a-pair
docs/families
docs/documents
docs/input
docs/tasks
docs/worth
docs/output
docs/planning-and-report
docs/cluster
docs/reliability
docs/tuning
docs/drafts
docs/when-not
docs/configuration
```

```{toctree}
:hidden:
:caption: From Python
docs/python
docs/site/api
```

```{toctree}
:hidden:
:caption: How it is made
docs/architecture
CONTRIBUTING
SECURITY
CHANGELOG
docs/dev/decisions
docs/dev/log
benchmarks/README
examples/README
models/smollm2-135m-eagle/README
specextend/attention/compiled/README
```
"""


def add_navigation(app: Sphinx, name: str, text: list[str]) -> None:
    """Put the navigation behind the README, which is the first page."""
    if name == root_doc:
        text[0] += NAVIGATION


def setup(app: Sphinx) -> None:
    """Ask Sphinx to call us for each page."""
    app.connect("source-read", add_navigation)
