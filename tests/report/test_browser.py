"""The report's page and the site in a real browser: on a screen and on a telephone, with the network watched."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specextend.report import write_report
from tests.job.conftest import ROOT
from tests.report.made_up import HOSTILE, PRICE, write_run

CHROMIUM = shutil.which("chromium")
LONGEST_MS = 300_000
"""Of a step of the browser, on a machine with much else to do."""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium; `make chromium` installs it where root may"),
]
VISITS = {
    "screen": {"viewport": {"width": 1280, "height": 900}},
    "telephone": {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    run = write_run(tmp_path_factory.mktemp("browser") / "run", price_per_worker_hour=PRICE)
    write_report(run)
    return Path(run, "report.html")


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        options = {"executable_path": CHROMIUM, "timeout": LONGEST_MS}
        opened = playwright.chromium.launch(args=["--no-sandbox"], **options)  # root needs that
        yield opened
        opened.close()


class Visit:
    """The page, opened, with what it said on the console, what it raised and what it asked for."""

    def __init__(self, browser, file, how):
        self.page = browser.new_context(**VISITS[how]).new_page()
        self.page.set_default_timeout(LONGEST_MS)
        self.complaints = []
        self.requests = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_load_state("networkidle")


@pytest.fixture(params=VISITS)
def visit(browser, written, request):
    opened = Visit(browser, written, request.param)
    yield opened
    opened.page.context.close()


def test_markup_in_an_id_is_shown_and_does_nothing(visit):
    """An image would be fetched, a handler would change the title, a tag would make the class bold.

    On a telephone wide tables scroll alone, and all drawings fit.
    """
    assert visit.requests == [visit.page.url]
    assert visit.complaints == []
    assert visit.page.locator("figure").count() == 5
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.page.evaluate(
        "[...document.querySelectorAll('figure, figure *')].every(e => e.scrollWidth <= innerWidth)"
    )
    assert visit.page.title().startswith("Report of ")
    assert visit.page.locator("img, script, iframe, b").count() == 0
    assert visit.page.get_by_text(HOSTILE).first.is_visible()
    assert visit.page.get_by_text("<b>Bad</b>", exact=True).is_visible()


def test_the_site_is_read_and_searched_without_a_network(browser, tmp_path):
    """It is read where nothing may leave the house, from a folder; a link that leads nowhere ends its build.

    On a telephone commands and tables fit: a reader does not see that a cut line can be scrolled.
    """
    sphinx = (sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet")
    subprocess.run((*sphinx, "-c", "docs/site", "-d", tmp_path / "kept", ".", tmp_path / "site"), cwd=ROOT, check=True)
    visit = Visit(browser, tmp_path / "site" / "index.html", "telephone")
    visit.page.wait_for_url("**/README.html")
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    cut = "[...document.querySelectorAll('pre, .table-wrapper')].filter(e => e.scrollWidth > innerWidth)"
    assert visit.page.evaluate(f"{cut}.map(e => e.innerText)") == []
    visit.page.goto((tmp_path / "site" / "search.html").as_uri() + "?q=load_engine")
    visit.page.locator("#search-results a", has_text="specextend.load_engine").first.click()
    visit.page.get_by_text("Load the models of a configuration").first.wait_for()
    assert {url.partition(":")[0] for url in visit.requests} == {"file"}
