"""What every test shares: one torch thread, so that timings and sums do not depend on the machine's cores."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the processes that tests start
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test never downloads
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
