"""The site: everything is in its navigation, every public name in its reference, every link leads
somewhere, and it looks right in a browser.

What needs the site built needs what builds it: `make docs` installs that into `.venv-docs`.
"""

import contextlib
import functools
import http.server
import importlib.util
import inspect
import posixpath
import subprocess
import sys
import threading
import time
import urllib.parse
from html.parser import HTMLParser

import pytest

import chromium
import fedgrad as fg
from where import ROOT

DOCS = ROOT / "docs"
INDEX = (DOCS / "README.md").read_text(encoding="utf-8")
BUILDER = ROOT / ".venv-docs" / "bin" / "python"


@functools.cache
def build():
    """docs/site/build.py as a module."""
    folder = DOCS / "site"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("build_site", folder / "build.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


# --- what there is --------------------------------------------------------------------------------


def test_every_page_is_in_the_navigation():
    listed = [to for pages in build().navigation(INDEX).values() for _, to in pages]
    pages = {path.name for path in DOCS.glob("*.md")} - {"README.md"}
    books = {f"notebooks/{path.name}" for path in DOCS.glob("notebooks/*.ipynb")}
    assert not (pages | books) - set(listed), "add it to a list of docs/README.md"
    assert len(listed) == len(set(listed))


def test_every_public_name_is_in_the_reference():
    names = [name for names in build().reference(INDEX).values() for name in names]
    rooms = {name.partition(".")[0] for name in names}
    assert not set(fg.__all__) - rooms, "add it to the table of docs/README.md"
    assert len(names) == len(set(names))
    for name in names:
        assert functools.reduce(getattr, name.split("."), fg) is not None


def described():
    """All that the reference shows: public names, and what they hold."""
    names = [name for names in build().reference(INDEX).values() for name in names]
    for name in [member for each in names for member in build().members(each)]:
        value = functools.reduce(getattr, name.split("."), fg)
        yield name, value
        if inspect.isclass(value):
            for own, part in vars(value).items():
                if own[0] != "_" and (callable(part) or isinstance(part, property)):
                    if not isinstance(part, type):
                        yield f"{name}.{own}", part


def test_everything_in_the_reference_has_a_docstring():
    def says(value):
        return inspect.isfunction(value) or inspect.isclass(value) or hasattr(value, "fget")

    found = dict(described())
    assert len(found) > 200
    assert not [name for name, value in found.items() if says(value) and not inspect.getdoc(value)]


def test_a_module_is_shown_by_what_it_holds():
    assert build().members("fit") == ["fit"]
    assert "tasks.split.dirichlet" in build().members("tasks")
    assert "charts.Chart" in build().members("charts")


# --- as it is built -------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page links to, what it loads, and its anchors."""

    def __init__(self, text):
        super().__init__()
        self.links, self.loads, self.anchors, self.words = [], [], set(), []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img", "source", "iframe") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(found["href"])

    def handle_data(self, data):
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if not BUILDER.exists():
        pytest.skip("the site was not built: `make docs` installs what builds it")
    out = tmp_path_factory.mktemp("built") / "site"
    command = [BUILDER, DOCS / "site" / "build.py", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def pages(site):
    found = {path: Links(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    del found[site / "404.html"]  # whose links begin where the site will be
    return found


def leads_to(site, page, target):
    """The file that a link of a page means."""
    path = urllib.parse.unquote(urllib.parse.urlsplit(target).path)
    if not path:
        return page
    here = page.parent.relative_to(site).as_posix()
    there = site / posixpath.normpath(posixpath.join(here, path))
    return there / "index.html" if there.is_dir() else there


def is_elsewhere(target):
    return bool(urllib.parse.urlsplit(target).scheme or target.startswith("//"))


def test_every_link_of_the_site_leads_somewhere(site, pages):
    wrong, seen = [], 0
    for page, found in pages.items():
        for target in filter(lambda x: not is_elsewhere(x), found.links + found.loads):
            there, anchor = leads_to(site, page, target), urllib.parse.urlsplit(target).fragment
            seen += 1
            known = {"", *pages[there].anchors} if there in pages else {""}
            if not there.is_file() or urllib.parse.unquote(anchor) not in known:
                wrong.append((page.relative_to(site), target))
    assert seen > 1000 and not wrong


def test_the_site_loads_nothing_from_elsewhere(pages):
    loads = [load for found in pages.values() for load in found.loads]
    # The pictures of a result in a notebook are in the page itself.
    assert not [load for load in loads if is_elsewhere(load) and not load.startswith("data:image/")]


def test_every_public_name_has_an_entry(site, pages):
    shown = set().union(*(found.anchors for found in pages.values()))
    for name in (n for names in build().reference(INDEX).values() for n in names):
        assert {f"fedgrad.{member}" for member in build().members(name)} <= shown


def test_notebooks_are_pages_with_pictures(site):
    for path in DOCS.glob("notebooks/*.ipynb"):
        page = site / "notebooks" / f"{path.stem}.html"
        assert "<img" in page.read_text(encoding="utf-8"), path.name


def test_the_first_page_says_what_it_is(site, pages):
    said = "".join(pages[site / "index.html"].words)
    assert "Federated training that tunes itself" in said and "pip install fedgrad" in said
    assert "pages.html" in pages[site / "index.html"].links


@contextlib.contextmanager
def served(folder):
    """The address of a folder."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:  # or a test that fails would never end
            server.shutdown()
            thread.join()


# What the search shows is in a tree of its own.
SHADOWS = """[...document.querySelectorAll('*')].filter(e => e.shadowRoot)
    .map(e => e.shadowRoot.textContent).join(' ')"""
FIRST = """[...document.querySelectorAll('*')].filter(e => e.shadowRoot)
    .flatMap(e => [...e.shadowRoot.querySelectorAll('ol a')])[0]"""


@pytest.mark.skipif(chromium.COMMAND is None, reason="needs Chromium")
def test_in_a_browser(site):
    with served(site) as address, chromium.chromium() as page:
        for path in ("", "no-tuning.html", "api/training.html", "derivatives.html"):
            for width, dark in ((1300, False), (390, False), (390, True)):
                page.open(address + path, dark, width)
                assert page.run("document.documentElement.scrollWidth") <= width, path
                assert not page.problems
                assert all(asked.startswith((address, "data:")) for asked in page.requests)


@pytest.mark.skipif(chromium.COMMAND is None, reason="needs Chromium")
@pytest.mark.parametrize("where", ["server", "files"])
def test_the_search_finds(site, where):
    with served(site) as address, chromium.chromium() as page:
        page.open(address if where == "server" else site / "index.html")
        page.run("document.querySelector('button.md-search__button').click()")
        for _ in range(100):  # it loads its index first
            page.call("Input.insertText", text="" if "results" in page.run(SHADOWS) else "hessian ")
            if "fg.hessian" in page.run(SHADOWS):
                break
            time.sleep(0.1)
        else:
            pytest.fail(page.run(SHADOWS))
        page.run(f"{FIRST}.click()")
        page.until("document.getElementById('fedgrad.hessian') !== null")
        assert not page.problems


@pytest.mark.skipif(chromium.COMMAND is None, reason="needs Chromium")
def test_a_drawing_is_not_shrunk_on_a_phone(site):
    with chromium.chromium() as page:
        for path, wide in (
            ("index", True),
            ("notebooks/derivatives", True),
            ("notebooks/first-hour", False),
        ):
            page.open(site / f"{path}.html", width=390)
            page.until("document.querySelector('article img[src$=svg]').complete")
            size = page.run("document.querySelector('article img[src$=svg]').width")
            assert (size > 800) if wide else (size <= 390), path
            assert page.run("document.documentElement.scrollWidth") <= 390
