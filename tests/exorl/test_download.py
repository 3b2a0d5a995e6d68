"""Downloads from a local server that misbehaves in every way that real ones do."""

import hashlib
import io
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


def test_damage_within_the_zip_is_noticed(server, archive, tmp_path):
    at = archive.index(episode(4)) + 700
    server.content = archive[:at] + bytes([archive[at] ^ 1]) + archive[at + 1 :]
    with pytest.raises(DownloadError, match=r"Bad CRC-32.*nothing of the zip is kept"):
        download(
            datasets.dataset("walker", "icm"),
            tmp_path / "icm",
            base=server.url,
            patience=PATIENCE,
        )


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
