"""Command lines: python -m scripts.NAME --help."""
