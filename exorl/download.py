"""Downloading: whole zips that resume and are verified, or single episodes out of a remote zip."""

import hashlib
import io
import json
import logging
import os
import shutil
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import requests
from tqdm import tqdm

from exorl.datasets import BASE_URL, Dataset
from exorl.episodes import EpisodeError, describe

log = logging.getLogger(__name__)

Result = TypeVar("Result")

# Bytes that a broken connection can lose, and bytes asked for at once within a remote zip.
_BLOCK = 1 << 16
_READ_AHEAD = 1 << 23


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


def download(
    dataset: Dataset,
    folder: Path,
    *,
    episodes: int | None = None,
    base: str = BASE_URL,
    keep_zip: bool = False,
    patience: Patience | None = None,
) -> Path:
    """Brings a dataset's episodes, and nothing else of its zip, to `folder/buffer`.

    All episodes: the zip is downloaded to `folder.zip`, continuing what an earlier attempt left,
    checked and unpacked. Some: they are read out of the remote zip, without the rest of it.
    Episodes that are there already are kept; with all that was asked for, nothing is requested.

    Args:
        dataset: Which.
        folder: Where to.
        episodes: Only the first so many by number; None for all.
        base: Where the zips lie, `BASE_URL` or a mirror.
        keep_zip: Leave the zip beside the folder.
        patience: When to give up.

    Returns:
        The folder of the episodes.

    Raises:
        DownloadError: It cannot be had, is not what is expected, or does not fit the disk.
    """
    patience = patience or Patience()
    buffer, done = folder / "buffer", folder / "download.json"
    if _has(done, episodes):
        return buffer
    url = dataset.url(base)
    if episodes is not None:
        with io.BufferedReader(RemoteFile(url, patience), _READ_AHEAD) as remote:
            count = _extract(remote, url, buffer, episodes)
    else:
        path = folder.with_name(f"{folder.name}.zip")
        if not path.exists():
            download_file(url, path, size=dataset.size, sha256=dataset.sha256, patience=patience)
        with path.open("rb") as local:
            count = _extract(local, str(path), buffer, None)
        if not keep_zip:
            path.unlink()
    record = {"url": url, "episodes": count, "complete": episodes is None or count < episodes}
    _replace(done, json.dumps(record, indent=1).encode())
    return buffer


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
    failures = 0
    while True:
        before = _size(partial)
        try:
            _continue(url, partial, size, patience)
            break
        except requests.RequestException as error:
            _raise_if_final(url, error)
            failures = 1 if _size(partial) > before else failures + 1
            _wait(url, error, failures, patience)
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
                        f"cannot be taken; download the whole dataset (without --episodes)"
                    )
                length = int(response.headers["Content-Range"].rpartition("/")[2])
                if self.length and length != self.length:
                    raise DownloadError(f"{self._url} changed while it was read; run again")
                return response.content, length

        return _insist(self._url, get, self._patience)


def _continue(url: str, partial: Path, size: int | None, patience: Patience) -> None:
    """One request for what is missing; returns when all is there."""
    begin, tag = _size(partial), _tag(partial)
    headers = {"Range": f"bytes={begin}-", "If-Range": tag} if begin and tag else {}
    with _get(url, headers, patience) as response:
        if response.status_code == 416:  # nothing left to send, or the file has shrunk
            total = int(response.headers.get("Content-Range", "*/-1").rpartition("/")[2])
            if total == begin:
                return _check_size(url, total, size, partial)
            _forget(partial)
            raise requests.ConnectionError(f"{begin} bytes are here, {total} there; starting over")
        if response.status_code == 200:  # the whole file: a first request, or no ranges here
            begin = 0
        total = begin + int(response.headers["Content-Length"])
        _check_size(url, total, size, partial)
        _check_disk(partial, total - begin)
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if tag:
            _replace(_tag_path(partial), tag.encode())
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


def _extract(file: Any, name: str, buffer: Path, episodes: int | None) -> int:
    """Writes the zip's episodes that are not there yet, and says how many there are now."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = _episodes_in(archive)[:episodes]
            if not members:
                raise DownloadError(f"{name} holds no buffer/episode_*.npz: not an ExoRL dataset")
            missing = [
                member
                for member in members
                if _size(buffer / PurePosixPath(member.filename).name) != member.file_size
            ]
            buffer.mkdir(parents=True, exist_ok=True)
            _check_disk(buffer, sum(member.file_size for member in missing))
            for member in tqdm(missing, desc="episodes", unit="episode", disable=None):
                content = archive.read(member)  # its checksum is verified
                _replace(buffer / PurePosixPath(member.filename).name, content)
    except zipfile.BadZipFile as error:
        raise DownloadError(f"{name} is damaged or no zip file: {error}; run again") from error
    return len(members)


def _episodes_in(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """Members that are episodes, by number."""
    numbered = []
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if path.parent.name == "buffer" and path.suffix == ".npz":
            try:
                numbered.append((describe(path.name).index, member))
            except EpisodeError as error:
                raise DownloadError(f"{archive.filename}: {error}") from error
    return [member for _, member in sorted(numbered, key=lambda pair: pair[0])]


def _get(url: str, headers: dict[str, str], patience: Patience) -> requests.Response:
    # Compressed on the way, lengths and ranges would not be those of the file.
    headers = {"Accept-Encoding": "identity", **headers}
    response = requests.get(url, headers=headers, stream=True, timeout=patience.timeout)
    if response.status_code >= 400 and response.status_code != 416:
        response.close()
        response.raise_for_status()
    return response


def _insist(url: str, get: Callable[[], Result], patience: Patience) -> Result:
    failures = 0
    while True:
        try:
            return get()
        except requests.RequestException as error:
            _raise_if_final(url, error)
            failures += 1
            _wait(url, error, failures, patience)


def _raise_if_final(url: str, error: requests.RequestException) -> None:
    """Turns what no retry mends into a `DownloadError`."""
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


def _check_disk(near: Path, needed: int) -> None:
    free = shutil.disk_usage(near.parent).free
    if needed > free:
        raise DownloadError(
            f"{near.parent}: {needed / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB are free; make "
            f"room, choose another folder by --out, or take part of it by --episodes"
        )


def _has(done: Path, episodes: int | None) -> bool:
    try:
        record = json.loads(done.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    return record["complete"] or (episodes is not None and record["episodes"] >= episodes)


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


def _replace(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
