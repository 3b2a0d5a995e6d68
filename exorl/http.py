"""Files from servers that break off, stall and lie: resumed, retried, verified."""

import hashlib
import io
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
from tqdm import tqdm

from exorl.paths import write_whole

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Bytes that a broken connection can lose.
_BLOCK = 1 << 16

# What to do about a server whose ranges can't be used.
_WITHOUT_RANGES = "download the whole dataset (without --episodes)"

# Addresses that no retry mends.
_UNUSABLE = (
    requests.exceptions.MissingSchema,
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidURL,
)


class DownloadError(RuntimeError):
    """A download that cannot be had; the message names the address and the fault."""


@dataclass(frozen=True)
class Patience:
    """When to give up.

    Attributes:
        retries: Failures in a row, without a byte in between, that are forgiven.
        backoff: Seconds before the first retry; doubled for each further one, at most a minute.
        timeout: Seconds without a byte that count as a failure.
    """

    retries: int = 6
    backoff: float = 1.0
    timeout: float = 30.0


def download_file(
    url: str,
    path: Path,
    *,
    size: int | None = None,
    sha256: str | None = None,
    patience: Patience | None = None,
) -> None:
    """Downloads one file, which appears at `path` whole and verified or not at all.

    What has arrived stays in `path.partial` and is continued by HTTP range, in this call and in
    later ones, as long as the server says that the file is still the same.

    Args:
        url: What.
        path: Where to.
        size: Bytes it must have, if known.
        sha256: Sum it must have, if known.
        patience: When to give up.

    Raises:
        DownloadError: It cannot be had, is not what is expected, or does not fit the disk.
    """
    patience = patience or Patience()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    _insist(
        url,
        lambda: _continue(url, partial, size, patience),
        patience,
        arrived=lambda: _size(partial),
    )
    if sha256 is not None:
        found = _sha256(partial)
        if found != sha256:
            _forget(partial)
            raise DownloadError(
                f"{url} has SHA-256 {found}, expected {sha256}: damaged on the way, or another "
                f"file. What was downloaded is deleted; run the same command again"
            )
    else:
        log.warning("%s: no SHA-256 is known for it, only its length was checked", url)
    os.replace(partial, path)
    _forget(partial)


class RemoteFile(io.RawIOBase):
    """A file on a server, read by HTTP ranges: what `zipfile` needs to take single members.

    Args:
        url: Of the file.
        patience: When to give up.

    Raises:
        DownloadError: It cannot be had, or the server does not serve ranges.
    """

    def __init__(self, url: str, patience: Patience) -> None:
        self._url, self._patience, self._position = url, patience, 0
        self.length = 0
        self.length = self._range(0, 1)[1]

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Bytes from the beginning."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See `io.IOBase.seek`."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.length}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fills as much of the buffer as the file has left."""
        count = max(0, min(len(buffer), self.length - self._position))
        if count:
            buffer[:count] = self._range(self._position, count)[0]
            self._position += count
        return count

    def _range(self, begin: int, count: int) -> tuple[bytes, int]:
        """Bytes [begin, begin + count) and the file's length."""

        def get() -> tuple[bytes, int]:
            wanted = {"Range": f"bytes={begin}-{begin + count - 1}"}
            with _get(self._url, wanted, self._patience) as response:
                if response.status_code != 206:
                    raise DownloadError(
                        f"{self._url}: the server does not serve ranges, so single episodes "
                        f"cannot be taken; {_WITHOUT_RANGES}"
                    )
                length = _length_of_range(self._url, response, begin, _WITHOUT_RANGES)
                if self.length and length != self.length:
                    raise DownloadError(f"{self._url} changed while it was read; run again")
                content = response.content
                if len(content) != count:
                    raise requests.ConnectionError(f"{len(content)} of {count} bytes arrived")
                return content, length

        return _insist(self._url, get, self._patience)


def check_file(path: Path, *, size: int | None, sha256: str | None) -> None:
    """Refuses, by `DownloadError`, a local file that is not what is expected; None is not known."""
    found = path.stat().st_size
    if size is not None and found != size:
        raise DownloadError(
            f"{path} has {found:,} bytes, expected {size:,}: another file, or part of one; "
            f"move it away, or choose another folder by --out"
        )
    if sha256 is None:
        log.warning("%s: no SHA-256 is known for it, so it is taken for what it should be", path)
    elif (found_sha256 := _sha256(path)) != sha256:
        raise DownloadError(
            f"{path} has SHA-256 {found_sha256}, expected {sha256}: damaged, or another file; "
            f"move it away, or choose another folder by --out"
        )


def check_disk(near: Path, needed: int) -> None:
    """Refuses, by `DownloadError`, what the disk beside a path has no room for.

    Args:
        near: The path, whose folder exists.
        needed: Bytes.
    """
    free = shutil.disk_usage(near.parent).free
    if needed > free:
        raise DownloadError(
            f"{near.parent}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; make "
            f"room, choose another folder by --out, or take part of it by --episodes"
        )


