"""Terminal output as plain text."""

import re


def plain(text):
    """Returns the text without colours and line breaks, which depend on the terminal."""
    return re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", text))
