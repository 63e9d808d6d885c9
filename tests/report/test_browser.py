"""The report in Chromium: it makes no requests, logs nothing to the console, is accessible, fits a phone, and prints."""

import io
import shutil
from pathlib import Path

import pytest
from PIL import Image

from autotune.cli.output import check_ours
from autotune.report.page import page as page_of
from autotune.report.picture import take
from autotune.report.study import read
from tests.report import made
from tests.support.rows import more
from tests.support.studies import make_study

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium: misses what a browser makes of the report (apt-get install chromium)"
)
PHONE, DESK = {"width": 360, "height": 740}, {"width": 1440, "height": 900}
# Shows HTML as MLflow's artifact page does (see ShowArtifactHtmlView in its sources).
FRAMED = """<!doctype html><html lang="en"><title>t</title><body><iframe id="html" title="report" width="900" height="700"
sandbox="allow-scripts"></iframe><script>const text = %s;
document.getElementById("html").src = URL.createObjectURL(new Blob([text], {type: "text/html"}));</script></body></html>"""


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class OpenPage:
    """An open page, its requests, and its messages."""

    def __init__(self, browser, file: Path, **context) -> None:
        self.page = browser.new_context(**{"viewport": DESK, **context}).new_page()
        self.requests, self.said = [], []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog: {dialog.message}"))
        self.page.goto(file.as_uri())

    def overflow_px(self) -> int:
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


KINDS = ("complete", "interrupted", "beside", "hostile", "large")


@pytest.fixture(scope="module")
def reports(tmp_path_factory, complete):
    """Report files: of a complete study, an interrupted one, two side by side, a hostile one, and a large one."""
    place = tmp_path_factory.mktemp("reports")
    runs = place / "runs"
    (place / "hostile").mkdir()
    folders = {
        "complete": [complete],
        "interrupted": [make_study(runs, "cut", status="interrupted", num_trials=3)],
        "beside": [make_study(runs, "one"), complete],
        "hostile": [made.hostile(place / "hostile", complete)],
        "large": [made.large(runs, 1000)],
    }
    assert tuple(folders) == KINDS
    files = {}
    for name, shown in folders.items():
        files[name] = place / f"{name}.html"
        files[name].write_text(page_of([read(one, one.read_summary()) for one in shown]), encoding="utf-8")
    return files


@pytest.mark.parametrize("kind", KINDS)
def test_report_makes_no_request_and_logs_nothing(browser, reports, kind):
    opened = OpenPage(browser, reports[kind])
    assert opened.said == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [reports[kind].as_uri()]


BOTH = (("complete", "dark"), ("large", "light"))  # these pages and colour schemes are always tested


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        *BOTH,
        *more(*((kind, scheme) for kind in KINDS for scheme in ("light", "dark") if (kind, scheme) not in BOTH)),
    ],
)
def test_report_is_accessible(browser, reports, kind, scheme):
    from axe_playwright_python.sync_playwright import Axe

    opened = OpenPage(browser, reports[kind], color_scheme=scheme)
    found = Axe().run(opened.page).response
    assert len(found["passes"]) > 15
    assert [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]] == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_overflows_on_a_phone(browser, reports, kind):
    opened = OpenPage(browser, reports[kind], viewport=PHONE)
    assert opened.overflow_px() == 0
    opened.page.evaluate("document.querySelectorAll('details').forEach(each => each.setAttribute('open', ''))")
    assert opened.overflow_px() == 0


def test_light_and_dark_schemes_differ(browser, reports):
    backs = {
        OpenPage(browser, reports["complete"], color_scheme=scheme).page.evaluate(
            "getComputedStyle(document.body).backgroundColor"
        )
        for scheme in ("light", "dark")
    }
    assert len(backs) == 2


def test_report_prints_with_every_table_open(browser, reports, tmp_path):
    opened = OpenPage(browser, reports["complete"])
    hidden = opened.page.locator("details:not([open]) td").first
    assert not hidden.is_visible()
    pdf = opened.page.pdf(path=str(tmp_path / "report.pdf"), format="A4", print_background=True)
    assert pdf.startswith(b"%PDF-")
    assert 3 <= pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") + pdf.count(b"/Type/Page") <= 40
    opened.page.emulate_media(media="print")
    opened.page.set_viewport_size({"width": 700, "height": 1000})  # about the width of a sheet of paper
    assert hidden.bounding_box()["height"] > 0
    assert opened.overflow_px() == 0
    rights = opened.page.evaluate("[...document.querySelectorAll('table')].map(each => each.getBoundingClientRect().right)")
    assert max(rights) <= 700


