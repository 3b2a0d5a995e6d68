"""Evaluation in dm_control: contexts, targets, determinism, bookkeeping of returns."""

import dataclasses

import jax
import numpy as np
import pytest

from agent import checkpoint, evaluation, networks, results, training
from agent import policy as policies
from agent.checkpoint import Agent
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.evaluation import Evaluation
from agent.history import History, packed
from agent.protocol import Protocol
from agent.results import Cell, Result
from agent.rollout import rollout
from agent.sharding import make_mesh
from data.batches import Batch, place
from data.batches import positions as positions_of
from data.normalize import Normalizer
from data.pool import Pool
from exorl import EpisodeStore, Simulation
from ring.layout import inverse

RUN, BACK = "cheetah_run", "cheetah_run_backward"
COARSE = ModelConfig(chunk=50, layers=1, width=16, heads=2)  # 20 steps an episode


def trained(config: TrainConfig, **changes) -> tuple[Agent, Pool]:
    training.train(config)
    acting = dataclasses.replace(config, **changes)
    agent = checkpoint.load(config.run, acting, make_mesh(acting.mesh))
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    return agent, pool


def run(rollouts: Evaluation, *protocols: Protocol, finished=()) -> list[Cell]:
    return [cell for cells in rollouts.run(rollouts.plan(protocols, finished)) for cell in cells]


def test_a_hidden_task_under_every_context(config, whole_store):
    data = {"store": whole_store.path, "trajectories": 2, "fixed": True}
    made = config(tasks=(RUN, BACK), model=COARSE, data=data)
    agent, pool = trained(made)
    names = evaluation.contexts_of(agent)
    assert names == ("self", "dataset_sorted", "wrong_task")
    rollouts = Evaluation(agent, pool, chains=2, seed=3)
    protocols = [Protocol(name, 2) for name in (*names, "self_resorted", "empty", "mixed")]
    found = run(rollouts, *protocols)
    cells = {(r.task, r.context, r.chain, r.episode) for r in results.flat(found)}
    both = [(t, c) for t in (RUN, BACK) for c in (0, 1)]
    expected = {(t, x, c, e) for t, c in both for x in ("self", "self_resorted") for e in (0, 1)}
    for name in ("dataset_sorted", "wrong_task", "empty", "mixed"):
        expected |= {(t, name, c, 0) for t, c in both}
    rows = results.flat(found)
    assert cells == expected and len(rows) == len(cells)
    for each in rows:
        assert 0 <= each.episode_return <= 1000
        attainable = pool.best_return(each.task)
        assert each.percent == pytest.approx(100 * each.episode_return / attainable, rel=1e-6)
        assert each.target >= attainable * (1 - 1e-9)
    first = {r.context: r.episode_return for r in rows if r[2] == RUN and r.chain == r.episode == 0}
    assert first["empty"] == first["self"] == first["self_resorted"]  # nothing precedes
    again = run(rollouts, *protocols)
    assert [c.returns for c in again] == [c.returns for c in found]
    assert not rollouts.plan(protocols, found)
    left = rollouts.plan(protocols, [c for c in found if c.protocol["context"] != "empty"])
    assert {group.protocol.context for group in left} == {"empty"}


@pytest.mark.slow
def test_one_checkpoint_acts_alike_around_a_ring_and_on_one_device(config):
    """The same actions within 1e-5 on replayed observations, context included."""
    ring = config(
        tasks=(RUN, BACK), model=COARSE, mesh=MeshConfig(data=2, ring=4), data={"fixed": True}
    )
    sharded, pool = trained(ring)
    bpt = dataclasses.replace(COARSE, memory="bpt")
    whole, _ = trained(ring, model=bpt, mesh=MeshConfig())
    actions = []
    for agent in (sharded, whole):
        protocol, scale = Protocol("dataset_sorted", 3), agent.best_returns[RUN]
        rows = [protocol.draw(pool, RUN, scale, chain, seed=0) for chain in range(2)]
        context = packed(agent, rows, [1.0, 1.0])
        policy = policies.ChainPolicy(agent, batch=2, steps=context.order.shape[1])
        policy.remember(context)
        replayed = []
        for step in range(context.order.shape[1]):
            now = Batch(*(array[:, step : step + 1] for array in context))
            replayed.append(policy.act(now))
            policy.record(now)
        actions.append(np.stack(replayed))
    np.testing.assert_allclose(actions[0], actions[1], atol=1e-5)


