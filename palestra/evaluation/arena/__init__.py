"""The arena: text games against reference players that need no files, for ratings that anyone can compute again."""