def test_texts_of_a_program_are_escaped(browser, reports):
    opened = OpenPage(browser, reports["hostile"])
    assert opened.page.locator("script, img, iframe, b[onclick], [onerror]").count() == 0
    assert opened.page.locator("style").count() == 1
    assert made.HOSTILE.split("<style>")[0][:25] in opened.page.inner_text("h1")
    assert opened.said == []


def test_content_security_policy_blocks_a_script(browser, reports, tmp_path):
    planted = tmp_path / "planted.html"
    planted.write_text(reports["complete"].read_text().replace("<main>", "<main><script>document.title = 'ran'</script>"))
    opened = OpenPage(browser, planted)
    assert opened.page.title() != "ran"
    assert any("Content Security Policy" in said for said in opened.said)


def test_report_works_inside_the_artifact_frame_of_mlflow(browser, reports, tmp_path):
    import json

    outer = tmp_path / "mlflow.html"
    outer.write_text(FRAMED % json.dumps(reports["complete"].read_text()).replace("</", "<\\/"))
    opened = OpenPage(browser, outer)
    frame = opened.page.frame_locator("#html")
    frame.get_by_text("faster:").first.wait_for()
    first = frame.locator("details:not([open]) summary").first
    first.click()
    assert frame.locator("details[open] td").first.is_visible()
    assert frame.locator(".first").evaluate("each => getComputedStyle(each).borderRadius") != "0px"  # the style applies
    assert opened.said == []


def test_chart_marks_are_inside_their_drawings(browser, reports):
    opened = OpenPage(browser, reports["complete"])
    outside = opened.page.evaluate(
        """() => [...document.querySelectorAll('svg.plot, .bars svg')].flatMap(svg => {
            const outer = svg.getBoundingClientRect();
            return [...svg.querySelectorAll('rect, circle, line')].filter(mark => {
                const inner = mark.getBoundingClientRect();
                return inner.left < outer.left - 8 || inner.right > outer.right + 8 || inner.top < outer.top - 8
                    || inner.bottom > outer.bottom + 8;
            }).map(mark => mark.outerHTML);
        })"""
    )
    assert outside == []


def test_bars_use_the_available_width(browser, reports):
    for viewport, least_px in ((DESK, 400), (PHONE, 300)):
        opened = OpenPage(browser, reports["complete"], viewport=viewport)
        tracks = opened.page.evaluate(
            "[...document.querySelectorAll('#changes .bars li > svg')].map(each => each.getBoundingClientRect().width)"
        )
        assert len(tracks) > 2
        assert min(tracks) >= least_px


def test_sections_of_compared_studies_have_a_gap_between_them(browser, reports):
    for viewport in (DESK, PHONE):
        opened = OpenPage(browser, reports["beside"], viewport=viewport)
        gaps = opened.page.evaluate(
            """() => [...document.querySelectorAll('section section')].map(each =>
                each.getBoundingClientRect().top - each.previousElementSibling.getBoundingClientRect().bottom)"""
        )
        assert len(gaps) > 8
        assert min(gaps) >= 32


def test_a_picture_of_the_top_is_a_small_png(reports, tmp_path):
    for width_px in (360, 1440):
        content = take(reports["complete"].read_text(), tmp_path / "top.png", width_px=width_px)
        taken = Image.open(io.BytesIO(content))
        assert (taken.format, taken.size) == ("PNG", (width_px, 900))
        assert 5_000 < len(content) < 150_000
        check_ours(b"", tmp_path / "missing.png", "--picture")
        (tmp_path / "top.png").write_bytes(content)
        check_ours(b"", tmp_path / "top.png", "--picture")
        below = taken.convert("L").crop((0, 850, width_px, 900))
        assert below.getextrema()[0] < 128  # the page fills the picture down to its lower edge
