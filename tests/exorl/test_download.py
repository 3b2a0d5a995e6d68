"""Downloads from a local server that misbehaves in every way that real ones do."""

import dataclasses
import hashlib
import io
import shutil
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from exorl import datasets, http
from exorl import download as downloads
from exorl.download import download
from exorl.http import DownloadError, Patience, download_file
from scripts import download as command

PATIENCE = Patience(retries=2, backoff=0.01, timeout=0.5)


class Server(ThreadingHTTPServer):
    """Serves `content` at every path; `faults` are worked off one a request, before serving."""

    daemon_threads = True

    def __init__(self, content: bytes):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.tag = content, '"one"'
        self.faults: list[Callable[[Handler], bool]] = []
        self.always: Callable[[Handler], bool] | None = None
        self.ranges = True
        self.requests: list[tuple[str, str | None]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        fault = server.faults.pop(0) if server.faults else server.always
        if fault is None or not fault(self):
            self.serve()

    def serve(self, cut: int | None = None, wrong: bool = False):
        content, wanted = self.server.content, self.headers.get("Range")
        same = self.headers.get("If-Range") in (None, self.server.tag)
        begin, end = 0, len(content)
        if wanted and same and self.server.ranges:
            first, last = wanted.removeprefix("bytes=").split("-")
            begin = int(first)
            end = min(end, int(last) + 1) if last else end
            if begin >= len(content):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(content)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(content)}")
        else:
            self.send_response(200)
        self.send_header("ETag", self.server.tag)
        self.send_header("Content-Length", str(end - begin))
        self.end_headers()
        body = content[begin:end][:cut]
        self.server.sent += len(body)
        self.wfile.write(bytes(len(body)) if wrong else body)

    def log_message(self, format, *args):
        pass


def truncates(cut: int) -> Callable[[Handler], bool]:
    def fault(handler: Handler) -> bool:
        handler.serve(cut=cut)
        handler.close_connection = True
        return True

    return fault


def stalls(handler: Handler) -> bool:
    handler.serve(cut=1000)
    handler.wfile.flush()
    time.sleep(1.0)
    handler.close_connection = True
    return True


def fails(status: int) -> Callable[[Handler], bool]:
    def fault(handler: Handler) -> bool:
        handler.send_error(status)
        return True

    return fault


def redirects(handler: Handler) -> bool:
    handler.send_response(302)
    handler.send_header("Location", "/elsewhere")
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def lies(handler: Handler) -> bool:
    handler.serve(wrong=True)
    return True


def tells_no_length(handler: Handler) -> bool:
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(handler.server.content)
    handler.close_connection = True
    return True


def answers_a_range_by(content_range: str) -> Callable[[Handler], bool]:
    def fault(handler: Handler) -> bool:
        handler.send_response(206)
        handler.send_header("Content-Range", content_range)
        handler.send_header("Content-Length", "1")
        handler.end_headers()
        handler.wfile.write(b"P")
        return True

    return fault


def forgets_the_length(handler: Handler) -> bool:
    handler.send_response(416)
    handler.send_header("Content-Range", "bytes */*")
    handler.send_header("Content-Length", "0")
    handler.end_headers()
    return True


def episode(seed: int) -> bytes:
    """An npz that nobody opens here."""
    file = io.BytesIO()
    np.savez(file, observation=np.random.default_rng(seed).normal(size=(50, 24)))
    return file.getvalue()


