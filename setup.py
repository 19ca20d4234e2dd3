"""The description of the package for PyPI, which is README.md with links that work there.

PyPI resolves no relative links. They lead to the repository at `REPOSITORY`; as long as that is empty, since the
repository has no public address, a link becomes its text, and a picture is left out. The rest is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = ""  # such as https://HOST/OWNER/palestra
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
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    setup(long_description=with_absolute_links(readme, REPOSITORY), long_description_content_type="text/markdown")
