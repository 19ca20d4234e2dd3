"""Imported last by the fork server. Collections in its forks then leave out what it has imported: they would write to,
and so copy, all of it."""

import gc

gc.collect()
gc.freeze()