@pytest.fixture(scope="module")
def archive() -> bytes:
    """A dataset's zip: twelve episodes out of order, and films."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        for index in (11, *range(11)):
            made.writestr(f"buffer/episode_{index:06d}_49.npz", episode(index))
        made.writestr("video/0.mp4", bytes(100_000))
    return file.getvalue()


@pytest.fixture
def server(archive) -> Iterator[Server]:
    made = Server(archive)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.mark.parametrize(
    "faults",
    [
        [],
        [truncates(5_000), truncates(20_000)],
        [stalls],
        [fails(500), fails(503)],
        [redirects],
        [fails(429), truncates(1), redirects],
    ],
    ids=["well", "truncates", "stalls", "500", "redirects", "all"],
)
def test_a_file_arrives_whole_whatever_happens(server, archive, tmp_path, faults, monkeypatch):
    monkeypatch.setattr(http, "_BLOCK", 500)
    server.faults = list(faults)
    path = tmp_path / "new" / "proto.zip"
    sha256 = hashlib.sha256(archive).hexdigest()
    download_file(server.url, path, size=len(archive), sha256=sha256, patience=PATIENCE)
    assert path.read_bytes() == archive
    assert [each.name for each in path.parent.iterdir()] == ["proto.zip"]
    assert server.sent <= len(archive) + 500 * len(faults)  # at most a block is sent twice


def test_a_later_call_continues_where_an_earlier_one_gave_up(
    server, archive, tmp_path, monkeypatch
):
    monkeypatch.setattr(http, "_BLOCK", 500)
    path = tmp_path / "proto.zip"
    server.faults = [truncates(30_000)]
    server.always = fails(500)
    with pytest.raises(DownloadError, match=r"gave up after 3 failures .* continue"):
        download_file(server.url, path, patience=PATIENCE)
    assert not path.exists()
    server.always = None
    download_file(server.url, path, patience=PATIENCE)
    assert path.read_bytes() == archive
    assert server.requests[-1][1] == "bytes=30000-"


def test_a_server_without_ranges_begins_anew(server, archive, tmp_path):
    server.ranges = False
    server.faults = [truncates(30_000)]
    download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    assert (tmp_path / "a.zip").read_bytes() == archive


def test_a_file_that_changed_meanwhile_is_not_spliced(server, archive, tmp_path):
    server.faults = [truncates(30_000)]
    server.always = fails(500)
    with pytest.raises(DownloadError, match="gave up"):
        download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    server.always, server.tag = None, '"two"'
    server.content = archive[::-1]
    download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    assert (tmp_path / "a.zip").read_bytes() == archive[::-1]


def test_bytes_of_an_older_file_are_gone_before_the_new_tag_is_written(
    server, archive, tmp_path, monkeypatch
):
    path = tmp_path / "a.zip"
    path.with_name("a.zip.partial").write_bytes(archive[:30_000])
    path.with_name("a.zip.partial.tag").write_text('"zero"')
    write = http.write_whole

    def dies_after(path, content):
        write(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr(http, "write_whole", dies_after)
    server.content = archive[::-1]
    with pytest.raises(KeyboardInterrupt):
        download_file(server.url, path, patience=PATIENCE)
    monkeypatch.setattr(http, "write_whole", write)
    download_file(server.url, path, patience=PATIENCE)
    assert path.read_bytes() == archive[::-1]


@pytest.mark.parametrize("content_range", ["bytes 0-0/30001", "bytes 30000-30000/*", ""])
def test_a_range_that_was_not_asked_for_is_not_appended(server, archive, tmp_path, content_range):
    path = tmp_path / "a.zip"
    path.with_name("a.zip.partial").write_bytes(archive[:30_000])
    path.with_name("a.zip.partial.tag").write_text(server.tag)
    server.faults = [answers_a_range_by(content_range)]
    with pytest.raises(DownloadError, match=r"expected 'bytes 30000-.* remove .*a\.zip\.partial"):
        download_file(server.url, path, patience=PATIENCE)
    assert path.with_name("a.zip.partial").read_bytes() == archive[:30_000]


def test_lengths_that_nobody_tells(server, archive, tmp_path):
    server.faults = [tells_no_length]
    with pytest.raises(DownloadError, match="does not say how long the file is"):
        download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    tmp_path.joinpath("a.zip.partial").write_bytes(archive[:300])
    tmp_path.joinpath("a.zip.partial.tag").write_text(server.tag)
    server.faults = [forgets_the_length]
    download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    assert (tmp_path / "a.zip").read_bytes() == archive
    for content_range in ("bytes 0-0/*", "bytes 7-7/9000"):
        server.faults = [answers_a_range_by(content_range)]
        with pytest.raises(DownloadError, match=r"expected 'bytes 0-LAST/.*without --episodes"):
            http.RemoteFile(server.url, PATIENCE)


@pytest.mark.parametrize("url", ["nowhere/a.zip", "ftp://nowhere/a.zip", "http:///a.zip"])
def test_what_is_no_address_is_said_at_once(tmp_path, url):
    with pytest.raises(DownloadError, match="expected an address like https://host/folder"):
        download_file(url, tmp_path / "a.zip", patience=Patience(retries=9, backoff=60))


@pytest.mark.parametrize("extra", [0, 500])
def test_416_means_complete_or_begin_anew(server, archive, tmp_path, extra):
    path = tmp_path / "a.zip"
    path.with_name("a.zip.partial").write_bytes(archive + bytes(extra))
    path.with_name("a.zip.partial.tag").write_text(server.tag)
    download_file(server.url, path, patience=PATIENCE)
    assert path.read_bytes() == archive
    assert len(server.requests) == (2 if extra else 1)


def test_wrong_bytes_are_deleted_and_said(server, archive, tmp_path):
    server.faults = [lies]
    sha256 = hashlib.sha256(archive).hexdigest()
    with pytest.raises(DownloadError, match=f"expected {sha256}: damaged on the way"):
        download_file(server.url, tmp_path / "a.zip", sha256=sha256, patience=PATIENCE)
    assert not list(tmp_path.iterdir())


def test_what_no_retry_mends_is_not_retried(server, tmp_path, monkeypatch):
    server.faults = [fails(404)]
    with pytest.raises(DownloadError, match="404"):
        download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    with pytest.raises(DownloadError, match=r"has [\d,]+ bytes, expected 7: another file"):
        download_file(server.url, tmp_path / "a.zip", size=7, patience=PATIENCE)
    full = type(http.shutil.disk_usage("/"))(10, 10, 0)
    monkeypatch.setattr(http.shutil, "disk_usage", lambda path: full)
    with pytest.raises(DownloadError, match=r"are needed, 0\.0 GB are free; make room"):
        download_file(server.url, tmp_path / "a.zip", patience=PATIENCE)
    assert len(server.requests) == 3
    assert not list(tmp_path.iterdir())


def run(server: Server, tmp_path, **changes) -> list[str]:
    """Names in the dataset's folder after the command."""
    args = command.Download("walker", "icm", out=tmp_path / "icm", base_url=server.url, **changes)
    command.main(args)
    return sorted(path.name for path in (tmp_path / "icm" / "buffer").iterdir())


