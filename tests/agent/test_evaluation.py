"""Evaluation in dm_control: contexts, determinism, bookkeeping of returns."""

import dataclasses

import numpy as np
import pytest

from agent import checkpoint, evaluation, training
from agent import policy as policies
from agent.checkpoint import Agent
from agent.config import MeshConfig, ModelConfig, TrainConfig
from agent.evaluation import Result
from agent.rollout import rollout
from agent.sharding import make_mesh
from data.batches import Batch
from data.normalize import Normalizer
from data.pool import Pool
from exorl import EpisodeStore, Simulation

RUN, BACK = "cheetah_run", "cheetah_run_backward"
COARSE = ModelConfig(chunk=50, layers=1, width=16, heads=2)  # 20 steps an episode


def trained(config: TrainConfig, **changes) -> tuple[Agent, Pool]:
    training.train(config)
    acting = dataclasses.replace(config, **changes)
    agent = checkpoint.load(config.run, acting, make_mesh(acting.mesh))
    pool = Pool.load(EpisodeStore(config.data.store), config.data.tasks, config.data.holdout)
    return agent, pool


def test_a_hidden_task_under_every_context(config):
    made = config(
        tasks=(RUN, BACK),
        model=COARSE,
        data={"trajectories": 2, "fixed": True},
    )
    agent, pool = trained(made)
    contexts = evaluation.contexts_of(agent)
    results = evaluation.evaluate(agent, pool, contexts=contexts, rollouts=2, seed=3)
    cells = {(r.task, r.context, r.chain, r.episode) for r in results}
    expected = {(t, "self", c, e) for t in (RUN, BACK) for c in (0, 1) for e in (0, 1)}
    expected |= {
        (t, x, c, 0) for t in (RUN, BACK) for x in ("dataset", "wrong_task") for c in (0, 1)
    }
    assert cells == expected and len(results) == len(cells)
    for each in results:
        assert 0 <= each.episode_return <= 1000
        assert each.percent == pytest.approx(
            100 * each.episode_return / pool.best_return(each.task), rel=1e-6
        )
    assert results == evaluation.evaluate(agent, pool, contexts=contexts, rollouts=2, seed=3)


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
        context = evaluation.draw_context(agent, pool, RUN, rollouts=2, count=2, seed=0, target=1.0)
        policy = policies.make(agent, batch=2, steps=context.order.shape[1], context=context)
        replayed = []
        for step in range(context.order.shape[1]):
            now = Batch(*(array[:, step : step + 1] for array in context))
            replayed.append(policy.act(now))
            policy.record(now)
        actions.append(np.stack(replayed))
    np.testing.assert_allclose(actions[0], actions[1], atol=1e-5)


def test_contexts_come_from_held_out_episodes_of_the_shown_task(config):
    agent, pool = trained(config(tasks=(RUN, BACK), model=COARSE, steps=2, data={"fixed": True}))
    batch = evaluation.draw_context(agent, pool, BACK, rollouts=3, count=2, seed=0, target=1.0)
    np.testing.assert_allclose(batch.return_to_go[batch.timestep == 0], 1.0, rtol=1e-6)
    starts = {agent.normalizer(pool.store[e].observation[0]).tobytes() for e in pool.held_out}
    seen = {row.tobytes() for row in batch.observation[batch.timestep == 0]}
    assert seen <= starts
    earned = np.array(
        [
            [batch.reward[row][batch.trajectory[row] == i].sum() for i in range(2)]
            for row in range(3)
        ]
    )
    assert np.all(np.diff(earned, axis=1) >= 0)


def test_baselines_take_no_context(config):
    agent, pool = trained(config(method="bc", model=ModelConfig(chunk=50, width=16), steps=2))
    results = evaluation.evaluate(agent, pool, contexts=("self",), rollouts=2)
    assert {(r.chain, r.episode) for r in results} == {(c, e) for c in (0, 1) for e in range(3)}
    with pytest.raises(ValueError, match="takes no context"):
        evaluation.evaluate(agent, pool, contexts=("dataset",), rollouts=2)


class Recorder:
    """Acts by a fixed rule and keeps all it was shown."""

    def __init__(self, chunk: int) -> None:
        self.chunk, self.seen = chunk, []

    def act(self, step: Batch) -> np.ndarray:
        rows = step.order.shape[0]
        wave = np.sin(np.arange(6 * self.chunk) + step.timestep[0, 0])
        return np.tile(wave.astype(np.float32), (rows, 1))

    def record(self, step: Batch) -> None:
        self.seen.append(step)


def test_a_rollout_shows_the_policy_what_training_showed_it():
    """Returns-to-go fall by the true rewards; an episode's end enters the next one's start."""
    policy, chunk = Recorder(300), 300  # 300, 300, 300 and 100 steps
    seeds = evaluation.episode_seeds(0, rollouts=2, episodes=2)
    identity = Normalizer(np.zeros(17, np.float32), np.ones(17, np.float32))
    returns = rollout(policy, RUN, seeds, normalizer=identity, chunk=chunk, scale=50.0, target=2.0)
    assert returns.shape == (2, 2) and len(policy.seen) == 8
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


def test_csv_round_trip(tmp_path):
    results = [
        Result("at", 0, RUN, "self", chain, episode, 12.25 * chain, 100 / 3)
        for chain in range(2)
        for episode in range(3)
    ]
    path = tmp_path / "deep" / "results.csv"
    evaluation.write_csv(path, results)
    assert evaluation.read_csv(path) == results
    assert [each.name for each in path.parent.iterdir()] == ["results.csv"]


def test_seeds_are_a_function_of_chain_and_episode():
    seeds = evaluation.episode_seeds(7, 3, 4)
    assert len(set(seeds.ravel().tolist())) == 12
    np.testing.assert_array_equal(evaluation.episode_seeds(7, 2, 2), seeds[:2, :2])
