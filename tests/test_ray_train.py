"""Ray Train over offbeat: the example on a local Ray of two processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray.train", reason="pip install 'offbeat[ray-train]'")

pytestmark = [pytest.mark.real, pytest.mark.frameworks, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[1]
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15, as it is by default: on a busy machine they would starve
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",  # after 60 it would begin again, and again
    "RAY_memory_monitor_refresh_ms": "0",
    "OMP_NUM_THREADS": "1",
}


def ended(script: Path, folder: Path) -> tuple[int, str]:
    """Its exit status and what it says; all that it starts ends with it."""
    process = subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, **QUIET, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        words, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, words


def test_the_example_learns_on_a_local_ray(tmp_path: Path) -> None:
    code, words = ended(ROOT / "examples/10_ray_train.py", tmp_path)
    found = re.search(r"^workers 2   test accuracy (\S+)%$", words, re.MULTILINE)
    assert code == 0, words
    assert found is not None, words
    assert float(found[1]) > 90


def test_a_model_that_ray_has_wrapped_is_refused_with_what_to_change(tmp_path: Path) -> None:
    text = (ROOT / "examples/10_ray_train.py").read_text()
    script = tmp_path / "wrapped.py"
    script.write_text(
        text.replace("prepare_model(model, parallel_strategy=None)", "prepare_model(model)")
    )
    assert script.read_text() != text
    code, words = ended(script, tmp_path)
    assert code != 0
    assert "model is wrapped in DistributedDataParallel, which reduces gradients itself" in words
