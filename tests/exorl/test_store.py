import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import exorl
from exorl import datasets, episodes
from exorl.datasets import ALGORITHMS, MIXES, Mix
from exorl.episodes import DTYPES, FIELDS, Episode, EpisodeError
from exorl.packing import pack
from exorl.store import EpisodeStore, StoreError
from exorl.tasks import TaskError
from scripts.pack import Pack
from scripts.pack import main as pack_script


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
        assert not whole.flags.writeable and not part.flags.writeable
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
        expected_selection = {"mix": None, "episodes": 4, "select": select, "seed": 0}
        assert store.index["selection"] == expected_selection
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


@pytest.mark.parametrize("bad", [False, True])
def test_one_thread_and_several_pack_the_same(folder, tmp_path, monkeypatch, bad):
    archive = tmp_path / "zipped.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        for path in folder.iterdir():
            made.write(path, f"buffer/{path.name}")
    if bad:
        for name in ("episode_4_9.npz", "episode_9_14.npz"):
            (folder / name).write_bytes(b"nonsense")
    written = []
    for count in (1, 2, 7):
        monkeypatch.setattr(exorl.packing, "cores", lambda count=count: list(range(count)))
        out = tmp_path / f"out{count}"
        if bad:
            with pytest.raises(EpisodeError, match=r"episode_4_9\.npz"):
                pack([folder, archive], out, domain="cartpole")
        pack([folder, archive], out, domain="cartpole", skip_bad=bad)
        written.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert written[0].keys() == {"index.json", "offsets.npy", *(f"{name}.npy" for name in FIELDS)}
    assert written[0] == written[1] == written[2]


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
    (tmp_path / "folder").mkdir()
    with pytest.raises(StoreError, match="something else is there already"):
        pack([folder], tmp_path / "file", domain="cartpole")
    with pytest.raises(StoreError, match="something else is there already"):
        pack([folder], tmp_path / "folder", domain="cartpole")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder", "out", "rnd"]


@pytest.mark.parametrize("there", ["store", "file", "folder"])
def test_what_is_in_the_way_is_refused_before_anything_is_read(folder, tmp_path, there):
    out = tmp_path / there
    if there == "store":
        pack([folder], out, domain="cartpole", episodes=10)
    elif there == "file":
        out.touch()
    else:
        out.mkdir()

    def progress(files):
        raise AssertionError("reading began")

    for changes in ({}, {"episodes": 2}, {"episodes": 9, "skip_bad": True}):
        with pytest.raises(StoreError, match="something else is there already"):
            pack([folder], out, domain="cartpole", progress=progress, **changes)


def test_a_store_in_the_current_folder_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StoreError, match="something else is there already"):
        pack([folder], ".", domain="cartpole")


def test_leaving_out_bad_episodes_again_keeps_the_same(folder, tmp_path):
    (folder / "episode_4_9.npz").write_bytes(b"nonsense")
    first = pack([folder], tmp_path / "out", domain="cartpole", skip_bad=True)
    inode = os.stat(first.path / "action.npy").st_ino
    pack([folder], tmp_path / "out", domain="cartpole", skip_bad=True)
    assert os.stat(first.path / "action.npy").st_ino == inode


def test_a_store_may_be_read_by_whoever_may_read_other_folders(folder, tmp_path):
    (tmp_path / f".out.{os.getpid()}").mkdir()  # left by a process that had this number before
    store = pack([folder], tmp_path / "out", domain="cartpole")
    assert os.stat(store.path).st_mode == os.stat(folder).st_mode


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

        monkeypatch.setattr(exorl.packing.os, "replace", crash)
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


# Prints "ready", waits to be told to start, then exits with an error if it reads anything wrong.
READER = """
import sys
import numpy as np
import exorl
from exorl.episodes import FIELDS

folder, seed = sys.argv[1:]
expected = np.load(folder + "/expected.npz")
print("ready", flush=True)
sys.stdin.readline()
store = exorl.EpisodeStore(folder + "/out")
rewards = exorl.relabel.rewards(store, "cartpole_balance")
np.testing.assert_array_equal(rewards, expected["rewards"])
for i in np.random.default_rng(int(seed)).integers(len(store), size=100):
    rows = slice(store.offsets[i], store.offsets[i + 1])
    for name in FIELDS:
        np.testing.assert_array_equal(getattr(store[i], name), expected[name][rows])
"""


def test_several_processes_read_one_store_and_relabel_it(folder, tmp_path):
    store = pack([folder], tmp_path / "out", domain="cartpole")
    there = {path.name for path in store.path.iterdir()}
    fields = {name: np.array(store.field(name)) for name in FIELDS}
    inputs = (fields[name] for name in ("observation", "action", "physics"))
    rewards = exorl.reward("cartpole_balance", *inputs)
    rewards[store.offsets[:-1]] = 0
    np.savez(tmp_path / "expected.npz", rewards=rewards, **fields)
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READER, tmp_path, str(seed)],
            cwd=Path(exorl.__file__).parent.parent,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for seed in range(3)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("start\n")
        reader.stdin.flush()
    for reader in readers:
        assert (reader.communicate()[1], reader.returncode) == ("", 0)
    assert {path.name for path in store.path.iterdir()} == {*there, "rewards"}
    left = sorted(path.suffix for path in (store.path / "rewards").iterdir())
    assert left == [".json", ".npy"]


