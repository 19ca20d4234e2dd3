"""Lets the reference players of the arena play each other again: palestra/data/arena.jsonl, in some ten CPU minutes.

python scripts/arena_references.py                    100 games of each pair
python scripts/arena_references.py --quick            2, into /tmp: a smoke test
"""

from __future__ import annotations

import argparse
from pathlib import Path

from palestra.evaluation.arena.players import GAMES
from palestra.evaluation.arena.scores import REFERENCE_FILE, play_references, save_references

COUNT = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two games of each pair, into /tmp")
    quick = parser.parse_args().quick
    path = Path("/tmp/arena.jsonl") if quick else REFERENCE_FILE
    save_references(play_references(list(GAMES), 2 if quick else COUNT), path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
