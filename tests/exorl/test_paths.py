from pathlib import Path

from exorl.paths import home


def test_home_is_chosen_by_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("EXORING_HOME", str(tmp_path))
    assert home() == tmp_path
    monkeypatch.delenv("EXORING_HOME")
    assert home() == Path.home() / ".cache" / "exoring"
