"""The site of the docs: nothing is left out of it, and it builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r": ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(named) == len(set(named)), "a page is there twice"
    pages = {page.name for page in (ROOT / "docs").glob("*.md")}
    assert set(named) == pages | {"index.md"}  # which is the README


@pytest.mark.slow
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="make docs")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stderr
    page = (tmp_path / "algorithms" / "eager.html").read_text()
    assert "../timelines/eager.svg" in page
    assert "max_staleness_rounds" in page
    assert (tmp_path / "project" / "CONTRIBUTING.html").exists()
    assert (tmp_path / "project" / "benchmarks" / "results" / "league.jsonl").exists()
