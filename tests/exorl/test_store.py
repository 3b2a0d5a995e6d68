import json
import os
import zipfile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exorl.store
from exorl import episodes
from exorl.episodes import DTYPES, FIELDS, Episode, EpisodeError
from exorl.store import EpisodeStore, StoreError, pack
from exorl.tasks import TaskError


def make_episode(length, seed):
    """Random numbers in the shape of a cartpole episode."""
    rng = np.random.default_rng(seed)
    widths = dict(zip(FIELDS, (5, 1, 1, 1, 4), strict=True))
    return Episode(
        **{
            name: rng.uniform(-1, 1, (length + 1, width)).astype(DTYPES[name])
            for name, width in widths.items()
        }
    )


@pytest.fixture
def folder(tmp_path):
    """Eleven episodes of different lengths, numbered so that names sort otherwise."""
    for index in range(11):
        path = episodes.write(tmp_path / "rnd", index, make_episode(5 + index, index))
        path.rename(path.with_name(f"episode_{index}_{5 + index}.npz"))
    return tmp_path / "rnd"


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), data=st.data())
def test_round_trip(tmp_path_factory, lengths, data):
    tmp = tmp_path_factory.mktemp("store")
    split = data.draw(st.integers(0, len(lengths) - 1))
    written = [make_episode(length, i) for i, length in enumerate(lengths)]
    sources = {}
    for name, part in (("icm", written[:split]), ("rnd", written[split:])):
        for index, episode in enumerate(part):
            episodes.write(tmp / name, index, episode)
            sources[name] = tmp / name
    store = pack(sources, tmp / "out", domain="cartpole")
    assert len(store) == len(written)
    np.testing.assert_array_equal(np.diff(store.offsets), np.array(lengths) + 1)
    for packed, episode in zip(store, written, strict=True):
        for name in FIELDS:
            np.testing.assert_array_equal(getattr(packed, name), getattr(episode, name))
            assert getattr(packed, name).dtype == DTYPES[name]
    collectors = [entry["collector"] for entry in store.index["episodes"]]
    assert collectors == ["icm"] * split + ["rnd"] * (len(lengths) - split)


def test_the_index_says_where_everything_came_from(folder, tmp_path):
    store = pack([folder], tmp_path / "out", domain="cartpole")
    assert store.domain == "cartpole" and store.index["schema"] == 1
    assert store.index["sources"] == {"rnd": str(folder)}
    assert {"numpy", "mujoco", "dm-control"} == set(store.index["versions"])
    entries = store.index["episodes"]
    assert [entry["episode"] for entry in entries] == list(range(11))
    assert entries[10]["file"] == "episode_10_15.npz" and entries[10]["collector"] == "rnd"
    assert store.offsets.dtype == np.int64 and store.offsets[-1] == len(store.field("action"))


def test_episodes_are_read_only_views_of_the_mapped_files(folder, tmp_path):
    store = pack([folder], tmp_path / "out", domain="cartpole")
    for name in FIELDS:
        whole, part = store.field(name), getattr(store[3], name)
        assert isinstance(whole, np.memmap)
        assert np.shares_memory(whole, part)
        np.testing.assert_array_equal(part, whole[store.offsets[3] : store.offsets[4]])
        with pytest.raises(ValueError, match="read-only"):
            part[0] = 0


def test_episodes_are_indexed_like_a_list(folder, tmp_path):
    store = pack([folder], tmp_path / "out", domain="cartpole")
    assert len(store[-1]) == 15 and len(list(store)) == 11
    np.testing.assert_array_equal(store[-11].action, store[0].action)
    for outside in (11, -12):
        with pytest.raises(IndexError, match=f"episode {outside} of 11"):
            store[outside]


def test_the_first_episodes_are_the_first_by_number(folder, tmp_path):
    store = pack([folder], tmp_path / "out", domain="cartpole", episodes=3)
    assert [entry["episode"] for entry in store.index["episodes"]] == [0, 1, 2]
    for count in (0, 12):
        with pytest.raises(StoreError, match=f"{count} episodes wanted, but there are 11"):
            pack([folder], tmp_path / "other", domain="cartpole", episodes=count)


