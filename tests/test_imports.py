"""The rooms and who may import whom; heavy libraries in one module each."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"ring", "exorl", "data", "agent", "scripts"}
ALLOWED = {
    "ring": set(),
    "exorl": set(),
    "data": {"exorl", "ring.layout"},
    "agent": {"exorl", "ring", "data"},
    "scripts": OURS,
}
CONFINED = {
    "orbax": {"agent/checkpoint.py"},
    "tensorboard": {"agent/metrics.py"},
    "matplotlib": {"agent/report.py"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(room: str) -> list[Path]:
    found = sorted((ROOT / room).rglob("*.py"))
    assert found
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_flow_one_way(room):
    for path in files(room):
        for name in imported(path):
            if name.split(".")[0] in OURS - {room}:
                allowed = any(f"{name}.".startswith(f"{each}.") for each in ALLOWED[room])
                assert allowed, f"{path.relative_to(ROOT)} imports {name}"


@pytest.mark.parametrize("library", CONFINED)
def test_heavy_imports_live_in_one_module(library):
    for room in ALLOWED:
        for path in files(room):
            if any(name.split(".")[0] == library for name in imported(path)):
                assert str(path.relative_to(ROOT)) in CONFINED[library]


def test_simulators_are_imported_only_by_exorl():
    for room in set(ALLOWED) - {"exorl"}:
        for path in files(room):
            assert not {n.split(".")[0] for n in imported(path)} & {"mujoco", "dm_control"}, path


def test_the_installed_packages_are_this_checkout():
    import ring

    assert Path(ring.__file__).is_relative_to(ROOT)
