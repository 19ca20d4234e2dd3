"""What MkDocs does beyond its own when it builds the site (`hooks:` in mkdocs.yml).

Links into the repository get pages (site_sources.py), a line `<!-- reference: NAME -->` becomes what the code says of
itself (site_reference.py). A block after `<!-- file: NAME -->` has that name above it, one after `<!-- not run: WHY
-->` that no test runs it, and why.
"""

from __future__ import annotations

import re
from typing import Any

import site_reference
import site_sources
from mkdocs.structure.files import File, Files, InclusionLevel

NAMED = re.compile(r"^<!-- file: (\S+) -->\n```(\w+)$", re.MULTILINE)
UNRUN = re.compile(r"^<!-- not run: (.+) -->\n```(\w+)$", re.MULTILINE)
REFERENCE = re.compile(r"^<!-- reference: (\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """The pages of what documents link to in the repository; they stand in no menu."""
    documents = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path, text in site_sources.pages(documents).items():
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The text of a page with its references written out, titles above its blocks, and its links leading to pages."""
    markdown = UNRUN.sub(r'```\2 title="no test runs this: \1"', NAMED.sub(r'```\2 title="\1"', markdown))
    filled = REFERENCE.sub(lambda match: site_reference.PAGES[match[1]](), markdown)
    return site_sources.rewritten(filled, page.file.src_uri)
