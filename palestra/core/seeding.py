"""Seeds derived from seeds."""

from __future__ import annotations

import hashlib


def derive_seed(seed: int, *key: object) -> int:
    """Returns a 63-bit seed, a pure function of `seed` and `key` on any machine and in any process."""
    text = repr((seed, *key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