def test_the_command_keeps_the_episodes_and_nothing_else(server, tmp_path, capsys):
    assert run(server, tmp_path) == [f"episode_{index:06d}_49.npz" for index in range(12)]
    assert "12 episodes in" in capsys.readouterr().out
    path = tmp_path / "icm" / "buffer" / "episode_000011_49.npz"
    assert path.read_bytes() == episode(11)
    assert [each.name for each in tmp_path.iterdir()] == ["icm"]  # no zip, no films
    count = len(server.requests)
    run(server, tmp_path)
    run(server, tmp_path, episodes=3)
    assert len(server.requests) == count  # all there already
    assert server.requests[0][0] == "/walker/icm.zip"
    path.unlink()
    assert len(run(server, tmp_path)) == 12


def test_some_episodes_come_out_of_the_remote_zip(server, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(downloads, "_READ_AHEAD", 4_096)
    server.faults = [fails(500), redirects, truncates(10)]
    assert run(server, tmp_path, episodes=3) == [f"episode_{i:06d}_49.npz" for i in range(3)]
    assert server.sent < len(archive) / 3
    path = tmp_path / "icm" / "buffer" / "episode_000002_49.npz"
    assert path.read_bytes() == episode(2)
    assert len(run(server, tmp_path, episodes=5)) == 5
    assert len(run(server, tmp_path)) == 12


def test_a_remote_zip_needs_ranges_and_must_be_one(server, tmp_path):
    server.content = bytes(5_000)
    with pytest.raises(DownloadError, match="is damaged, or no zip file"):
        run(server, tmp_path, episodes=3)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("video/0.mp4", b"film")
    server.content = file.getvalue()
    with pytest.raises(DownloadError, match=r"holds no buffer/episode_\*\.npz"):
        run(server, tmp_path, episodes=3)
    server.ranges = False
    with pytest.raises(DownloadError, match=r"does not serve ranges.*without --episodes"):
        run(server, tmp_path, episodes=3)
    assert not (tmp_path / "icm").exists()


def zipped(method: int = zipfile.ZIP_STORED, damaged: int | None = None) -> bytes:
    """Six episodes, one of them damaged where it begins."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as made:
        for index in range(6):
            made.writestr(f"buffer/episode_{index:06d}_49.npz", bytes(999))
        infos = made.infolist()
    content = bytearray(file.getvalue())
    if damaged is not None:
        begin = infos[damaged].header_offset + 30 + len(infos[damaged].filename)
        content[begin] = 0xFF
    return bytes(content)


FAULTS = {zipfile.ZIP_STORED: "Bad CRC-32", zipfile.ZIP_DEFLATED: "invalid block type"}


@pytest.mark.parametrize("method", FAULTS)
def test_damage_within_the_zip_is_noticed_and_mended_by_another_run(server, tmp_path, method):
    server.content = zipped(method, damaged=4)
    for episodes, mend in ((None, "it is deleted; run again"), (6, "run again")):
        with pytest.raises(DownloadError, match=rf"{FAULTS[method]}.*; {mend}"):
            run(server, tmp_path, episodes=episodes)
        assert [each.name for each in tmp_path.iterdir()] == ["icm"]
        assert len(list((tmp_path / "icm" / "buffer").iterdir())) == 4
    server.content = zipped(method)
    assert len(run(server, tmp_path)) == 6


def test_a_zip_that_ends_within_an_episode_is_noticed(server, tmp_path, monkeypatch):
    def ends(self, member):
        raise EOFError

    monkeypatch.setattr(zipfile.ZipFile, "read", ends)
    with pytest.raises(DownloadError, match=r"icm\.zip is damaged.*it is deleted"):
        run(server, tmp_path)


def test_a_folder_of_another_dataset_is_refused(server, tmp_path):
    run(server, tmp_path, episodes=3)
    count = len(server.requests)
    folder = tmp_path / "icm"
    for domain, algorithm in (("walker", "icm_apt"), ("cheetah", "icm")):
        other = datasets.dataset(domain, algorithm)
        with pytest.raises(DownloadError, match=rf"walker/icm\.zip, now {domain} {algorithm} is"):
            download(other, folder, episodes=3, base=server.url)
    # A mirror has the same.
    icm = datasets.dataset("walker", "icm")
    download(icm, folder, episodes=3, base=f"{server.url}/mirror")
    assert len(server.requests) == count
    (folder / "download.json").write_text("{")
    with pytest.raises(DownloadError, match=r"download\.json: damaged"):
        download(icm, folder, base=server.url)
    (folder / "download.json").unlink()
    with pytest.raises(DownloadError, match=r"buffer holds episodes, but no .*download\.json says"):
        download(icm, folder, base=server.url)
    assert len(server.requests) == count


@pytest.mark.parametrize("episodes", [None, 3])
def test_a_zip_that_was_there_before_is_checked_used_and_kept(server, archive, tmp_path, episodes):
    path = tmp_path / "icm.zip"
    path.write_bytes(archive)
    sha256 = hashlib.sha256(archive).hexdigest()
    dataset = datasets.Dataset("walker", "icm", len(archive), sha256)
    for changes, fault in (({"size": 7}, "expected 7:"), ({"sha256": "0" * 64}, "expected 000")):
        with pytest.raises(DownloadError, match=rf"icm\.zip has .*, {fault}.* move it away"):
            download(dataclasses.replace(dataset, **changes), tmp_path / "icm", episodes=episodes)
    buffer = download(dataset, tmp_path / "icm", episodes=episodes, base=server.url)
    assert len(list(buffer.iterdir())) == (episodes or 12)
    assert not server.requests and path.read_bytes() == archive


@pytest.mark.parametrize("content", [b"nonsense", zipped(damaged=0)])
def test_a_wrong_zip_that_was_there_before_is_named_and_kept(server, tmp_path, content):
    path = tmp_path / "icm.zip"
    path.write_bytes(content)
    with pytest.raises(DownloadError, match=r"icm\.zip is damaged.*; move it away"):
        run(server, tmp_path)
    assert path.read_bytes() == content and not server.requests


def test_a_downloaded_zip_of_something_else_does_not_stay(server, tmp_path):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as made:
        made.writestr("video/0.mp4", b"film")
    server.content = file.getvalue()
    with pytest.raises(DownloadError, match=r"icm\.zip holds no buffer.*; it is deleted"):
        run(server, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_downloaded_zip_stays_if_asked_for(server, archive, tmp_path):
    run(server, tmp_path, keep_zip=True)
    assert (tmp_path / "icm.zip").read_bytes() == archive


def test_a_dataset_may_come_to_the_current_folder(server, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    args = command.Download("walker", "icm", out=Path("."), episodes=2, base_url=server.url)
    command.main(args)
    assert len(list((tmp_path / "here" / "buffer").iterdir())) == 2


@pytest.mark.parametrize("episodes", [0, -1])
def test_no_episodes_are_refused(server, tmp_path, episodes):
    with pytest.raises(DownloadError, match=rf"{episodes} episodes to download, expected at least"):
        run(server, tmp_path, episodes=episodes)
    assert not server.requests


def test_a_dry_run_asks_nobody(server, tmp_path, capsys):
    args = command.Download(
        "walker", "proto", episodes=10, out=tmp_path / "a" / "b", dry_run=True, base_url=server.url
    )
    command.main(args)
    out = capsys.readouterr().out
    assert f"{server.url}/walker/proto.zip" in out
    assert "2,584,420,588 bytes, SHA-256 a34d0edf" in out
    assert "the first 10 episodes" in out
    assert not server.requests and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("algo", "episodes", "gigabytes", "said"),
    [
        ("proto", None, 6, "need 5.2 GB: fits"),
        ("proto", None, 5, "need 5.2 GB: DOES NOT FIT"),
        ("proto", 10, 5, "is known only when they are asked for"),
        ("icm", None, 5, "needs twice its zip"),
    ],
)
def test_a_dry_run_says_whether_it_fits(
    tmp_path, capsys, monkeypatch, algo, episodes, gigabytes, said
):
    disk = type(shutil.disk_usage("/"))(10**12, 10**12, gigabytes * 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    command.main(command.Download("walker", algo, episodes, out=tmp_path, dry_run=True))
    assert said in capsys.readouterr().out.splitlines()[-1]


def test_the_table_of_datasets():
    assert len(datasets.DATASETS) == 54
    urls = {each.url() for each in datasets.DATASETS.values()}
    assert len(urls) == 54
    assert "https://dl.fbaipublicfiles.com/exorl/point_mass_maze/icm_apt.zip" in urls
    known = [each for each in datasets.DATASETS.values() if each.size]
    assert len(known) == 7
    assert sum(each.sha256 is not None for each in known) == 6
    assert all(len(each.sha256) == 64 for each in known if each.sha256)
    with pytest.raises(ValueError, match="no algorithm 'prot': did you mean 'proto'"):
        datasets.dataset("walker", "prot")