def numbers(store):
    return [entry["episode"] for entry in store.index["episodes"]]


def test_a_selection_is_of_episodes_by_number_and_recorded(folder, tmp_path):
    expected = {"first": [0, 1, 2, 3], "last": [7, 8, 9, 10], "stratified": [0, 2, 5, 8]}
    for select, chosen in expected.items():
        store = pack([folder], tmp_path / select, domain="cartpole", episodes=4, select=select)
        assert numbers(store) == chosen
        assert store.index["selection"] == {"episodes": 4, "select": select, "seed": 0}
    chosen = [
        numbers(pack([folder], tmp_path / name, domain="cartpole", select="random", **changes))
        for name, changes in {
            "a": {"episodes": 4, "seed": 1},
            "b": {"episodes": 4, "seed": 1},
            "c": {"episodes": 4, "seed": 2},
            "all": {},
        }.items()
    ]
    assert chosen[0] == chosen[1] == sorted(set(chosen[0])) != chosen[2]
    assert chosen[3] == list(range(11))
    with pytest.raises(StoreError, match="select is 'best', expected first, last"):
        pack([folder], tmp_path / "out", domain="cartpole", episodes=4, select="best")


def test_a_zip_is_packed_without_unpacking_it(folder, tmp_path):
    archive = tmp_path / "rnd.zip"
    with zipfile.ZipFile(archive, "w") as made:
        for path in folder.iterdir():
            made.write(path, f"buffer/{path.name}")
        made.writestr("video/0.mp4", b"film")
    before = set(tmp_path.iterdir())
    packed = pack([archive], tmp_path / "zipped", domain="cartpole")
    assert set(tmp_path.iterdir()) - before == {tmp_path / "zipped"}
    unpacked = pack([folder], tmp_path / "out", domain="cartpole")
    assert packed.fingerprint == unpacked.fingerprint
    assert packed.index["episodes"] == unpacked.index["episodes"]
    archive.write_bytes(archive.read_bytes()[:-30])
    with pytest.raises(StoreError, match=r"rnd\.zip: no episodes .* cut short"):
        pack([archive], tmp_path / "again", domain="cartpole")
    archive.write_bytes(b"nonsense")
    with pytest.raises(EpisodeError, match=r"rnd\.zip: neither a folder nor a whole zip"):
        pack([archive], tmp_path / "again", domain="cartpole")


def test_a_bad_episode_in_a_zip_is_named(folder, tmp_path):
    archive = tmp_path / "rnd.zip"
    with zipfile.ZipFile(archive, "w") as made:
        made.writestr("buffer/episode_000003_10.npz", b"nonsense")
    with pytest.raises(EpisodeError, match=r"rnd\.zip/buffer/episode_000003_10\.npz: damaged"):
        pack([archive], tmp_path / "out", domain="cartpole")


def test_a_bad_episode_is_refused_by_name_or_skipped_and_listed(folder, tmp_path):
    bad = folder / "episode_4_9.npz"
    bad.write_bytes(bad.read_bytes()[:-100])
    out = tmp_path / "out"
    with pytest.raises(EpisodeError, match=r"episode_4_9\.npz: damaged"):
        pack([folder], out, domain="cartpole")
    assert os.listdir(tmp_path) == ["rnd"]
    store = pack([folder], out, domain="cartpole", skip_bad=True)
    assert [entry["episode"] for entry in store.index["episodes"]] == [0, 1, 2, 3, *range(5, 11)]
    (skipped,) = store.index["skipped"]
    assert skipped["file"] == str(bad) and "damaged" in skipped["reason"]


def test_the_other_domains_episodes_are_refused(folder, tmp_path):
    with pytest.raises(EpisodeError, match=r"episode_0_5\.npz: observation .* for walker_stand"):
        pack([folder], tmp_path / "out", domain="walker")
    with pytest.raises(StoreError, match="all 11 episodes are bad"):
        pack([folder], tmp_path / "out", domain="walker", skip_bad=True)
    with pytest.raises(TaskError, match="unknown domain 'hopper'"):
        pack([folder], tmp_path / "out", domain="hopper")
    assert os.listdir(tmp_path) == ["rnd"]


