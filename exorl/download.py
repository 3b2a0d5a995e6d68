"""ExoRL's datasets from their publisher: whole zips, or single episodes out of a remote one."""

import io
import json
import logging
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from exorl.datasets import BASE_URL, Dataset
from exorl.episodes import EpisodeError, describe
from exorl.http import (
    DownloadError,
    Patience,
    RemoteFile,
    check_disk,
    check_file,
    download_file,
)
from exorl.paths import write_whole

log = logging.getLogger(__name__)

# Bytes asked for at once within a remote zip.
_READ_AHEAD = 1 << 23

# Says, beside `buffer`, what is in it.
_RECORD = "download.json"


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
    checked and unpacked. Some: they are read out of the remote zip, without the rest of it. A zip
    that is at `folder.zip` already is checked, read instead, and left there. Episodes that are
    there already are kept; with all that was asked for, nothing is requested.

    Args:
        dataset: Which.
        folder: Where to.
        episodes: Only the first so many by number, at least 1; None for all.
        base: Where the zips lie, `BASE_URL` or a mirror.
        keep_zip: Leave the downloaded zip beside the folder.
        patience: When to give up.

    Returns:
        The folder of the episodes.

    Raises:
        DownloadError: It cannot be had, is not what is expected, or does not fit the disk; or
            the folder holds other episodes.
    """
    if episodes is not None and episodes < 1:
        raise DownloadError(f"{episodes} episodes to download, expected at least 1")
    patience, folder = patience or Patience(), folder.resolve()
    buffer, path = folder / "buffer", folder.with_name(f"{folder.name}.zip")
    if _has(_recorded(folder, dataset), buffer, episodes):
        return buffer
    there, url = path.exists(), dataset.url(base)
    fetched = episodes is None and not there
    if there:
        check_file(path, size=dataset.size, sha256=dataset.sha256)
        log.info("%s is there already: the episodes are taken from it, and it is kept", path)
    elif fetched:
        size, sha256 = dataset.size, dataset.sha256
        download_file(url, path, size=size, sha256=sha256, patience=patience)
    try:
        if there or fetched:
            with path.open("rb") as local:
                _extract(local, str(path), folder, url, episodes)
        else:
            with io.BufferedReader(RemoteFile(url, patience), _READ_AHEAD) as remote:
                _extract(remote, url, folder, url, episodes)
    except _UnusableError as error:
        mend = "run again, or try a mirror by --base-url"
        if there:
            mend = "move it away, or choose another folder by --out"
        elif fetched:
            path.unlink()
            mend = f"it is deleted; {mend}"
        raise DownloadError(f"{error}; {mend}") from error
    if fetched and not keep_zip:
        path.unlink()
    return buffer


class _UnusableError(DownloadError):
    """A zip that no episodes can be taken from, however often it is tried."""


def _extract(file: Any, name: str, folder: Path, url: str, episodes: int | None) -> None:
    """Writes the zip's episodes that are not there yet, and records how many there are now."""
    buffer = folder / "buffer"
    try:
        with zipfile.ZipFile(file) as archive:
            members = _episodes_in(archive, name)[:episodes]
            if not members:
                raise _UnusableError(f"{name} holds no buffer/episode_*.npz: not an ExoRL dataset")
            missing = [
                member
                for member in members
                if not _is_there(buffer / PurePosixPath(member.filename).name, member.file_size)
            ]
            buffer.mkdir(parents=True, exist_ok=True)
            if not (folder / _RECORD).exists():
                # From now on the episodes, should they remain incomplete, are known to be its.
                _record(folder, url, 0, complete=False)
            check_disk(buffer, sum(member.file_size for member in missing))
            for member in tqdm(missing, desc="episodes", unit="episode", disable=None):
                content = archive.read(member)  # its checksum is verified
                write_whole(buffer / PurePosixPath(member.filename).name, content)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise _UnusableError(f"{name} is damaged, or no zip file ({error})") from error
    _record(folder, url, len(members), complete=episodes is None or len(members) < episodes)


def _episodes_in(archive: zipfile.ZipFile, name: str) -> list[zipfile.ZipInfo]:
    """Members that are episodes, by number."""
    numbered = []
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if path.parent.name == "buffer" and path.suffix == ".npz":
            try:
                numbered.append((describe(path.name).index, member))
            except EpisodeError as error:
                raise _UnusableError(f"{name}: {error}") from error
    return [member for _, member in sorted(numbered, key=lambda pair: pair[0])]


def _record(folder: Path, url: str, episodes: int, *, complete: bool) -> None:
    """Writes down which dataset the folder is of, and how much of it is sure to be there."""
    record = {"url": url, "episodes": episodes, "complete": complete}
    write_whole(folder / _RECORD, json.dumps(record, indent=1).encode())


def _recorded(folder: Path, dataset: Dataset) -> dict[str, Any] | None:
    """What is written down, None if there is nothing yet.

    Raises:
        DownloadError: The folder holds another dataset, or episodes that nobody knows.
    """
    path = folder / _RECORD
    try:
        record = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise DownloadError(
            f"{path}: damaged ({error}); remove {folder}, or choose another folder by --out"
        ) from error
    except FileNotFoundError:
        if any((folder / "buffer").glob("*.npz")):
            raise DownloadError(
                f"{folder / 'buffer'} holds episodes, but no {path} says of which dataset; choose "
                f"another folder by --out, or move them away"
            ) from None
        return None
    if not record["url"].endswith(dataset.url("")):  # a mirror has the same layout
        raise DownloadError(
            f"{folder} holds episodes of {record['url']}, now {dataset.domain} {dataset.algorithm} "
            f"is asked for; choose another folder by --out, or remove this one"
        )
    return record


def _has(record: dict[str, Any] | None, buffer: Path, episodes: int | None) -> bool:
    if record is None or len(list(buffer.glob("*.npz"))) < record["episodes"]:
        return False
    return record["complete"] or (episodes is not None and record["episodes"] >= episodes)


def _is_there(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
