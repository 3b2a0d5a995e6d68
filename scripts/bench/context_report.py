"""Draws."""


def write(cells, out, page):
    """Draws."""
