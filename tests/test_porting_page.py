"""docs/porting.md: its scripts train, and what its diffs make of them does so in three ways."""

from __future__ import annotations

import atexit
import os
import re
import runpy
import sys
from dataclasses import dataclass
from multiprocessing import connection, get_context
from pathlib import Path

import pytest
import torch
from pool import PRELOADED
from test_docs import FENCE, execute
from test_example import output
from test_simulate import offbeat_command
from torch.distributed import TCPStore

from offbeat.testing import job_variables
from offbeat.testing.running import be_like_a_script

PAGE = (Path(__file__).parents[1] / "docs" / "porting.md").read_text()
HUNK = re.compile(
    r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@\n(.*?)(?=^@@|\Z)", re.MULTILINE | re.DOTALL
)
LIMIT_S = 60.0
WITNESS = """
import hashlib

_state = [t for m in list(vars().values()) if isinstance(m, nn.Module) for t in m.parameters()]
_bytes = b"".join(t.detach().numpy().tobytes() for t in _state)
print(f"fingerprint {hashlib.sha256(_bytes).hexdigest()}")
"""


def patched(text: str, diff: str) -> str:
    """Apply a unified diff, whose every line and number must be right."""
    old, new, at = text.splitlines(), list[str](), 0
    for first, before, to, after, body in HUNK.findall(diff):
        lines = [line or " " for line in body.splitlines()]
        taken = [line[1:] for line in lines if line[0] in " -"]
        made = [line[1:] for line in lines if line[0] in " +"]
        here = int(first) - 1
        new += old[at:here]
        assert len(new) == int(to) - 1
        assert (len(taken), len(made)) == (int(before or 1), int(after or 1))
        assert old[here : here + len(taken)] == taken
        new += made
        at = here + len(taken)
    assert at, f"no hunk in {diff!r}"
    return "\n".join(new + old[at:]) + "\n"


@dataclass(frozen=True)
class Blocks:
    """The code on the page."""

    scripts: dict[str, str]
    """By name; the name is in the diff that follows."""
    ported: dict[str, str]
    """By name and number: what the first diff makes of it, and what the next makes of that."""
    recipes: list[tuple[int, str]]
    """The python blocks behind all diffs, each with its line: one program."""


def blocks(page: str) -> Blocks:
    """A script is a python block that diffs follow."""
    scripts, ported = dict[str, str](), dict[str, str]()
    code = list[tuple[int, str]]()
    for match in FENCE.finditer(page):
        if match[1] == "python":
            code.append((page.count("\n", 0, match.start(2)), match[2]))
        elif match[1] == "diff":
            named = re.match(r"--- (\S+)\.py\n\+\+\+ \1\.py\n", match[2])
            assert named, match[2]
            name = named[1]
            if name not in scripts:
                scripts[name] = code.pop()[1]
                assert not code, "each script is followed by its diffs"
                text, number = scripts[name], 0
            text, number = patched(text, match[2]), number + 1
            ported[f"{name}-{number}"] = text
    return Blocks(scripts, ported, code)


BLOCKS = blocks(PAGE)


# --- running them --------------------------------------------------------------------------


def ran(text: str, workers: int, folder: Path) -> list[str]:
    """What each rank prints, in fresh processes that find what torchrun tells; alone: nothing.

    They are forked from a server that has imported torch, which takes longer than the scripts.
    """
    script = folder / "train.py"
    script.write_text(text + WITNESS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    forking = get_context("forkserver")
    forking.set_forkserver_preload(PRELOADED)
    printed = [folder / f"printed-{rank}" for rank in range(workers)]
    variables = [job_variables(rank, workers, store.port) for rank in range(workers)]
    children = [
        forking.Process(target=_be, args=(script, variables[rank] if workers > 1 else {}, file))
        for rank, file in enumerate(printed)
    ]
    for child in children:
        child.start()
    for child in children:
        connection.wait([child.sentinel], LIMIT_S)
    for child in children:
        child.kill()  # nothing, if it has ended
        child.join()
    said = [file.read_text() for file in printed]
    assert [child.exitcode for child in children] == [0] * workers, "\n".join(said)
    return said


def _be(script: Path, variables: dict[str, str], printed: Path) -> None:
    """Be `python train.py`, with what it prints in a file."""
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = [str(script)]
    os.environ.update(variables)
    os.chdir(script.parent)
    be_like_a_script()
    runpy.run_path(str(script), run_name="__main__")
    atexit._run_exitfuncs()  # children of multiprocessing leave them out
    sys.stdout.flush()


def losses(printed: str) -> list[float]:
    return [float(each) for each in re.findall(r"\bloss (\d+\.\d+)", printed)]


def check(printed: list[str]) -> None:
    """Worker 0 has seen the loss fall, and all hold the same bits."""
    first, *_, last = losses(printed[0])
    assert last < 0.7 * first
    fingerprints = [re.findall(r"^fingerprint (\w+)$", each, re.MULTILINE) for each in printed]
    assert [len(each) for each in fingerprints] == [1] * len(printed)
    assert fingerprints == fingerprints[:1] * len(printed)


@pytest.mark.real
@pytest.mark.parametrize("name", BLOCKS.scripts)
def test_a_script_of_the_page_trains_under_ddp(name: str, tmp_path: Path) -> None:
    check(ran(BLOCKS.scripts[name], 2, tmp_path))


@pytest.mark.real
@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("name", BLOCKS.ported)
def test_what_its_diff_makes_of_it_trains_on_processes(
    name: str, workers: int, tmp_path: Path
) -> None:
    check(ran(BLOCKS.ported[name], workers, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS.ported)
def test_what_its_diff_makes_of_it_trains_in_virtual_time(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(BLOCKS.ported[name] + WITNESS)
    result = offbeat_command("simulate", script, "--cluster", "half-speed-4", "--verbose")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    heads = [f"[{rank}] " for rank in range(4)]
    check(["\n".join(it.removeprefix(h) for it in lines if it.startswith(h)) for h in heads])


@pytest.mark.real
def test_torchrun_itself_runs_the_first_script_ported(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(BLOCKS.ported["plain-1"].replace('"model.pt"', f'"{tmp_path / "model.pt"}"'))
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    first, last = losses(output(*torchrun, "--nproc-per-node", "2", str(script)))
    assert last < 0.7 * first
    assert "0.weight" in torch.load(tmp_path / "model.pt")


def test_the_recipes_behind_the_diffs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert BLOCKS.recipes
    execute(BLOCKS.recipes, "docs/porting.md")


# --- what applies them ---------------------------------------------------------------------


def test_there_are_five_scripts_and_each_is_ported() -> None:
    assert list(BLOCKS.scripts) == ["plain", "accumulation", "gan", "epochs", "rate"]
    assert {name.partition("-")[0] for name in BLOCKS.ported} == set(BLOCKS.scripts)
    assert not any("DistributedDataParallel" in text for text in BLOCKS.ported.values())


@pytest.mark.parametrize(
    ("what", "by"),
    [
        ("\n two", "\n twp"),
        ("-1,3", "-1,2"),
        ("-1,3", "-2,3"),
        ("+1,3", "+2,3"),
        ("@@ -", "@ -"),
    ],
)
def test_a_diff_that_does_not_fit_is_found(what: str, by: str) -> None:
    text, diff = "one\ntwo\nthree\nfour\n", "@@ -1,3 +1,3 @@\n-one\n+eins\n two\n three\n"
    assert patched(text, diff) == "eins\ntwo\nthree\nfour\n"
    assert what in diff
    with pytest.raises(AssertionError):
        patched(text, diff.replace(what, by))
