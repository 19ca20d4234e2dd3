"""The description of the package for PyPI, which is README.md with links that work there.

PyPI resolves no relative links. They lead to `Repository` of [project.urls] in pyproject.toml, which has everything
else; as long as that is missing, since the repository has no public address, a link becomes its text, and a picture is
left out.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

BRANCH = "main"
RELATIVE_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)]+)\)")


def with_absolute_links(text: str, repository: str) -> str:
    """Returns Markdown whose relative links and pictures lead to `repository`, or are taken out if it is empty."""

    def replace(link: re.Match[str]) -> str:
        picture, label, path = link.groups()
        if not repository:
            return "" if picture else label
        return f"{picture}[{label}]({repository}/{'raw' if picture else 'blob'}/{BRANCH}/{path})"

    return RELATIVE_LINK.sub(replace, text)


if __name__ == "__main__":
    folder = Path(__file__).parent
    readme = (folder / "README.md").read_text(encoding="utf-8")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository = project.get("urls", {}).get("Repository", "")
    setup(long_description=with_absolute_links(readme, repository), long_description_content_type="text/markdown")
