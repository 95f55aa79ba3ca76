"""The documentation as a site: `make docs`, or `python docs/site/build.py --out FOLDER`.

What is in `docs/` stays the only source. This puts it together for Zensical: the README as the
first page; the pages as they are, with the navigation of `docs/README.md`; notebooks as pages; the
reference, a block for each name of the table of the public API, which mkdocstrings fills from the
source; and what pages link to outside of `docs/` (examples, tests, results), as pages that show it.
It is read on a server, and as files.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import notebook

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
INDEX, HOME = DOCS / "README.md", ROOT / "README.md"
PAGES = {HOME: "index.md", INDEX: "pages.md"}  # what has another name here
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".yml": "yaml"}


# --- what docs/README.md says -------------------------------------------------------------------


def navigation(index: str) -> dict[str, list[tuple[str, str]]]:
    """The lists of the index: for each heading its pages, (title, path)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in index.splitlines():
        if heading := re.fullmatch(r"\*\*(.+?)\.?\*\*", line):
            found[heading[1]] = []
        elif item := re.match(r"\d+\. \[(.+?)\]\((.+?)\)", line):
            found[next(reversed(found))].append((item[1], item[2]))
    return found


def with_pages_that_exist(index: str) -> str:
    """The index without what it lists of a checkout in which it is still being written. (That links
    of the documentation lead somewhere is for tests/house/test_docs.py to say.)"""

    def exists(line: str) -> bool:
        item = re.match(r"\d+\. \[.+?\]\((.+?)\)", line)
        return item is None or (DOCS / item[1]).exists()

    return "\n".join(filter(exists, index.splitlines())) + "\n"


def reference(index: str) -> dict[str, list[str]]:
    """The table of the public API: for each page that explains them, names without `fg.`."""
    found: dict[str, list[str]] = {}
    table = index.partition("## The public API")[2]
    for row in re.findall(r"^\| (`fg\..*?) \| \[.*?\]\(([\w-]+)\.md", table, re.MULTILINE):
        found.setdefault(row[1], []).extend(re.findall(r"`fg\.([\w.]+)`", row[0]))
    return found


def public(file: Path) -> dict[str, Path | None]:
    """The public names of a module, read and not imported: `__all__`, or what it defines. With the
    file of each that is a module itself."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    rooms = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            folder = ROOT / "src" / (node.module or "").replace(".", "/")
            for alias in node.names:
                there = (folder / f"{alias.name}.py", folder / alias.name / "__init__.py")
                rooms[alias.name] = next(filter(Path.is_file, there), None)
    for node in body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return {name: rooms.get(name) for name in ast.literal_eval(node.value)}
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: None for node in body if isinstance(node, kinds) and node.name[0] != "_"}


def members(name: str) -> list[str]:
    """A public name, or if it is a module, what it holds: dotted, without `fg.`."""
    names = public(ROOT / "src" / "fedgrad" / "__init__.py")
    done = ""
    for part in name.split("."):
        room, done = names[part], f"{done}.{part}".lstrip(".")
        names = public(room) if room else {}
    return [deeper for each in names for deeper in members(f"{done}.{each}")] or [done]


# --- pages ----------------------------------------------------------------------------------------


class Site:
    """A folder of Markdown that grows until no page links to anything that is not in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shown: dict[Path, str] = {}  # a file outside of docs/, and the page that shows it

    def write(self, path: str, text: str) -> None:
        """Add a page."""
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")

    def page(self, path: str, text: str, source: Path) -> None:
        """Add a page that was written for another place: its links lead on from `source`."""
        pieces, end = [], 0
        for fence in FENCE.finditer(text):
            pieces += [self._linked(text[end : fence.start()], path, source), fence[0]]
            end = fence.end()
        self.write(path, "".join([*pieces, self._linked(text[end:], path, source)]))

    def _linked(self, text: str, path: str, source: Path) -> str:
        return LINK.sub(lambda link: self._target(link[1], path, source), text)

    def _target(self, target: str, path: str, source: Path) -> str:
        name, mark, anchor = target.partition("#")
        if re.match(r"\w+:", target) or not name:
            return target
        there = (source.parent / name).resolve()
        if there in PAGES:
            return os.path.relpath(PAGES[there], Path(path).parent) + mark + anchor
        inside = there.is_relative_to(DOCS) and there.suffix in (".md", ".ipynb", ".svg", ".png")
        to = str(there.relative_to(DOCS)) if inside else self._show(there)
        to = re.sub(r"\.ipynb$", ".md", to)
        return os.path.relpath(to, Path(path).parent) + mark + anchor

    def _show(self, there: Path) -> str:
        """The page that shows a file or a folder which is not part of the documentation."""
        if there not in self.shown:
            name = there.relative_to(ROOT)
            to = self.shown[there] = f"source/{name}{'' if there.suffix == '.md' else '.md'}"
            if there.suffix == ".md":
                self.page(to, there.read_text(encoding="utf-8"), there)
            elif there.is_dir():
                files = sorted(f for f in there.rglob("*") if f.is_file() and f.suffix in LANGUAGES)
                parts = [f"## {file.relative_to(there)}\n\n{_quoted(file)}" for file in files]
                self.write(to, f"# {name}\n\n" + "\n".join(parts))
            else:
                self.write(to, f"# {name}\n\n{_quoted(there)}")
        return self.shown[there]


