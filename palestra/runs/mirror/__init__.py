"""Copies of runs in object stores: S3, GCS, a shared folder, or whatever else fsspec reaches.

    s3://bucket/runs/demo/writer.json        which process writes the copy, and which state of the run it holds
    s3://bucket/runs/demo/checkpoints/...    the files of the run's folder, under their own names

A run is written to a local folder as always, and a thread copies it to the store: checkpoints first, then logs, then
the list of checkpoints. A process may die at any moment: a resume verifies checksums, truncates the logs, and skips a
checkpoint that is not complete.
"""


def is_store_url(text: str) -> bool:
    """True for the URL of a store or of a run in it, as opposed to a path."""
    return "://" in text
