"""Copies of runs in object stores: S3, GCS, a shared folder, or whatever else fsspec reaches.

    s3://bucket/runs/demo/objects/ba7816bf...    contents, named by their SHA-256: equal contents are sent once
    s3://bucket/runs/demo/manifests/00000012     the names, sizes and objects of a whole state; written last

A run is written to a local folder as always, and a thread sends whole states of it to the store. A process may die at
any moment: objects that no manifest names are deleted by the next writer, and the newest manifest names a whole state.
"""


def is_store_url(text: str) -> bool:
    """True for the URL of a store or of a run in it, as opposed to a path."""
    return "://" in text
