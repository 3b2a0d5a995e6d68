"""Every command in the README and the guides runs as it is printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MAKE_TARGETS = {"demo", "test", "test-all", "lint", "bench"}


def commands(page: Path) -> list[str]:
    """Lines of the page's bash blocks, continuation lines joined, comments dropped."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("  #")[0].strip() for line in lines if line.strip() and line[0] != "#"]


def test_the_readme_leads_with_the_two_commands():
    found = commands(ROOT / "README.md")
    assert "make demo" in found and "make test" in found


@pytest.mark.parametrize("target", sorted(MAKE_TARGETS))
def test_every_make_target_exists(target):
    subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_python_of_the_guides_runs_as_printed(page, tmp_path):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", block],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert float(done.stdout) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_run_as_printed(page, tmp_path):
    """In the order of the page, in an empty folder; those of make are other tests' work."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "EXORING_HOME": str(tmp_path / "home"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("XLA_FLAGS", None)
    for line in commands(page):
        words = line.split()
        if words[0] == "make":
            assert {word for word in words[1:] if "=" not in word} <= MAKE_TARGETS, line
            continue
        if words[0] in ("git", "cd"):
            continue
        done = subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