@pytest.fixture
def pool(config) -> Pool:
    made = config(tasks=(RUN, BACK))
    return Pool.load(EpisodeStore(made.data.store), made.data.tasks, 0.5)


def returns_of(pool: Pool, protocol: Protocol, chain: int = 0) -> list[float]:
    drawn = protocol.draw(pool, RUN, pool.best_return(RUN), chain, seed=0)
    return [each.episode_return for each in drawn]


def test_where_contexts_come_from_and_how_they_are_arranged(pool):
    scale = pool.best_return(RUN)
    there = np.sort(pool.returns[RUN][pool.held_out]) / scale
    by = {
        name: returns_of(pool, Protocol(name, 4))
        for name in ("dataset_sorted", "dataset_shuffled", "dataset_topk", "dataset_bottomk")
    }
    assert by["dataset_sorted"] == sorted(by["dataset_sorted"]) == sorted(by["dataset_shuffled"])
    np.testing.assert_allclose(by["dataset_topk"], there[-3:], rtol=1e-6)
    np.testing.assert_allclose(by["dataset_bottomk"], there[:3], rtol=1e-6)
    shuffled = [returns_of(pool, Protocol("dataset_shuffled", 4), chain) for chain in range(5)]
    assert any(each != sorted(each) for each in shuffled)
    assert len({tuple(sorted(each)) for each in shuffled}) > 1  # chains have their own
    assert len(returns_of(pool, Protocol("mixed", 5))) == 2
    assert not returns_of(pool, Protocol("self", 4))
    assert not returns_of(pool, Protocol("dataset_topk", 1))
    held_out = {pool.store[int(e)].observation[0].tobytes() for e in pool.held_out}
    for source, inside in (("held_out", True), ("training", False)):
        drawn = Protocol("dataset_sorted", 4, source=source).draw(pool, BACK, 1.0, 0, seed=1)
        assert all((each.observation[0].tobytes() in held_out) == inside for each in drawn)


def test_targets(pool):
    scale = pool.best_return(RUN)
    context = Protocol("dataset_topk", 3).draw(pool, RUN, scale, 0, seed=0)
    best = context[-1].episode_return

    def goal(context=context, **changes) -> float:
        return Protocol("dataset_topk", 3, **changes).goal(pool, RUN, scale, context)

    assert goal() == max(1.0, best) and goal(context=[]) == 1.0
    assert goal(target="context") == best
    assert goal(target="dataset") == pytest.approx(pool.returns[RUN].max() / scale)
    assert goal(target="task") == pytest.approx(1000 / scale)
    assert goal(target=500.0, multiplier=2.0) == pytest.approx(1000 / scale)
    with pytest.raises(ValueError, match=r"below the best of the context.*--allow-low-target"):
        goal(target="context", multiplier=0.5)
    assert goal(target="context", multiplier=0.5, allow_low_target=True) == best / 2


