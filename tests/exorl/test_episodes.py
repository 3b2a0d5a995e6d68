import dataclasses
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exorl import episodes
from exorl.episodes import DTYPES, FIELDS, Episode, EpisodeError
from exorl.tasks import task


def make_episode(length=10, seed=0, dims=(17, 6, 18)):
    """Random numbers in the shape of an ExoRL episode, cheetah's by default."""
    rng = np.random.default_rng(seed)
    widths = dict(zip(FIELDS, (dims[0], dims[1], 1, 1, dims[2]), strict=True))
    fields = {
        name: rng.uniform(-1, 1, (length + 1, width)).astype(DTYPES[name])
        for name, width in widths.items()
    }
    fields["action"][0] = fields["reward"][0] = 0
    fields["discount"][:] = 1
    return Episode(**fields)


def as_dict(episode):
    return {name: getattr(episode, name) for name in FIELDS}


def save(path, fields):
    np.savez_compressed(path, **fields)
    return path


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 30), seed=st.integers(0, 2**32 - 1), index=st.integers(0, 10**7))
def test_written_episodes_read_back_the_same(tmp_path_factory, length, seed, index):
    folder, episode = tmp_path_factory.mktemp("episodes"), make_episode(length, seed, (3, 2, 4))
    path = episodes.write(folder, index, episode)
    assert path == folder / f"episode_{index:06d}_{length}.npz"
    back = episodes.read(path)
    assert len(back) == len(episode) == length
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(back, name), getattr(episode, name))
        assert getattr(back, name).dtype == DTYPES[name]
    (found,) = episodes.find(folder)
    assert found == episodes.EpisodeFile(path, index, length)


def test_files_hold_plain_arrays_and_nothing_else(tmp_path):
    path = episodes.write(tmp_path / "new", 3, make_episode())
    with np.load(path, allow_pickle=False) as file:
        assert sorted(file) == sorted(FIELDS)
    assert [entry.name for entry in path.parent.iterdir()] == ["episode_000003_10.npz"]


def test_episodes_are_found_by_number_in_both_naming_schemes(tmp_path):
    names = [
        "episode_000010_7.npz",
        "episode_9_7.npz",
        "episode_1000000_250.npz",
        "20220201T101112_11_7.npz",
        "20210101T101112_0002_7.npz",
    ]
    for name in (*names, "notes.txt", ".episode_000001_7.npz.123", "._episode_000001_7.npz"):
        (tmp_path / name).touch()
    found = episodes.find(tmp_path)
    assert [file.index for file in found] == [2, 9, 10, 11, 1000000]
    assert [file.length for file in found] == [7, 7, 7, 7, 250]


def test_unpacked_archives_keep_their_episodes_in_buffer(tmp_path):
    path = episodes.write(tmp_path / "rnd" / "buffer", 0, make_episode())
    assert [file.path for file in episodes.find(tmp_path / "rnd")] == [path]


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_episodes_in_a_zip_are_read_and_leave_no_file_open(tmp_path, method):
    path = episodes.write(tmp_path, 3, make_episode())
    archive = tmp_path / "rnd.zip"
    with zipfile.ZipFile(archive, "w", method) as zipped:
        zipped.write(path, f"buffer/{path.name}")
        zipped.writestr("eval/notes.txt", "not an episode")
    [file] = episodes.find(archive)
    assert (str(file.path), file.index) == (f"{archive}/buffer/{path.name}", 3)
    np.testing.assert_array_equal(episodes.read(file.path).action, make_episode().action)
    opened = {os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")}
    assert str(archive) not in opened


@pytest.mark.parametrize("folder", ["buffer", "walker/rnd/buffer", ""])
def test_a_zips_episodes_lie_in_buffer_at_any_depth(tmp_path, folder):
    path = episodes.write(tmp_path, 3, make_episode())
    with zipfile.ZipFile(tmp_path / "rnd.zip", "w") as zipped:
        zipped.write(path, f"{folder}/{path.name}".lstrip("/"))
        zipped.write(path, f"eval/{path.name}")
    [file] = episodes.find(tmp_path / "rnd.zip")
    assert str(file.path) == f"{tmp_path / 'rnd.zip'}/{folder}/{path.name}".replace("//", "/")


@pytest.mark.parametrize("name", ["episode_1.npz", "episode_a_10.npz", "walker.npz"])
def test_other_names_are_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(EpisodeError, match=rf"{name}: expected a name like episode_000000_1000"):
        episodes.find(tmp_path)


def test_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(EpisodeError, match="nowhere: no such folder"):
        episodes.find(tmp_path / "nowhere")


def test_unknown_keys_are_tolerated(tmp_path):
    fields = as_dict(make_episode()) | {"skill": np.zeros((11, 16), np.float32)}
    episode = episodes.read(save(tmp_path / "episode_0_10.npz", fields))
    np.testing.assert_array_equal(episode.action, fields["action"])


@pytest.mark.parametrize("how", ["stored", "columns first", "header of version 2"])
def test_however_numpy_writes_arrays_they_are_read(tmp_path, how):
    path, fields = tmp_path / "episode_0_10.npz", as_dict(make_episode())
    if how == "columns first":
        save(path, {name: np.asfortranarray(array) for name, array in fields.items()})
    elif how == "stored":
        np.savez(path, **fields)
    else:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, array in fields.items():
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array(file, array, version=(2, 0))
    episode = episodes.read(path)
    for name, array in fields.items():
        np.testing.assert_array_equal(getattr(episode, name), array)


def broken(name, change):
    """The fields of a good episode with one of them changed."""
    fields = as_dict(make_episode())
    return fields | {name: change(fields[name].copy())}


def poke(value):
    def change(array):
        array[4, 0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        ("physics", lambda a: a.astype(np.float32), "physics is float32, expected float64"),
        ("action", lambda a: a.astype(np.float64), "action is float64, expected float32"),
        ("reward", lambda a: a.astype(object), "damaged"),
        ("reward", lambda a: a[:, 0], r"reward has shape \(11,\), expected \(11, 1 or 4\)"),
        ("reward", lambda a: a.repeat(3, 1), r"reward has shape \(11, 3\), expected"),
        ("action", lambda a: a[1:], r"action has shape \(10, 6\), expected \(11, any\)"),
        ("observation", poke(np.nan), "observation is not finite in row 4"),
        ("physics", poke(np.inf), "physics is not finite in row 4"),
    ],
)
def test_each_fault_is_refused_by_file_and_field(tmp_path, name, change, fault):
    path = save(tmp_path / "episode_000005_10.npz", broken(name, change))
    with pytest.raises(EpisodeError, match=rf"episode_000005_10\.npz: {fault}"):
        episodes.read(path)