def test_exorl8_is_a_million_steps_of_all_collectors_but_random():
    mix = MIXES["exorl8"]
    assert len(mix.algorithms) == 8 and {*mix.algorithms, "random"} == set(ALGORITHMS)
    assert mix.episodes("walker") == 1000 and mix.episodes("jaco") == 4000


@pytest.fixture
def mixed(tmp_path, monkeypatch):
    """What `scripts.download` might have left of a mix of three, three episodes of each."""
    monkeypatch.setenv("EXORING_HOME", str(tmp_path))
    monkeypatch.setitem(datasets.MIXES, "small", Mix("small", ("aps", "icm", "rnd"), 2500))
    home = tmp_path / "datasets" / "cartpole"
    for number, name in enumerate(("aps", "icm", "rnd")):
        for index in range(4):
            episodes.write(home / name / "buffer", index, make_episode(5, 10 * number + index))
    return home


def test_a_mix_is_packed_from_where_its_datasets_were_downloaded_to(mixed, tmp_path):
    with zipfile.ZipFile(mixed / "icm.zip", "w") as made:
        for path in (mixed / "icm" / "buffer").iterdir():
            made.write(path, f"buffer/{path.name}")
            path.unlink()
    args = Pack(domain="cartpole", out=tmp_path / "out", mix="small")
    pack_script(args)
    store = EpisodeStore(args.out)
    assert store.index["selection"] == {"mix": "small", "episodes": 3, "select": "first", "seed": 0}
    sources = {"aps": mixed / "aps", "icm": mixed / "icm.zip", "rnd": mixed / "rnd"}
    assert store.index["sources"] == {name: str(path) for name, path in sources.items()}
    packed = [(entry["collector"], entry["episode"]) for entry in store.index["episodes"]]
    assert packed == [(name, index) for name in sources for index in range(3)]


def test_all_that_a_mix_lacks_is_named_with_the_commands_that_fetch_it(mixed, tmp_path):
    (mixed / "aps").rename(mixed / "elsewhere")
    for index in (2, 3):
        (mixed / "rnd" / "buffer" / f"episode_{index:06d}_5.npz").unlink()
    with pytest.raises(FileNotFoundError, match="2 of the 3 datasets of small") as error:
        pack("small", tmp_path / "out", domain="cartpole")
    commands = [line.strip() for line in str(error.value).splitlines()[1:]]
    assert commands == [
        f"python -m scripts.download --domain cartpole --algo {name} --episodes 3"
        for name in ("aps", "rnd")
    ]
    assert not (tmp_path / "out").exists()


def test_a_mix_is_taken_as_it_is(mixed, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(StoreError, match=r"no mix 'rnd', only exorl8.*give folders as a list"):
        pack("rnd", out, domain="cartpole")
    for changes in ({"episodes": 1}, {"select": "last"}):
        with pytest.raises(StoreError, match="leave out episodes and select"):
            pack("small", out, domain="cartpole", **changes)
    with pytest.raises(TaskError, match="unknown domain 'hopper'"):
        pack("small", out, domain="hopper")
    for both in ({}, {"mix": "small", "sources": (mixed / "rnd",)}):
        with pytest.raises(ValueError, match="either --sources or --mix"):
            pack_script(Pack(domain="cartpole", out=out, **both))


def maze_episodes(folder, count, rewards):
    rng = np.random.default_rng(0)
    for i in range(count):
        widths = dict(zip(FIELDS, (4, 2, rewards, 1, 4), strict=True))
        arrays = {n: rng.uniform(-1, 1, (6, w)).astype(DTYPES[n]) for n, w in widths.items()}
        episodes.write(folder, i, Episode(**arrays))
    return folder


def test_the_mazes_four_recorded_rewards_are_kept(tmp_path):
    four = maze_episodes(tmp_path / "four", 2, rewards=4)
    store = pack([four], tmp_path / "store", domain="point_mass_maze")
    assert store.field("reward").shape == (12, 4) and store[1].reward.shape == (6, 4)
    one = maze_episodes(tmp_path / "one", 1, rewards=1)
    with pytest.raises(EpisodeError, match=r"1 recorded rewards a step.* before have 4"):
        pack([four, one], tmp_path / "both", domain="point_mass_maze")
    both = pack([four, one], tmp_path / "both", domain="point_mass_maze", skip_bad=True)
    assert len(both) == 2 and "stores of their own" in both.index["skipped"][0]["reason"]
