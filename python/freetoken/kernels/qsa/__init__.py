"""Sparse attention behind an indexer (QSA): index keys, selection, and attention over what was selected."""