@pytest.mark.parametrize("name", FIELDS)
def test_a_missing_field_is_named(tmp_path, name):
    fields = as_dict(make_episode())
    del fields[name]
    path = save(tmp_path / "episode_0_10.npz", fields)
    with pytest.raises(EpisodeError, match=rf"episode_0_10\.npz: no '{name}' in it, only"):
        episodes.read(path)


def test_rows_must_agree_with_the_name(tmp_path):
    path = save(tmp_path / "episode_0_11.npz", as_dict(make_episode(10)))
    with pytest.raises(
        EpisodeError, match=r"observation has shape \(11, 17\), expected \(12, any\)"
    ):
        episodes.read(path)
    path = save(tmp_path / "episode_0_0.npz", as_dict(make_episode(0)))
    with pytest.raises(EpisodeError, match="0 steps, expected at least 1"):
        episodes.read(path)


def test_sizes_must_be_the_tasks(tmp_path):
    path = episodes.write(tmp_path, 0, make_episode())
    episodes.read(path, task("cheetah_run"))
    with pytest.raises(EpisodeError, match=r"expected \(11, 24\) for walker_walk"):
        episodes.read(path, task("walker_walk"))
    with pytest.raises(EpisodeError, match=r"expected \(11, 1\) for cheetah_run"):
        four = dataclasses.replace(episodes.read(path), reward=np.zeros((11, 4), np.float32))
        episodes.check(four, path, 10, task("cheetah_run"))


def test_an_episode_is_no_longer_than_its_task_lasts(tmp_path):
    jaco = task("jaco_reach_top_left")
    for length in (250, 251):
        path = episodes.write(tmp_path, length, make_episode(length, dims=(42, 9, 18)))
        episodes.read(path)
        if length == 250:
            episodes.read(path, jaco)
    with pytest.raises(
        EpisodeError, match=r"251\.npz: an episode of 251 steps, expected at most 250"
    ):
        episodes.read(path, jaco)


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "html", "gone", "array"])
def test_damaged_files_are_refused(tmp_path, damage):
    path = episodes.write(tmp_path, 0, make_episode(200))
    data = path.read_bytes()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        with zipfile.ZipFile(path) as archive:
            middle = archive.getinfo("observation.npy").header_offset + 5000
        path.write_bytes(
            data[:middle]
            + bytes(255 - byte for byte in data[middle : middle + 99])
            + data[middle + 99 :]
        )
    elif damage == "html":
        path.write_text("<html>404</html>")
    elif damage == "gone":
        path.unlink()
    elif damage == "array":
        with open(path, "wb") as file:
            np.save(file, np.zeros(3))
    with pytest.raises(EpisodeError, match=rf"{path.name}: damaged or not an npz file"):
        episodes.read(path)


@settings(max_examples=200, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), cut=st.booleans())
def test_no_damage_goes_unnoticed(tmp_path_factory, where, flip, cut):
    """A changed or missing byte is refused, unless it is one that does not matter."""
    path = episodes.write(tmp_path_factory.mktemp("damage"), 0, make_episode(20))
    good, data = episodes.read(path), bytearray(path.read_bytes())
    position = int(where * len(data))
    if cut:
        del data[position:]
    else:
        data[position] ^= flip
    path.write_bytes(data)
    try:
        read = episodes.read(path)
    except EpisodeError as error:
        assert path.name in str(error)
    else:
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(read, name), getattr(good, name))


def test_a_bad_episode_is_not_written(tmp_path):
    episode = dataclasses.replace(make_episode(), reward=np.full((11, 1), np.nan, np.float32))
    with pytest.raises(EpisodeError, match="reward is not finite in row 0"):
        episodes.write(tmp_path / "new", 0, episode)
    assert not (tmp_path / "new").exists()


def test_a_crash_while_writing_leaves_nothing(tmp_path, monkeypatch):
    def crash(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", crash)
    with pytest.raises(KeyboardInterrupt):
        episodes.write(tmp_path, 0, make_episode())
    assert os.listdir(tmp_path) == []
