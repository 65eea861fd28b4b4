"""What makes a site of the pages, beyond mkdocs itself; `make docs` calls it. Imports no offbeat.

- The README is the front page.
- Every algorithm has a page: its picture, its docstring, its settings, from its file.
- Pages link to files of the project, as a reader of the repository needs it. Those files become
  pages of the site, too: source as code, folders as lists. So no link leads out, or nowhere.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeGuard

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ALGORITHMS = ROOT / "src" / "offbeat" / "algorithms"
BASES = {
    name.title(): ROOT / "src" / "offbeat" / f"{name}.py"
    for name in ("decentralised", "asynchronous")
}
"""Where the fields are that an algorithm inherits."""
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?(?=\))")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LANGUAGES = {".py": "python", ".toml": "toml", ".js": "javascript", ".cff": "yaml"}
LARGEST = 100_000
"""Characters of a file that is shown; larger ones, such as results, can be downloaded."""


def on_config(config: Any) -> Any:
    """Put the algorithms' pages where the navigation has an empty place for them."""
    names = [{_class(path).name: f"algorithms/{path.stem}.md"} for path in _algorithms()]
    _fill(config["nav"], names)
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here, and whatever the pages link to, and so on."""
    todo = [(page.src_uri, page.content_string) for page in files.documentation_pages()]
    made = [("index.md", _moved((ROOT / "README.md").read_text(), "README.md"))]
    made += [(f"algorithms/{path.stem}.md", _page(path)) for path in _algorithms()]
    for uri, text in made:
        files.append(File.generated(config, uri, content=text))
    todo += made
    while todo:
        uri, text = todo.pop()
        for target in _targets(uri, text):
            if files.get_file_from_path(_uri(target)) is not None:
                continue
            shown = _shown(target)
            if shown is None:
                raw = (ROOT / target).read_bytes()
                files.append(File.generated(config, _uri(target), content=raw))
            else:
                files.append(File.generated(config, _uri(target), content=shown))
                todo.append((_uri(target), shown))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the project at their pages."""
    return _relinked(markdown, page.file.src_uri)


# --- links -------------------------------------------------------------------------------------


def _targets(uri: str, text: str) -> Iterator[str]:
    """The files of the project, outside docs, that a page links to."""
    for match in LINK.finditer(FENCE.sub("", text)):
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_place(uri)), match[1]))
        if not target.startswith(("docs/", "..")) and (ROOT / target).exists():
            yield target


