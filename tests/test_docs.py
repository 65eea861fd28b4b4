"""The pages hold what they say: their code runs, links lead somewhere, nothing is left out."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer

import offbeat
from offbeat.cli import app

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "offbeat"
README = (ROOT / "README.md").read_text()
README_BYTES = 8_000  # what a newcomer reads before the first run; the rest is in docs/
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
EXECUTED_ELSEWHERE = {"clusters.md", "porting.md"}  # by test_clusters.py, test_porting_page.py
FRAMEWORKS = {  # import what need not be installed
    "offbeat.federated.flower",
    "offbeat.integrations.accelerate",
    "offbeat.integrations.lightning",
    "offbeat.integrations.transformers",
}

FENCE = re.compile(r"^```(\S*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FRAGMENT = "<!-- fragment -->\n"
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")  # pictures, too
PICTURE = re.compile(r'\b(?:src|srcset)="([^"\s]+)"')


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are tiny: a second thread would only get in the way of other processes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def python_blocks(text: str) -> list[tuple[int, str]]:
    """The blocks that are to be executed, each with the number of its first line."""
    return [
        (text.count("\n", 0, match.start(2)), match[2])
        for match in FENCE.finditer(text)
        if match[1] == "python" and not text[: match.start()].endswith(FRAGMENT)
    ]


def execute(blocks: list[tuple[int, str]], name: str) -> None:
    """Run the blocks of one page as one program, whose tracebacks point to the page's lines."""
    names = {"__name__": f"page:{name}"}
    for line, source in blocks:
        code = compile("\n" * line + source, name, "exec", dont_inherit=True)
        exec(code, names)


def modules() -> list[ModuleType]:
    return [
        offbeat,
        *(
            importlib.import_module(found.name)
            for found in pkgutil.walk_packages(offbeat.__path__, "offbeat.")
            if found.name not in FRAMEWORKS
        ),
    ]


def text_of(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


# --- code ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name not in EXECUTED_ELSEWHERE and "```python" in page.read_text()
    ],
    ids=page_id,
)
def test_the_code_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    execute(python_blocks(page.read_text()), page_id(page))


def test_the_pages_that_show_code_are_among_those_executed() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "docs/design.md", "docs/start.md"):
        assert python_blocks((ROOT / name).read_text()), name


def test_a_fragment_is_rare() -> None:
    assert sum(page.read_text().count("\n" + FRAGMENT) for page in PAGES) <= 3


def test_the_examples_in_docstrings_give_what_they_show() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for module in modules():
        for example in finder.find(module):
            runner.run(example)
    assert runner.failures == 0


# --- the README ----------------------------------------------------------------------------


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= README_BYTES, "what is looked up belongs into docs/"


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        if (page := todo.pop()) not in reached:
            reached.add(page)
            links = LINK.findall(FENCE.sub("", page.read_text()))
            files = ((page.parent / link.partition("#")[0]).resolve() for link in links)
            todo += [file for file in files if file.suffix == ".md" and file.exists()]
    assert set(PAGES) <= reached


# --- what the pages name -------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    for target in LINK.findall(text) + PICTURE.findall(text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{page_id(page)} links to {target}"
        assert file.is_relative_to(ROOT), f"{page_id(page)} links out of the project: {target}"
        if anchor:
            assert anchor in anchors(file), f"{page_id(page)} links to {target}"


def anchors(page: Path) -> set[str]:
    """The headings of a page, as links spell them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_file_map_lists_exactly_the_files_that_there_are() -> None:
    listing = next(match[2] for match in FENCE.finditer(text_of("map.md")) if match[1] == "text")
    entries = re.findall(r"^  (\S+) +(\S.*)$", listing, re.MULTILINE)
    listed = [path for path, _ in entries]
    assert len(listed) == len(set(listed)), "a file is listed twice"
    there = set(files_of_the_package())
    assert set(listed) == there, f"docs/map.md: {set(listed) ^ there}"


def files_of_the_package() -> Iterator[str]:
    """Modules by name; packages, and folders of data, by their folder."""
    for path in PACKAGE.rglob("*"):
        if path.is_dir() or "__pycache__" in path.parts:
            continue
        name, folder = path.relative_to(PACKAGE), path.parent.relative_to(PACKAGE)
        is_module = path.suffix in (".py", ".typed") and path.name != "__init__.py"
        yield name.as_posix() if is_module or folder == Path() else f"{folder.as_posix()}/"


def test_every_dependency_has_its_reason() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        settings = tomllib.load(file)
    optional = settings["project"]["optional-dependencies"].values()
    needed = [
        *settings["build-system"]["requires"],
        *settings["project"]["dependencies"],
        *(requirement for group in optional for requirement in group),
    ]
    names = {re.split(r"[^\w.-]", requirement)[0] for requirement in needed}
    reasons = dict(
        re.findall(r"^\| `([\w.-]+)` \| (\S.*) \|$", text_of("dependencies.md"), re.MULTILINE)
    )
    assert set(reasons) == names


def reference_row(name: str) -> str:
    """What the reference says of a name or a command."""
    rows = text_of("reference.md").splitlines()
    found = [row for row in rows if row.startswith("|") and f"`{name}`" in row.split("|")[1]]
    assert len(found) == 1, f"docs/reference.md has {len(found)} rows for {name}"
    return found[0]


@pytest.mark.parametrize("name", offbeat.__all__)
def test_the_reference_has_every_public_name_and_its_settings(name: str) -> None:
    row, kind = reference_row(f"offbeat.{name}"), vars(offbeat)[name]
    is_algorithm = isinstance(kind, type) and issubclass(kind, offbeat.Algorithm)
    settings = [each.name for each in fields(kind)] if is_algorithm and is_dataclass(kind) else []
    if kind is offbeat.attach:
        settings = list(inspect.signature(kind).parameters)[3:]
    for setting in settings:
        assert f"`{setting}`" in row, f"docs/reference.md: {name} has {setting}, too"


def test_the_reference_has_every_command() -> None:
    for name in typer.main.get_command(app).commands:
        reference_row(f"offbeat {name}")


def test_every_algorithm_is_in_the_table() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \|.*\]\(\.\./(\S+)\) \|$", text_of("algorithms.md"), re.MULTILINE
    )
    there = {
        name: f"src/{vars(offbeat)[name].__module__.replace('.', '/')}.py"
        for name in offbeat.__all__
        if isinstance(kind := vars(offbeat)[name], type)
        and issubclass(kind, offbeat.Algorithm)
        and kind is not offbeat.Algorithm
    }
    assert dict(rows) == there


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z][a-z-]*)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page_id(page)
