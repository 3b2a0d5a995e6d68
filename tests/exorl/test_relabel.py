import os

import numpy as np
import pytest

from exorl import episodes, relabel
from exorl.episodes import DTYPES, FIELDS, Episode
from exorl.packing import pack
from exorl.rewards import reward
from exorl.store import StoreError
from exorl.tasks import TaskError

LENGTHS = (3, 8, 1, 5)


def make_store(tmp_path, name="store", seed=0):
    """Random states and actions in the shape of cartpole episodes."""
    rng = np.random.default_rng(seed)
    widths = dict(zip(FIELDS, (5, 1, 1, 1, 4), strict=True))
    for index, length in enumerate(LENGTHS):
        fields = {
            field: rng.uniform(-1, 1, (length + 1, width)).astype(DTYPES[field])
            for field, width in widths.items()
        }
        episodes.write(tmp_path / f"{name}_episodes", index, Episode(**fields))
    return pack([tmp_path / f"{name}_episodes"], tmp_path / name, domain="cartpole")


@pytest.mark.parametrize("mode", ["exact", "exorl"])
def test_rewards_are_the_formulas_and_row_0_earns_nothing(tmp_path, monkeypatch, mode):
    monkeypatch.setattr(relabel, "_CHUNK", 4)  # chunks end inside episodes
    store = make_store(tmp_path)
    rewards = relabel.rewards(store, "cartpole_swingup", mode)
    assert rewards.dtype == np.float32 and isinstance(rewards, np.memmap)
    for i, episode in enumerate(store):
        own = rewards[store.offsets[i] : store.offsets[i + 1]]
        fields = episode.observation, episode.action, episode.physics
        expected = reward("cartpole_swingup", *fields, mode=mode)
        np.testing.assert_array_equal(own[1:], expected[1:])
        assert own[0] == 0 and expected[0] > 0


@pytest.mark.parametrize("backend", ["mujoco", "dm_control"])
def test_other_back_ends_share_the_work_and_agree(tmp_path, backend):
    store = make_store(tmp_path)
    rewards = relabel.rewards(store, "cartpole_swingup", backend=backend)
    closed = relabel.rewards(store, "cartpole_swingup")
    np.testing.assert_allclose(rewards, closed, atol=1e-6)
    assert len(list((store.path / "rewards").glob("*.npy"))) == 2


def test_returns_sum_rows_1_to_T(tmp_path, monkeypatch):
    store = make_store(tmp_path)
    rewards = np.random.default_rng(0).uniform(size=int(store.offsets[-1])).astype(np.float32)
    monkeypatch.setattr(relabel, "rewards", lambda *_: rewards)  # row 0 not zero here
    totals = relabel.returns(store, "cartpole_swingup")
    assert totals.dtype == np.float64 and totals.shape == (len(LENGTHS),)
    for i, total in enumerate(totals):
        steps = rewards[store.offsets[i] + 1 : store.offsets[i + 1]]
        assert len(steps) == LENGTHS[i]
        assert total == pytest.approx(steps.sum(dtype=np.float64), abs=1e-12)


def count_computations(monkeypatch):
    calls = []

    def counted(*args, **kwargs):
        calls.append(args[0])
        return reward(*args, **kwargs)

    monkeypatch.setattr(relabel, "reward", counted)
    return calls


def test_a_second_call_reads_the_cache(tmp_path, monkeypatch):
    store, calls = make_store(tmp_path), count_computations(monkeypatch)
    first = relabel.rewards(store, "cartpole_swingup")
    again = relabel.rewards(make_store(tmp_path), "cartpole_swingup")
    np.testing.assert_array_equal(first, again)
    assert len(calls) == 1


def test_modes_and_versions_have_caches_of_their_own(tmp_path, monkeypatch):
    store, calls = make_store(tmp_path), count_computations(monkeypatch)
    exact = relabel.rewards(store, "cartpole_swingup")
    assert not np.array_equal(exact, relabel.rewards(store, "cartpole_swingup", "exorl"))
    monkeypatch.setattr(relabel, "FORMULA_VERSION", 2)
    relabel.rewards(store, "cartpole_swingup")
    assert len(calls) == 3


def test_a_cache_from_another_store_does_not_count(tmp_path, monkeypatch):
    store, other = make_store(tmp_path), make_store(tmp_path, "other", seed=1)
    relabel.rewards(other, "cartpole_swingup")
    os.rename(other.path / "rewards", store.path / "rewards")
    calls = count_computations(monkeypatch)
    relabel.rewards(store, "cartpole_swingup")
    for path in (store.path / "rewards").iterdir():  # and not even under the right name
        right = path.name.replace(other.fingerprint, store.fingerprint)
        if path.name != right:
            os.replace(path, path.with_name(right))
    own = relabel.rewards(store, "cartpole_swingup")
    assert len(calls) == 2
    fields = (store.field(name) for name in ("observation", "action", "physics"))
    np.testing.assert_array_equal(own[1:4], reward("cartpole_swingup", *fields)[1:4])


@pytest.mark.parametrize("name", ["physics", "action"])
def test_a_store_edited_by_hand_is_relabelled_anew(tmp_path, name):
    store = make_store(tmp_path)
    before = np.array(relabel.rewards(store, "cartpole_swingup"))
    changed = np.array(store.field(name))
    changed[1] = 0.9
    np.save(store.path / f"{name}.npy", changed)
    after = relabel.rewards(type(store)(store.path), "cartpole_swingup")
    assert after[1] != before[1]
    np.testing.assert_array_equal(after[2:], before[2:])


@pytest.mark.parametrize("damage", ["no sidecar", "broken sidecar", "no array"])
def test_half_a_cache_does_not_count(tmp_path, monkeypatch, damage):
    store = make_store(tmp_path)
    expected = np.array(relabel.rewards(store, "cartpole_swingup"))
    array, sidecar = sorted((store.path / "rewards").iterdir(), key=lambda path: path.suffix)[::-1]
    assert (array.suffix, sidecar.suffix) == (".npy", ".json")
    if damage == "no sidecar":
        sidecar.unlink()
    elif damage == "broken sidecar":
        sidecar.write_text("{")
    else:
        array.unlink()
    calls = count_computations(monkeypatch)
    np.testing.assert_array_equal(relabel.rewards(store, "cartpole_swingup"), expected)
    assert len(calls) == 1


def test_a_crash_leaves_no_cache(tmp_path, monkeypatch):
    store = make_store(tmp_path)

    def crash(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(relabel, "reward", crash)
    with pytest.raises(KeyboardInterrupt):
        relabel.rewards(store, "cartpole_swingup")
    assert os.listdir(store.path / "rewards") == []


def test_tasks_of_another_domain_are_refused(tmp_path):
    store = make_store(tmp_path)
    with pytest.raises(StoreError, match="holds cartpole episodes, walker_walk is of walker"):
        relabel.rewards(store, "walker_walk")
    with pytest.raises(TaskError, match="did you mean 'cartpole_swingup'"):
        relabel.rewards(store, "cartpole_swing")
