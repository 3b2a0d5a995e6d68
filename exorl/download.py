"""ExoRL's datasets from their publisher: whole zips, or single episodes out of a remote one."""

import io
import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from tqdm import tqdm

from exorl.datasets import BASE_URL, Dataset
from exorl.episodes import EpisodeError, describe
from exorl.http import DownloadError, Patience, RemoteFile, check_disk, download_file
from exorl.paths import write_whole

# Bytes asked for at once within a remote zip.
_READ_AHEAD = 1 << 23


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
    if _has(done, buffer, episodes):
        return buffer
    url, path = dataset.url(base), folder.with_name(f"{folder.name}.zip")
    try:
        if episodes is not None:
            with io.BufferedReader(RemoteFile(url, patience), _READ_AHEAD) as remote:
                count = _extract(remote, url, buffer, episodes)
        else:
            if not path.exists():
                size, sha256 = dataset.size, dataset.sha256
                download_file(url, path, size=size, sha256=sha256, patience=patience)
            with path.open("rb") as local:
                count = _extract(local, str(path), buffer, None)
    except zipfile.BadZipFile as error:
        path.unlink(missing_ok=True)
        raise DownloadError(
            f"{url} is damaged, or no zip file ({error}); nothing of the zip is kept, run again"
        ) from error
    if not keep_zip:
        path.unlink(missing_ok=True)
    record = {"url": url, "episodes": count, "complete": episodes is None or count < episodes}
    write_whole(done, json.dumps(record, indent=1).encode())
    return buffer


def _extract(file: Any, name: str, buffer: Path, episodes: int | None) -> int:
    """Writes the zip's episodes that are not there yet, and says how many there are now."""
    with zipfile.ZipFile(file) as archive:
        members = _episodes_in(archive, name)[:episodes]
        if not members:
            raise DownloadError(f"{name} holds no buffer/episode_*.npz: not an ExoRL dataset")
        missing = [
            member
            for member in members
            if not _is_there(buffer / PurePosixPath(member.filename).name, member.file_size)
        ]
        buffer.mkdir(parents=True, exist_ok=True)
        check_disk(buffer, sum(member.file_size for member in missing))
        for member in tqdm(missing, desc="episodes", unit="episode", disable=None):
            content = archive.read(member)  # its checksum is verified
            write_whole(buffer / PurePosixPath(member.filename).name, content)
    return len(members)


def _episodes_in(archive: zipfile.ZipFile, name: str) -> list[zipfile.ZipInfo]:
    """Members that are episodes, by number."""
    numbered = []
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if path.parent.name == "buffer" and path.suffix == ".npz":
            try:
                numbered.append((describe(path.name).index, member))
            except EpisodeError as error:
                raise DownloadError(f"{name}: {error}") from error
    return [member for _, member in sorted(numbered, key=lambda pair: pair[0])]


def _has(done: Path, buffer: Path, episodes: int | None) -> bool:
    try:
        record = json.loads(done.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    if len(list(buffer.glob("*.npz"))) < record["episodes"]:
        return False
    return record["complete"] or (episodes is not None and record["episodes"] >= episodes)


def _is_there(path: Path, size: int) -> bool:
    return path.exists() and path.stat().st_size == size
