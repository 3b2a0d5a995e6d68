"""Commands side by side."""

import sys

import pytest

from exorl.parallel import cores
from scripts import jobs

SHOWS_CORES = "from exorl.parallel import cores; print('on', cores())"


def test_each_process_has_one_of_the_cores_that_there_are(tmp_path, monkeypatch):
    last = cores()[-1]
    monkeypatch.setattr(jobs.parallel, "cores", lambda: [last])
    work = [jobs.Job(name, ((sys.executable, "-c", SHOWS_CORES),)) for name in ("a", "b")]
    jobs.run(work, 2, tmp_path / "logs", tmp_path / "compiled")
    for name in ("a", "b"):
        assert f"on [{last}]" in (tmp_path / "logs" / f"{name}.log").read_text()


def test_a_failure_ends_with_its_log(tmp_path):
    fails = jobs.Job("fails", ((sys.executable, "-c", "raise SystemExit('the reason')"),))
    with pytest.raises(RuntimeError, match=r"fails failed; (.|\n)*the reason"):
        jobs.run([fails], 1, tmp_path / "logs", tmp_path / "compiled")


@pytest.mark.parametrize("at_once", [0, -1])
def test_no_process_at_a_time_is_refused(tmp_path, at_once):
    with pytest.raises(ValueError, match=f"jobs is {at_once}, expected at least 1"):
        jobs.run([], at_once, tmp_path / "logs", tmp_path / "compiled")
    assert not list(tmp_path.iterdir())
