"""The description of the package for PyPI is README.md with links that work there."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from helpers.command_line import LINK

import palestra

ROOT = Path(__file__).parents[2]
SENTENCE = "Multi-agent reinforcement learning for language models and small networks"


@pytest.fixture(scope="module")
def setup_script():
    spec = importlib.util.spec_from_file_location("setup_of_palestra", ROOT / "setup.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("repository", ["", "https://example.org/owner/palestra"])
def test_description_has_no_relative_link(setup_script, repository):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    description = setup_script.with_absolute_links(readme, repository)
    links = [one or other for one, other in LINK.findall(description)]
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert len(links) == (len(LINK.findall(readme)) if repository else 0)


def test_links_and_pictures_lead_to_the_repository(setup_script):
    text = "![A\ntree](docs/a.png) [more](docs/b.md#c) [there](https://x.org) `[a](b.md)`"
    absolute = setup_script.with_absolute_links(text, "https://example.org/p")
    assert absolute.startswith(
        "![A\ntree](https://example.org/p/raw/main/docs/a.png) [more](https://example.org/p/blob/main/docs/b.md#c)"
    )
    assert "[there](https://x.org)" in absolute
    assert setup_script.with_absolute_links(text, "").startswith(" more [there](https://x.org)")


@pytest.mark.parametrize(
    "file", ["README.md", "docs/index.md", "mkdocs.yml", "pyproject.toml", "CITATION.cff", "palestra/cli/main.py"]
)
def test_one_sentence_says_what_palestra_is(file):
    assert SENTENCE.lower() in re.sub(r"\s+", " ", (ROOT / file).read_text(encoding="utf-8")).lower()


def test_citation_has_the_package_s_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == palestra.__version__


def test_workflow_runs_what_the_package_supports():
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert job["steps"][-1]["run"] == ".ci/run" and (ROOT / ".ci/run").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    prefix = "Programming Language :: Python :: "
    versions = [line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)]
    assert job["strategy"]["matrix"]["python"] == versions