@pytest.mark.parametrize(
    ("protocol", "match"),
    [
        (Protocol("self", 4), r"n=4, but .* at most 3 trajectories.*--extrapolate"),
        (Protocol("wrong_task", 2), "a wrong task needs a hidden group"),
        (Protocol("dataset_sorted", 0), "must be at least 1, got n=0"),
        (Protocol("dataset_sorted", 40, extrapolate=True), "39 held-out episodes cannot be drawn"),
        (Protocol("mixed", 2), r"episode 4 of .* has 83 steps, those .* have 1000, and"),
        (Protocol("self", 3, target="context"), "holds no episodes to take a target from"),
        (Protocol("self", 3, multiplier=0.0), "must be a positive return"),
        (Protocol("self", 3, episodes=0), "episodes=0"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(config, protocol, match):
    made = config()
    pool = Pool.load(EpisodeStore(made.data.store), made.data.tasks)
    with pytest.raises(ValueError, match=match):
        protocol.check(made, pool)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("packing", "positions", "protocol"),
    [
        ("step", "learned", Protocol("self", 3)),
        ("rsar", "rotary", Protocol("mixed", 3)),
        ("rsard", "global", Protocol("self", 3)),
        ("step", "rotary", Protocol("dataset_sorted", 3)),
    ],
)
def test_the_training_path_predicts_the_actions_of_a_rollout(config, packing, positions, protocol):
    """All episodes of two chains, packed as training chains are, in one full forward pass."""
    model = dataclasses.replace(COARSE, packing=packing, positions=positions)
    agent, pool = trained(config(model=model, mesh=MeshConfig(ring=2), steps=2))
    scale = agent.best_returns[RUN]
    contexts = [protocol.draw(pool, RUN, scale, chain, seed=0) for chain in range(2)]
    targets = np.array([protocol.goal(pool, RUN, scale, context) for context in contexts])
    policy = policies.ChainPolicy(agent, batch=2, steps=20 * protocol.own)
    rolled = rollout(
        agent,
        policy,
        Simulation(RUN, 2),
        np.arange(2 * protocol.own).reshape(2, -1),
        scale=scale,
        history=History(agent, policy, protocol, targets, contexts),
    )
    own = zip(*rolled.trajectories, strict=True)
    rows = [[*context, *done] for context, done in zip(contexts, own, strict=True)]
    whole = packed(agent, rows, targets)
    steps = whole.order.shape[1]
    with jax.set_mesh(agent.mesh):
        network = networks.assemble(agent.structure, agent.parameters)
        predicted = np.asarray(jax.jit(lambda batch: network(batch))(place(whole, agent.mesh)))
    predicted = predicted[:, inverse(positions_of(steps, 2, "zigzag"))][:, :steps]
    first = steps - 20 * protocol.own
    np.testing.assert_allclose(whole.action[:, first:], predicted[:, first:], atol=1e-5)


def test_learned_positions_do_not_extrapolate(config):
    made = config(model=dataclasses.replace(COARSE, positions="learned"))
    pool = Pool.load(EpisodeStore(made.data.store), made.data.tasks)
    with pytest.raises(ValueError, match="learned 3 positions"):
        Protocol("self", 4, extrapolate=True).check(made, pool)


@pytest.mark.parametrize(
    ("method", "packing"),
    [
        ("bc", "step"),
        pytest.param("dt", "rsa", marks=pytest.mark.slow),
        pytest.param("dt_long", "rsa", marks=pytest.mark.slow),
    ],
)
def test_baselines_take_no_context(config, method, packing):
    model = ModelConfig(packing=packing, chunk=20, layers=1, width=16, heads=2, memory="plain")
    agent, pool = trained(config(method=method, model=model, data={"window": 4}, steps=2))
    higher = Protocol("self", 5, multiplier=2.0, share_prefix=True)
    found = results.flat(run(Evaluation(agent, pool, chains=2), higher))
    assert {(r.chain, r.episode) for r in found} == {(c, e) for c in (0, 1) for e in range(5)}
    assert {r.labels for r in found} == {""}  # they share no prefix, for they have none
    with pytest.raises(ValueError, match="takes no context"):
        Evaluation(agent, pool).plan([Protocol("dataset_sorted", 2)])
    with pytest.raises(ValueError, match="holds no episodes to take a target from"):
        Evaluation(agent, pool).plan([Protocol("self", 2, target="context")])


class Recorder:
    """Acts by a fixed rule and keeps all it was shown and told to know."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.seen, self.told = chunk, [], []

    def act(self, step: Batch) -> np.ndarray:
        rows = step.order.shape[0]
        wave = np.sin(np.arange(6 * self.chunk) + step.timestep[0, 0] + 9 * step.trajectory[0, 0])
        return np.tile(wave.astype(np.float32), (rows, 1))

    def record(self, step: Batch) -> None:
        self.seen.append(step)

    def remember(self, context: Batch | None) -> None:
        self.told.append(context)

    def forget(self, before: int) -> None:
        self.told.append(before)


def untrained(config, **changes) -> Agent:
    made = config(model=ModelConfig(chunk=300, **changes))  # 300, 300, 300 and 100 steps
    identity = Normalizer(np.zeros(17, np.float32), np.ones(17, np.float32))
    return Agent(made, None, None, identity, {RUN: 50.0}, None, 0)  # type: ignore[arg-type]


def recorded(config, protocol: Protocol, targets: np.ndarray, context=(), **changes):
    agent, policy = untrained(config, **changes), Recorder(300)
    seeds = np.concatenate(
        [evaluation.episode_seeds(0, chain, 1, protocol.own) for chain in range(len(targets))]
    )
    rolled = rollout(
        agent,
        policy,
        Simulation(RUN, len(targets)),
        seeds,
        scale=50.0,
        history=History(agent, policy, protocol, targets, list(context)),
    )
    return policy, rolled, seeds


def test_a_rollout_shows_the_policy_what_training_showed_it(config):
    """Returns-to-go fall by the true rewards; an episode's end enters the next one's start."""
    policy, rolled, seeds = recorded(config, Protocol("self", 2), np.array([2.0, 2.0]))
    returns = rolled.returns
    assert returns.shape == (2, 2) and len(policy.seen) == 8 and policy.told == [None]
    # Times the steps of an episode, over 4: here the same.
    earned = np.stack([step.reward[:, 0, 0] for step in policy.seen])
    np.testing.assert_allclose(earned[:4].sum(axis=0) * 50, returns[:, 0], rtol=1e-5)
    for index, step in enumerate(policy.seen):
        before = earned[index - index % 4 : index].sum(axis=0)
        np.testing.assert_allclose(step.return_to_go[:, 0, 0], 2.0 - before, rtol=1e-5)
        assert step.timestep.tolist() == [[index % 4]] * 2
        assert step.trajectory.tolist() == [[index // 4]] * 2
        if index:
            last = policy.seen[index - 1]
            np.testing.assert_array_equal(step.previous_reward, last.reward)
            np.testing.assert_array_equal(step.previous_action, last.action)
    assert not policy.seen[3].action[:, 0, 600:].any()  # beyond the time limit nothing is done

    simulation = Simulation(RUN, 2)
    start = simulation.reset([int(seed) for seed in seeds[:, 1]]).observation
    np.testing.assert_array_equal(policy.seen[4].observation[:, 0], start)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(start[0], start[1])


def test_a_full_sequence_evicts_its_oldest_trajectory(config):
    protocol = Protocol("self", 2, episodes=4)
    policy, rolled, _ = recorded(config, protocol, np.array([2.0]))
    assert policy.told == [None, 4, 8]  # before the third and the fourth episode
    assert rolled.evicted.tolist() == [False, False, True, True]
    assert [step.trajectory[0, 0] for step in policy.seen[::4]] == [0, 1, 2, 3]  # rotary: relative


def test_trajectories_that_are_each_alone_are_all_evicted(config):
    """Learned indices end, and one that is given twice must not join two trajectories."""
    protocol, alone = Protocol("self", 2, episodes=4), {"cross_episode": False}
    policy, rolled, _ = recorded(config, protocol, np.array([2.0]), positions="learned", **alone)
    assert policy.told == [None, 8, 12]  # before the third and the fourth: all there is
    assert [step.trajectory[0, 0] for step in policy.seen[::4]] == [0, 1, 1, 1]
    assert not rolled.evicted.any()


def test_or_is_computed_anew_without_it(config):
    protocol = Protocol("self", 2, episodes=3, beyond="reprefill")
    policy, rolled, _ = recorded(config, protocol, np.array([2.0]))
    assert policy.told[0] is None and not rolled.evicted.any()
    (context,) = policy.told[1:]
    whole = Batch(
        *(np.concatenate(arrays, axis=1) for arrays in zip(*policy.seen[4:8], strict=True))
    )
    for name in ("return_to_go", "observation", "action", "reward", "completion", "timestep"):
        np.testing.assert_allclose(
            getattr(context, name), getattr(whole, name), rtol=1e-5, atol=1e-6
        )
    assert (context.trajectory == 0).all() and policy.seen[8].trajectory[0, 0] == 1
    np.testing.assert_array_equal(policy.seen[8].previous_reward, policy.seen[7].reward)


def test_resorted_episodes_ascend_and_a_beaten_target_rises(config):
    """The recorder earns something else in each episode, more than is asked for."""
    protocol = Protocol("self_resorted", 3, stale="reprefill")
    policy, rolled, _ = recorded(config, protocol, np.array([1e-3, 1e-3]))
    units = rolled.returns / 50
    assert not rolled.stale.any()
    np.testing.assert_allclose(rolled.targets[:, 1], units[:, 0])
    np.testing.assert_allclose(rolled.targets[:, 2], units[:, :2].max(axis=1))
    context = policy.told[2]
    for row in range(2):
        starts = context.return_to_go[row][context.timestep[row] == 0, 0]
        np.testing.assert_allclose(starts, units[row, :2].max(), rtol=1e-5)
        earned = [context.reward[row][context.trajectory[row] == i].sum() for i in range(2)]
        np.testing.assert_allclose(earned, np.sort(units[row, :2]), rtol=1e-4)
    kept, rolled, _ = recorded(config, Protocol("self", 3), np.array([1e-3]))
    assert rolled.stale.tolist() == [[False, True, True]] and kept.told == [None]


def test_labels_and_files(config, whole_store, tmp_path):
    """What is written is read back; a line torn by a crash is left out and its cell done again."""
    agent, pool = trained(config(model=COARSE, steps=2, data={"store": whole_store.path}))
    rollouts = Evaluation(agent, pool, "2@now", chains=2)
    low = Protocol("dataset_topk", 2, target="context", multiplier=0.5, allow_low_target=True)
    sliding = Protocol("self", 4, episodes=5, extrapolate=True)
    found = run(rollouts, low, sliding)
    labels = [r.labels for r in results.flat(found)]
    assert labels[:2] == ["low_target"] * 2
    assert labels[2] == "extrapolated" and labels[6] in (
        "extrapolated+evicted",
        "extrapolated+stale+evicted",
    )
    path = tmp_path / "deep" / "cells.jsonl"
    results.append(path, found[:3])
    path.write_text(path.read_text()[:-40])
    assert results.read(path) == found[:2]
    (left,) = rollouts.plan([low, sliding], results.read(path))
    assert left.protocol == sliding and left.chains == (0, 1)
    results.append(path, found[2:])
    assert results.read(path) == found


@pytest.mark.slow
def test_one_prefix_serves_all_environments_as_its_copies_would(config, whole_store):
    data = {"multiple": 2, "store": whole_store.path}
    agent, pool = trained(config(model=COARSE, mesh=MeshConfig(data=2, ring=2), data=data, steps=2))
    rollouts = Evaluation(agent, pool, chains=1)
    seen = []
    planned = rollouts.plan([Protocol("dataset_sorted", 3, envs=4)])
    ((shared,),) = rollouts.run(planned, watch=seen.append)
    assert np.array(shared.returns).shape == (4, 1) and len(set(map(tuple, shared.returns))) == 4
    protocol, scale = Protocol("dataset_sorted", 3), agent.best_returns[RUN]
    context = protocol.draw(pool, RUN, scale, 0, seed=0)
    targets = np.full(4, protocol.goal(pool, RUN, scale, context))
    policy = policies.ChainPolicy(agent, batch=4, steps=20)
    rolled = rollout(
        agent,
        policy,
        Simulation(RUN, 4),
        evaluation.episode_seeds(0, 0, 4, 1),
        scale=scale,
        history=History(agent, policy, protocol, targets, [context] * 4),
    )
    for ours, theirs in zip(seen[0].rolled.trajectories[0], rolled.trajectories[0], strict=True):
        np.testing.assert_allclose(ours.action[:200], theirs.action[:200], atol=1e-4)
    np.testing.assert_allclose(
        shared.returns, rolled.returns, rtol=2e-2
    )  # rounding, 1,000 steps on


def test_chains_are_added_to_finished_ones_which_fill_up_the_shards(config):
    made = config(model=COARSE, mesh=MeshConfig(data=2))
    mesh = make_mesh(made.mesh)
    pool = Pool.load(EpisodeStore(made.data.store), made.data.tasks)
    structure, _ = networks.abstract_parameters(made, mesh)
    fresh = checkpoint.initial_state(made, mesh).parameters
    agent = Agent(made, structure, fresh, pool.normalizer(), {RUN: pool.best_return(RUN)}, mesh, 0)
    protocol, few = Protocol("self", 1), Evaluation(agent, pool, chains=2)
    finished = run(few, protocol)
    more = Evaluation(agent, pool, chains=6, together=2)
    assert [group.chains for group in more.plan([protocol], finished)] == [(2, 3), (4, 5)]
    (group,) = few.plan([protocol], finished[1:])
    assert group.chains == (0,) and group.filling == (1,) and group.rows == 2
    (again,) = run(few, protocol, finished=finished[1:])
    assert again.key == finished[0].key
    np.testing.assert_allclose(again.returns, finished[0].returns, rtol=1e-3)


@pytest.mark.parametrize(
    ("rollouts", "envs", "rows"),
    [({"chains": 3}, 1, 3), ({"chains": 4, "together": 3}, 1, 3), ({"chains": 4}, 5, 5)],
)
def test_rollouts_that_do_not_divide_are_refused_before_any(config, rollouts, envs, rows):
    made = config()
    pool = Pool.load(EpisodeStore(made.data.store), made.data.tasks)
    agent = Agent(made, None, None, None, {}, make_mesh(MeshConfig(data=2)), 0)  # type: ignore
    with pytest.raises(ValueError, match=rf"{rows} environments at a time do not divide .* = 2"):
        Evaluation(agent, pool, **rollouts).plan([Protocol("self", 2, envs=envs)])
    last = Evaluation(agent, pool, chains=5, together=2)
    with pytest.raises(ValueError, match="1 environments at a time"):
        last.plan([Protocol("self", 2)])


@pytest.mark.slow
def test_a_prefix_shared_by_targets_is_computed_once(config, whole_store, monkeypatch):
    agent, pool = trained(config(model=COARSE, steps=2, data={"store": whole_store.path}))
    prefilled, prefiller = [], policies._prefiller
    monkeypatch.setattr(
        policies, "_prefiller", lambda mesh: lambda *a: prefilled.append(1) or prefiller(mesh)(*a)
    )
    rollouts = Evaluation(agent, pool, chains=2)
    each = [Protocol("dataset_sorted", 3, multiplier=m) for m in (1.0, 2.0)]
    own = run(rollouts, *each)
    assert len(prefilled) == 2
    shared = run(rollouts, *(dataclasses.replace(p, share_prefix=True) for p in each))
    assert len(prefilled) == 3
    assert [c.labels for c in shared] == [[[""]]] * 2 + [[["shared_prefix"]]] * 2
    np.testing.assert_allclose(shared[0].returns, own[0].returns)
    assert shared[2].targets == own[2].targets


def test_csv_round_trip(tmp_path):
    rows = [
        Result("at", 0, RUN, "self", 4, 1.5, c, 0, e, 12.25 * c, 100.0, 100 / 3, 2 / 3, "a+b")
        for c in range(2)
        for e in range(3)
    ]
    path = tmp_path / "deep" / "results.csv"
    results.write_csv(path, rows)
    assert results.read_csv(path) == rows
    assert [each.name for each in path.parent.iterdir()] == ["results.csv"]


def test_seeds_are_a_function_of_chain_environment_and_episode():
    seeds = np.stack([evaluation.episode_seeds(7, chain, 2, 4) for chain in range(3)])
    assert len(set(seeds.ravel().tolist())) == 24
    np.testing.assert_array_equal(evaluation.episode_seeds(7, 1, 1, 2), seeds[1, :1, :2])
