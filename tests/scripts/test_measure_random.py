"""The zeros of normalised scores."""

import subprocess
import sys

import pytest

from exorl.tasks import task
from scripts import measure_random


def test_it_measures_what_the_table_has(capsys):
    """With few episodes, so within the interval of few: three times that of the mean."""
    measure_random.main(("cartpole_balance", "cartpole_swingup_sparse"), episodes=4)
    balance, sparse = capsys.readouterr().out.splitlines()
    name, mean, _, half_width, *_ = balance.split()
    assert name == "cartpole_balance" and balance.endswith("(4 episodes)")
    assert abs(float(mean) - task(name).random_return) < 3 * float(half_width)
    assert sparse.split()[:4] == ["cartpole_swingup_sparse", "0.00", "±", "0.00"]


def test_too_few_episodes_for_an_interval_are_the_users_mistake():
    command = (sys.executable, "-m", "scripts.measure_random", "--episodes", "1")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "exoring: error: episodes is 1, expected at least 2: one has no interval\n"
    )


def test_no_interval_is_measured_of_nothing():
    with pytest.raises(ValueError, match="episodes is 0"):
        measure_random.main(episodes=0)