def test_nothing_to_pack_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreError, match="empty: no episodes"):
        pack([tmp_path / "empty"], tmp_path / "out", domain="cartpole")
    with pytest.raises(StoreError, match="no sources"):
        pack([], tmp_path / "out", domain="cartpole")


def test_sources_are_named_by_their_folders(folder, tmp_path):
    other = tmp_path / "proto" / "buffer"
    episodes.write(other, 0, make_episode(5, 99))
    store = pack([folder, other], tmp_path / "out", domain="cartpole")
    assert list(store.index["sources"]) == ["rnd", "proto"]
    with pytest.raises(StoreError, match="two sources are called 'rnd'"):
        pack([folder, folder], tmp_path / "twice", domain="cartpole")


def test_packing_again_keeps_the_same_and_refuses_another(folder, tmp_path):
    out = tmp_path / "out"
    first = pack([folder], out, domain="cartpole")
    inode = os.stat(out / "action.npy").st_ino
    assert pack([folder], out, domain="cartpole").fingerprint == first.fingerprint
    assert os.stat(out / "action.npy").st_ino == inode
    with pytest.raises(StoreError, match="something else is there already"):
        pack([folder], out, domain="cartpole", episodes=2)
    assert len(EpisodeStore(out)) == 11
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="something else is there already"):
        pack([folder], tmp_path / "file", domain="cartpole")
    assert sorted(os.listdir(tmp_path)) == ["file", "out", "rnd"]


def test_the_fingerprint_is_of_the_content(folder, tmp_path):
    first = pack([folder], tmp_path / "a", domain="cartpole")
    folder.rename(tmp_path / "moved")
    moved = pack([tmp_path / "moved"], tmp_path / "b", domain="cartpole")
    assert moved.fingerprint == first.fingerprint
    episodes.write(tmp_path / "moved", 0, make_episode(5, 77))
    (tmp_path / "moved" / "episode_0_5.npz").unlink()
    changed = pack([tmp_path / "moved"], tmp_path / "c", domain="cartpole")
    assert changed.fingerprint != first.fingerprint


@pytest.mark.parametrize("moment", ["read", "rename"])
def test_a_crash_in_the_middle_leaves_nothing(folder, tmp_path, monkeypatch, moment):
    if moment == "read":

        def progress(files):
            yield from files[:4]
            raise KeyboardInterrupt

    else:
        progress = iter

        def crash(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(exorl.store.os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        pack([folder], tmp_path / "out", domain="cartpole", progress=progress)
    assert os.listdir(tmp_path) == ["rnd"]


def test_incomplete_stores_are_refused(folder, tmp_path):
    with pytest.raises(StoreError, match="no store here"):
        EpisodeStore(tmp_path)
    out = tmp_path / "out"
    pack([folder], out, domain="cartpole")
    data = (out / "physics.npy").read_bytes()
    (out / "physics.npy").write_bytes(data[:-64])
    with pytest.raises(StoreError, match=r"physics\.npy: .*pack the store again"):
        EpisodeStore(out)
    np.save(out / "physics.npy", np.zeros((7, 4)))
    with pytest.raises(StoreError, match=r"physics\.npy has 7 rows, expected 121"):
        EpisodeStore(out)
    (out / "physics.npy").write_bytes(data)
    index = json.loads((out / "index.json").read_text())
    (out / "index.json").write_text(json.dumps(index | {"episodes": index["episodes"][:-1]}))
    with pytest.raises(StoreError, match="disagree on how many episodes"):
        EpisodeStore(out)
    (out / "index.json").write_text(json.dumps(index | {"schema": 0}))
    with pytest.raises(StoreError, match="schema 0, expected 1"):
        EpisodeStore(out)
    (out / "index.json").write_text("{")
    with pytest.raises(StoreError, match=r"index\.json: damaged"):
        EpisodeStore(out)