def _relinked(text: str, uri: str) -> str:
    """The page with its links as the site has them."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(_place(uri)), match[1]))
        if target.startswith(("docs/", "..")) or not (ROOT / target).exists():
            return match[0]
        return posixpath.relpath(_uri(target), posixpath.dirname(uri) or ".") + (match[2] or "")

    return _with_links(text, link)


def _with_links(text: str, link: Callable[[re.Match[str]], str]) -> str:
    """The text with its links replaced; code stays as it is."""
    parts, at = [], 0
    for fence in FENCE.finditer(text):
        parts += [LINK.sub(link, text[at : fence.start()]), fence[0]]
        at = fence.end()
    return "".join([*parts, LINK.sub(link, text[at:])])


def _place(uri: str) -> str:
    """Where a page of the site is in the project, for its relative links."""
    return f"docs/{uri}"


def _uri(target: str) -> str:
    """Where a file of the project is in the site."""
    path = ROOT / target
    if target == "README.md":
        return "index.md"
    if target.startswith("src/offbeat/algorithms/") and path in _algorithms():
        return f"algorithms/{path.stem}.md"
    if path.suffix == ".md":
        return f"project/{target}"
    return f"project/{target}.md" if path.is_dir() or _is_shown(path) else f"project/{target}"


def _moved(text: str, source: str, uri: str = "index.md") -> str:
    """A page of the project at another place of the site: its links as from a page in docs."""

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        return posixpath.relpath(target, posixpath.dirname(_place(uri))) + (match[2] or "")

    return _with_links(text, link)


# --- pages -------------------------------------------------------------------------------------


def _is_shown(path: Path) -> bool:
    return path.suffix in (*LANGUAGES, ".txt", "") and path.stat().st_size <= LARGEST


def _shown(target: str) -> str | None:
    """A file of the project as a page, or None if it is only to be downloaded."""
    path = ROOT / target
    if path.suffix == ".md":
        return _moved(path.read_text(), target, _uri(target))
    if path.is_dir():
        up = posixpath.relpath(".", posixpath.dirname(_place(_uri(target))))
        entries = sorted(each for each in path.iterdir() if not each.name.startswith(("_", ".")))
        rows = (f"- [{each.name}]({up}/{target}/{each.name})" for each in entries)
        return f"# {target}\n\n" + "\n".join(rows) + "\n"
    if not _is_shown(path):
        return None
    return f"# {target}\n\n{_code(path.read_text(), LANGUAGES.get(path.suffix, 'text'))}"


def _code(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"


def _algorithms() -> list[Path]:
    return sorted(path for path in ALGORITHMS.glob("*.py") if not path.name.startswith("_"))


def _class(path: Path) -> ast.ClassDef:
    """The algorithm of a file: the class that is named in the package."""
    named = (ALGORITHMS / "__init__.py").read_text()
    module = ast.parse(path.read_text())
    return next(
        node
        for node in module.body
        if isinstance(node, ast.ClassDef) and re.search(rf"\b{node.name}\b", named)
    )


def _page(path: Path) -> str:
    """An algorithm's page."""
    kind = _class(path)
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    first, _, rest = text.partition("\n")
    return "\n".join(
        [
            f"# {kind.name}\n\n{first}\n",
            f"![Timeline of {kind.name}](../timelines/{path.stem}.svg)\n",
            "Four workers over twelve virtual seconds: [what the colours mean](../timelines.md).\n",
            _prose(rest),
            f"## Settings\n\n{_settings(kind)}",
            f"## The file\n\n{_code(path.read_text(), 'python')}",
        ]
    )


def _prose(text: str) -> str:
    """A docstring as Markdown: what is indented is the paper's pseudo-code."""
    blocks = (block.strip("\n") for block in re.split(r"\n\s*\n", text))
    return "\n\n".join(
        block if block.startswith("    ") else _linked(block) for block in blocks if block
    )


def _linked(text: str) -> str:
    """A paragraph, in which the files that it names are links."""
    text = re.sub(r"<(?=[-\w])", r"\\<", text)
    text = re.sub(r"\bdocs/([\w-]+)\.md\b", r"[\1](../\1.md)", text)
    return re.sub(r"\b(benchmarks/\w+\.py)\b", r"[\1](../../\1)", text)


def _settings(kind: ast.ClassDef) -> str:
    """Its fields and those that it inherits, with what their docstrings say."""
    rows = dict(_fields(kind))
    if not rows:
        return "It has none.\n"
    head = "| name | type | default | what it is |\n|---|---|---|---|\n"
    return head + "\n".join(rows.values()) + "\n"


def _fields(kind: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Rows of the table by name; a class's own come after those of its base, and replace them."""
    for base in kind.bases:
        if (file := BASES.get(ast.unparse(base))) is not None:
            nodes = ast.parse(file.read_text()).body
            yield from _fields(next(node for node in nodes if _named(node, ast.unparse(base))))
    for node, after in zip(kind.body, [*kind.body[1:], None], strict=True):
        if not isinstance(node, ast.AnnAssign) or "ClassVar" in ast.unparse(node.annotation):
            continue
        said = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = " ".join(str(after.value.value).split())
        name, type_ = ast.unparse(node.target), ast.unparse(node.annotation)
        yield name, f"| `{name}` | `{type_}` | {_default(node.value)} | {said} |"


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call):  # field(default=...)
        value = next((each.value for each in value.keywords if each.arg == "default"), value)
    return "" if value is None else f"`{ast.unparse(value)}`"


def _named(node: ast.stmt, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and node.name == name


def _fill(nav: list[Any], pages: list[Any]) -> None:
    """Put the pages into the empty list of the navigation."""
    for entry in nav:
        for title, below in entry.items() if isinstance(entry, dict) else ():
            if below == []:
                entry[title] = pages
            elif isinstance(below, list):
                _fill(below, pages)
