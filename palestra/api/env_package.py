"""The skeleton of a package with an env of one's own, which `palestra init env` writes."""

from __future__ import annotations

import keyword
import re
from importlib.util import find_spec
from pathlib import Path

from palestra.core.config.shipped import DATA_DIR
from palestra.envs import TEXT_ENVS, VECTOR_ENVS

TEMPLATE = DATA_DIR / "env_package"  # a package named my_env: files of all, and of each kind of env
NAME = "my_env"
CLASS = "MyEnv"
TESTS = "tests"  # the folder beside the package


def write_env_package(name: str, folder: Path, *, is_vector: bool = False) -> None:
    """Writes a package `name` with a text or vector env that plays and trains to the new folder.
    Raises ValueError for a wrong name, if `folder` exists, or if it cannot be written."""
    check_spelling(name)
    if folder.exists():
        raise ValueError(f"{folder} exists already: remove it, or name another folder with --out")
    check_is_free(name)
    kind = TEMPLATE / ("vector" if is_vector else "text")
    texts = {**_texts(TEMPLATE / "common"), **_texts(kind)}
    class_name = "".join(word.capitalize() for word in name.split("_"))
    if re.search(rf"\b{class_name}\b", texts[f"{NAME}/env.py"]):  # Step, Env, ...
        class_name += "Env"
    try:
        folder.mkdir()
        for path, text in texts.items():
            target = folder / path.replace(NAME, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace(NAME, name).replace(CLASS, class_name), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {folder}: {error.strerror}") from error


def check_spelling(name: str) -> None:
    """Raises ValueError, with the nearest spelling, unless `name` can be written as the name of a package."""
    if _is_name(name):
        return
    near = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    hint = f", such as {near}" if _is_name(near) else ""
    raise ValueError(f'"{name}" cannot name a package: use lower-case letters, digits and _, no keyword{hint}')


def check_is_free(name: str) -> None:
    """Raises ValueError if an env of palestra or an installed module has the name."""
    if name in TEXT_ENVS | VECTOR_ENVS:
        raise ValueError(f"palestra has an env {name}, which a package cannot replace: use another name")
    if name == TESTS or find_spec(name) is not None:
        raise ValueError(f"there is a module {name} already, which the package would hide: use another name")


def _is_name(text: str) -> bool:
    return bool(re.fullmatch(r"[a-z][a-z0-9_]*", text)) and not keyword.iskeyword(text)


def _texts(folder: Path) -> dict[str, str]:
    """Returns the text of each file of a template by its path in it."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files}
