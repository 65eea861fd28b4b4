"""The versions of torch that offbeat says it works with: run where that can be, else by types.

    python tests/versions.py 2.6.0 2.13.0 2.15.0

For each version: if pip finds a build of it for CPUs alone, an environment is made with it and the
tests that need no other process run there. PyPI's builds for Linux bring gigabytes of CUDA, so they
are not taken. Where there is no other, mypy checks offbeat against the sources and stubs of that
version, which PyPI's build for macOS has, too: every name and argument that offbeat uses is there.
What only a run can show is then not known, and said so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"
CPU = "https://download.pytorch.org/whl/cpu"
MACS = ("macosx_14_0_arm64", "macosx_11_0_arm64")
# Annotations grow stricter with every version; that is nothing a program can notice.
LENIENT = ("--allow-untyped-calls", "--implicit-reexport", "--no-warn-unused-ignores")
LENIENT += ("--no-warn-return-any", "--allow-any-generics", "--allow-untyped-decorators")


def called(*command: str | Path, quiet: bool = False) -> bool:
    """Run a command here; say whether it ended well."""
    output = subprocess.DEVNULL if quiet else None
    done = subprocess.run([str(each) for each in command], cwd=ROOT, stdout=output, stderr=output)
    return done.returncode == 0


def downloaded(requirement: str, *options: str) -> Path | None:
    """The wheel of a requirement, alone; None if pip finds none."""
    folder = BUILD / "wheels"
    pip = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:")
    where = ("--retries", "0", "--dest", str(folder), *options)
    shutil.rmtree(folder, ignore_errors=True)
    if not called(*pip, *where, requirement, quiet=True):
        return None
    return next(folder.glob("*.whl"), None)


def run(version: str, wheel: Path) -> str:
    """Run the tests that need no other process with this torch."""
    folder = BUILD / f"torch-{version}"
    venv.create(folder, with_pip=True, clear=True)
    python = folder / "bin" / "python"
    install = (python, "-m", "pip", "install", "--quiet")
    if not called(*install, wheel) or not called(*install, f"torch=={version}+cpu", ".[dev]"):
        return "could not be installed"
    tests = ("-m", "not real and not slow", "--numprocesses", "2")
    return "run: passed" if called(python, "-m", "pytest", "-q", *tests) else "run: FAILED"


def typed(version: str) -> str:
    """Check types against the sources of this torch."""
    wheel = None
    for platform in MACS:
        wheel = wheel or downloaded(f"torch=={version}", "--platform", platform)
    if wheel is None:
        return "cannot be had"
    folder = BUILD / f"torch-{version}"
    venv.create(folder, with_pip=False, clear=True)
    python = folder / "bin" / "python"
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    with zipfile.ZipFile(wheel) as file:
        wanted = [name for name in file.namelist() if name.endswith((".py", ".pyi", "py.typed"))]
        file.extractall(packages, wanted)
    # what else there is comes from here, after the torch that was unpacked
    (packages / "rest.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ("--python-executable", python, "--cache-dir", folder / "cache", *LENIENT)
    fits = called(sys.executable, "-m", "mypy", *options)
    return "no CPU build here; types: fit, not run" if fits else "types: DO NOT FIT"


def main() -> None:
    ends = {}
    for version in sys.argv[1:]:
        wheel = downloaded(f"torch=={version}+cpu", "--extra-index-url", CPU)
        ends[version] = typed(version) if wheel is None else run(version, wheel)
    for version, end in ends.items():
        print(f"torch {version}: {end}")
    if any(word in end for end in ends.values() for word in ("FAILED", "NOT", "could not")):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
