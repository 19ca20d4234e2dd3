"""Hooks of MkDocs for building the site (`hooks:` in mkdocs.yml).

Links into the repository lead to generated pages (site_sources.py). A line `<!-- reference: NAME -->` is replaced by a
reference generated from the code (site_reference.py). A block after `<!-- file: NAME -->` gets that name as its title;
one after `<!-- not run: WHY -->` gets a title that no test runs it, and why.
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
    """Adds pages for the files of the repository that documents link to; they are in no menu."""
    documents = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    for path, text in site_sources.pages(documents).items():
        files.append(File.generated(config, path, content=text, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Returns a page's text with references filled in, titles of blocks, and links into the repository rewritten."""
    markdown = UNRUN.sub(r'```\2 title="no test runs this: \1"', NAMED.sub(r'```\2 title="\1"', markdown))
    filled = REFERENCE.sub(lambda match: site_reference.PAGES[match[1]](), markdown)
    return site_sources.rewritten(filled, page.file.src_uri)
