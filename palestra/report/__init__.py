"""A run as a page that loads nothing from elsewhere: curves, tables, sample episodes."""
