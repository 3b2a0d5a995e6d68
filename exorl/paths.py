"""Where datasets live on this machine, and how files come to be there."""

import os
from pathlib import Path


def home() -> Path:
    """`$EXORING_HOME`, or `~/.cache/exoring`; it need not exist yet."""
    chosen = os.environ.get("EXORING_HOME")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "exoring"


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it appears whole or not at all."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
