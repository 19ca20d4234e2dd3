"""Base models: names, loading, formats of files, sharding."""