def _quoted(file: Path) -> str:
    language = LANGUAGES.get(file.suffix, "text")
    return f"````{language}\n{file.read_text(encoding='utf-8').rstrip()}\n````\n"


def api_page(title: str, guide: str, names: list[str]) -> str:
    """A heading, and a block for each name, which mkdocstrings fills."""
    blocks = [
        f"::: fedgrad.{member}\n    options:\n      heading: fg.{member}\n"
        f"      toc_label: {member.rpartition('.')[2]}\n"
        for name in names
        for member in members(name)
    ]
    head = f"# {title}: reference\n\nThe guide: [{title}](../{guide}.md).\n\n"
    return head + "\n".join(blocks)


def assemble(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Everything of the site as Markdown in a folder; what its navigation shows."""
    shutil.rmtree(folder, ignore_errors=True)
    site, index = Site(folder), with_pages_that_exist(INDEX.read_text(encoding="utf-8"))
    shutil.copytree(DOCS / "images", folder / "images")
    shutil.copy(Path(__file__).with_name("site.css"), folder / "site.css")
    for page in sorted(DOCS.glob("*.md")):
        if page != INDEX:
            site.page(page.name, page.read_text(encoding="utf-8"), page)
    site.page(PAGES[INDEX], index, INDEX)
    site.page(PAGES[HOME], HOME.read_text(encoding="utf-8"), HOME)
    for path in sorted(DOCS.glob("notebooks/*.ipynb")):
        text, pictures = notebook.markdown(json.loads(path.read_text(encoding="utf-8")), path.stem)
        site.page(f"notebooks/{path.stem}.md", text, path)
        for name, picture in pictures.items():
            (folder / "notebooks" / name).write_bytes(picture)
    shown = {"fedgrad": [("Overview", PAGES[HOME]), ("All pages", PAGES[INDEX])]}
    for heading, pages in navigation(index).items():
        shown[heading] = [(title, re.sub(r"\.ipynb$", ".md", to)) for title, to in pages]
    titles = {to.removesuffix(".md"): title for pages in shown.values() for title, to in pages}
    shown["Reference"] = []
    for guide, names in reference(index).items():
        site.write(f"api/{guide}.md", api_page(titles[guide], guide, names))
        shown["Reference"].append((titles[guide], f"api/{guide}.md"))
    return shown


def build(out: Path) -> None:
    """Write the site to `out`. Beside it stays what it was made of."""
    source = out.with_name(f"{out.name}-source")
    shown = assemble(source / "docs")
    groups = ",\n".join(
        f"  {{ {json.dumps(heading)} = [\n"
        + ",\n".join(f"    {{ {json.dumps(title)} = {json.dumps(to)} }}" for title, to in pages)
        + "\n  ] }"
        for heading, pages in shown.items()
        if pages
    )
    settings = Path(__file__).with_name("zensical.toml").read_text(encoding="utf-8")
    settings = settings.replace('"NAV"', f"[\n{groups}\n]")
    settings = settings.replace('"SRC"', json.dumps(str(ROOT / "src")))
    (source / "zensical.toml").write_text(settings, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run(command, cwd=source, check=True)
    shutil.rmtree(out, ignore_errors=True)
    (source / "site").rename(out)  # Zensical writes below its settings only
    shutil.rmtree(source)
    _search_in_files(out)


def _search_in_files(out: Path) -> None:
    """Let the search work where the site is opened as files. There Zensical asks for search.js
    instead of search.json, and a browser starts no worker from a file: so it is given as text."""
    (worker,) = (out / "assets" / "javascripts" / "workers").glob("search.*.js")
    index, code = (path.read_text(encoding="utf-8") for path in (out / "search.json", worker))
    text = (
        f"var __index = {index};\n"
        f"const code = new Blob([{json.dumps(code)}]);\n"
        "const Started = Worker;\n"
        "Worker = function () { return new Started(URL.createObjectURL(code)); };\n"
    )
    (out / "search.js").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "site")
    build(parser.parse_args().out.resolve())
