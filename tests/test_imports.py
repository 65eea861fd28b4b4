"""What import-linter cannot say: who may know of torch.distributed."""

from __future__ import annotations

import ast
from pathlib import Path

import offbeat

ROOT = Path(offbeat.__file__).parent
# stand_ins.py: what a user's script finds under that name in a simulation
ALLOWED = {
    *("worlds/real.py", "worlds/gloo.py", "worlds/pool.py", "worlds/store.py", "worlds/own.py"),
    *("worlds/ending.py", "worlds/stand_in.py"),
    *("worlds/current.py", "worlds/gloo_devices.py", "worlds/remote.py"),
    *("lab/stand_ins.py", "launch/job.py"),
    *("doctor/waits.py", "doctor/script.py", "integrations/lightning.py"),
}


def _imports(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_only_the_real_world_knows_torch_distributed() -> None:
    knows = {
        file.relative_to(ROOT).as_posix()
        for file in ROOT.rglob("*.py")
        if any(name.startswith("torch.distributed") for name in _imports(file))
    }
    assert knows <= ALLOWED
    assert "worlds/real.py" in knows  # the test sees something
