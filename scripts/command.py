"""What all command lines share: log lines and errors for people, on standard error."""

import errno
import importlib.metadata
import logging
import os
import sys
from collections.abc import Callable

PACKAGES = ("ring", "exorl", "data", "agent", "scripts", "__main__")


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""A disk without room, or a user without a right to more; such errors name no file."""


def run(main: Callable[[], object]) -> None:
    """Runs a command, turning the user's mistakes into one line and exit status 2.

    Such are errors of a type of ours, a `ValueError` or `FloatingPointError` raised in our code, a
    package that it does not find, and files that are missing, in the way or not ours to touch, or
    that the disk has no room for.
    Anything else is a fault of the program and shows its traceback, as everything does with
    EXORING_DEBUG=1.
    """
    logging.basicConfig(format="exoring: %(message)s", stream=sys.stderr)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.INFO)
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if os.environ.get("EXORING_DEBUG") == "1" or not _is_users(error):
            raise
        print(f"exoring: error: {error}", file=sys.stderr)
        sys.exit(2)


def _is_users(error: Exception) -> bool:
    if isinstance(error, FileNotFoundError | FileExistsError):
        return True
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _FULL):
        return True
    origin = type(error).__module__
    ours = ValueError | FloatingPointError | ModuleNotFoundError
    if isinstance(error, ours) and origin == "builtins":
        traceback = error.__traceback__
        while traceback and traceback.tb_next:
            traceback = traceback.tb_next
        origin = traceback.tb_frame.f_globals["__name__"] if traceback else origin
    return origin.split(".")[0] in PACKAGES


def versions(*packages: str) -> str:
    """Installed packages with their versions, for people."""
    return ", ".join(f"{name} {_version(name)}" for name in packages)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