def _continue(url: str, partial: Path, size: int | None, patience: Patience) -> None:
    """One request for what is missing; returns when all is there."""
    begin, tag = _size(partial), _tag(partial)
    headers = {"Range": f"bytes={begin}-", "If-Range": tag} if begin and tag else {}
    with _get(url, headers, patience) as response:
        if response.status_code == 416:  # nothing left to send, or the file has shrunk
            there = response.headers.get("Content-Range", "").rpartition("/")[2]
            if there == str(begin):
                return _check_size(url, begin, size, partial)
            _forget(partial)
            raise requests.ConnectionError(
                f"{begin} bytes are here, {there or 'an unknown number'} there; starting over"
            )
        if response.status_code == 206:
            total = _length_of_range(url, response, begin, f"remove {partial} to begin anew")
        else:  # the whole file: a first request, or no ranges here
            begin, total = 0, _length(url, response)
            _forget(partial)  # before the new tag, which else could be taken for that of old bytes
        _check_size(url, total, size, partial)
        check_disk(partial, total - begin)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if tag:
            write_whole(_tag_path(partial), tag.encode())
        bar = tqdm(
            desc=url.rpartition("/")[2],
            total=total,
            initial=begin,
            unit="B",
            unit_scale=True,
            disable=None,
        )
        with partial.open("ab" if begin else "wb") as file, bar:
            for block in response.iter_content(_BLOCK):
                file.write(block)
                bar.update(len(block))
    if _size(partial) != total:
        raise requests.ConnectionError(f"{_size(partial)} of {total} bytes arrived")


def _length(url: str, response: requests.Response) -> int:
    """Bytes of a whole file that begins to arrive; `DownloadError` if nobody says."""
    found = response.headers.get("Content-Length", "")
    if not found.isdecimal():
        raise DownloadError(
            f"{url}: the server does not say how long the file is (Content-Length {found!r}), so "
            f"it could end too early unseen; try a mirror by --base-url"
        )
    return int(found)


def _length_of_range(url: str, response: requests.Response, begin: int, instead: str) -> int:
    """Bytes of the whole file that a range is of.

    `DownloadError` if the range begins elsewhere than at `begin`, saying what to do `instead`.
    """
    found = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+)", found)
    if match is None or int(match[1]) != begin:
        raise DownloadError(
            f"{url}: bytes from {begin:,} on were asked for, the server sends {found!r}, expected "
            f"'bytes {begin}-LAST/LENGTH': its ranges can't be used; {instead}"
        )
    return int(match[2])


def _get(url: str, headers: dict[str, str], patience: Patience) -> requests.Response:
    # Compressed on the way, lengths and ranges would not be those of the file.
    headers = {"Accept-Encoding": "identity", **headers}
    response = requests.get(url, headers=headers, stream=True, timeout=patience.timeout)
    if response.status_code >= 400 and response.status_code != 416:
        response.close()
        response.raise_for_status()
    return response


def _insist(
    url: str,
    get: Callable[[], Result],
    patience: Patience,
    *,
    arrived: Callable[[], int] = lambda: 0,
) -> Result:
    """What `get` returns, tried again after failures; those that brought bytes count anew."""
    failures = 0
    while True:
        before = arrived()
        try:
            return get()
        except requests.RequestException as error:
            _raise_if_final(url, error)
            failures = 1 if arrived() > before else failures + 1
            _wait(url, error, failures, patience)


def _raise_if_final(url: str, error: requests.RequestException) -> None:
    """Turns what no retry mends into a `DownloadError`."""
    if isinstance(error, _UNUSABLE):
        raise DownloadError(
            f"{url}: {error}; expected an address like https://host/folder (see --base-url)"
        ) from error
    status = error.response.status_code if error.response is not None else None
    if status is not None and status < 500 and status not in (408, 429):
        raise DownloadError(f"{url}: the server answers {error}") from error


def _wait(url: str, error: Exception, failures: int, patience: Patience) -> None:
    if failures > patience.retries:
        raise DownloadError(
            f"{url}: gave up after {failures} failures in a row, the last: {error}. What has "
            f"arrived is kept; run the same command again to continue"
        ) from error
    seconds = min(60.0, patience.backoff * 2 ** (failures - 1))
    log.warning("%s: %s; again in %.0f s", url, error, seconds)
    time.sleep(seconds)


def _check_size(url: str, offered: int, expected: int | None, partial: Path) -> None:
    if expected is not None and offered != expected:
        _forget(partial)
        raise DownloadError(f"{url} has {offered:,} bytes, expected {expected:,}: another file")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag_path(partial: Path) -> Path:
    return partial.with_name(f"{partial.name}.tag")


def _tag(partial: Path) -> str | None:
    """What the server called the version that the partial file is of."""
    path = _tag_path(partial)
    return path.read_text() if path.exists() else None


def _forget(partial: Path) -> None:
    partial.unlink(missing_ok=True)
    _tag_path(partial).unlink(missing_ok=True)
