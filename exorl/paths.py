"""Where datasets live on this machine."""

import os
from pathlib import Path


def home() -> Path:
    """`$EXORING_HOME`, or `~/.cache/exoring`; it need not exist yet."""
    chosen = os.environ.get("EXORING_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "exoring"
