"""The page at ``/``: what it is made of, and what a person sees of it in a real browser."""

import contextlib
import os
import re
import shutil
from html.parser import HTMLParser
from importlib import resources

import pytest

pytest.importorskip("fastapi", reason="not run: the extra serve isn't installed")

from outrider.serve.http.app import content_security_policy
from serve.conftest import BUNDLED, bundled_engine
from serve.running import running

PAGE = resources.files("outrider.serve.http").joinpath("page.html").read_text("utf-8")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NAME = "outrider-bundled"
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
SCREENSHOT = os.environ.get("OUTRIDER_SCREENSHOT")


class Elements(HTMLParser):
    """The elements of a page, with their attributes; what stands in a label."""

    def __init__(self):
        super().__init__()
        self.found, self.labelled, self._labels = [], set(), 0

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        self._labels += tag == "label"
        if self._labels and tag in ("input", "select", "textarea"):
            self.labelled.add(dict(attrs).get("id") or dict(attrs).get("value"))

    def handle_endtag(self, tag):
        self._labels -= tag == "label"


def test_the_page_needs_nothing_from_elsewhere_and_fits_its_policy():
    elements = Elements()
    elements.feed(PAGE)
    for tag, attributes in elements.found:
        assert not {"src", "href", "style"} & attributes.keys(), f"{tag} {attributes}"
        assert not [name for name in attributes if name.startswith("on")], "a policy without unsafe-inline blocks these"
    assert not re.search(r"https?://|@import|url\(|\beval\b|innerHTML|insertAdjacentHTML", PAGE)
    said = content_security_policy(PAGE)
    assert "unsafe" not in said
    assert "default-src 'none'" in said
    assert content_security_policy(PAGE.replace('"use strict";', '"use strict"; alert(1);')) != said


def test_every_field_has_a_label_and_every_id_is_there_once():
    elements = Elements()
    elements.feed(PAGE)
    fields = [attributes for tag, attributes in elements.found if tag in ("input", "select", "textarea")]
    assert {each.get("id") or each.get("value") for each in fields} == elements.labelled
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\bat\("(\w+)"\)', PAGE)) <= set(ids)
    assert dict(elements.found)["html"] == {"lang": "en"}


# -- in a browser ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(*, template=None, **config):
    """The address of a server with the bundled model, in this process, and its engine's client."""
    names = {"names": (NAME,), "chat_template": template}
    with running(bundled_engine(max_context=1024), BUNDLED / "target", **names, **config) as server:
        yield f"{server.url}/", server.client


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="not run: playwright isn't installed")
    if CHROMIUM is None:
        pytest.skip("not run: there is no chromium here")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextlib.contextmanager
def opened(browser, address, **options):
    """A page in a browser that reaches that server alone. Errors of the page, and of its policy, fail the test."""
    context = browser.new_context(**options)
    page = context.new_page()
    wrong = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if "Content Security Policy" in message.text else None)
    page.on("request", lambda sent: None if sent.url.startswith(address) else wrong.append(f"asked for {sent.url}"))
    page.set_default_timeout(30_000)
    page.goto(address)
    page.wait_for_selector("#model option", state="attached")
    try:
        yield page
        assert wrong == []
    finally:
        context.close()


def shown(page, name):
    return page.locator(f"#{name}").inner_text()


@pytest.mark.slow
def test_a_person_completes_a_text_and_sees_what_was_drafted(browser):
    prompt = "def add(a, b):"
    with served() as (address, client), opened(browser, address, viewport={"width": 1200, "height": 800}) as page:
        page.locator("input[value=text]").check()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Tokens at most").fill("60")
        page.get_by_label("Text to continue").fill(prompt)
        page.keyboard.press("Enter")
        page.wait_for_selector("article .foot")
        drafted = page.locator("article .drafted:not(aside *)").count()
        own = page.locator("article .own").count()
        assert drafted > 10
        assert own > 5
        assert shown(page, "count") == "60"
        assert float(shown(page, "rate")) > 0
        assert 0 < int(shown(page, "accepted").rstrip("%")) <= 100
        answer = "".join(page.locator("article p.code").nth(1).locator("span").all_inner_texts())
        whole = page.evaluate(
            """async (asked) => (await (await fetch("v1/completions", {method: "POST", headers: {"content-type":
            "application/json"}, body: JSON.stringify(asked)})).json()).choices[0].text""",
            {"model": NAME, "prompt": prompt, "max_tokens": 60, "temperature": 0},
        )
        assert answer.split() == whole.split()
        colour = "element => getComputedStyle(element).backgroundColor"
        marked = page.locator("article .drafted").first
        assert marked.evaluate(colour) != page.locator("article .own").first.evaluate(colour)
        if SCREENSHOT:
            page.screenshot(path=SCREENSHOT)
        page.get_by_label("Mark them").uncheck()
        assert marked.evaluate(colour) == "rgba(0, 0, 0, 0)"
        assert client.num_open_samples == 0


@pytest.mark.slow
def test_stop_ends_the_answer_and_the_request(browser):
    with served() as (address, client), opened(browser, address) as page:
        page.get_by_label("Tokens at most").fill("900")
        for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
            feet = page.locator("article .foot").count()
            page.get_by_label("Text to continue").fill("import os\n\n\nclass")
            page.get_by_role("button", name="Send").click()
            page.locator("article").nth(2 * feet + 1).locator("span").nth(3).wait_for()
            assert page.get_by_role("button", name="Send").is_disabled()
            stop()
            page.locator("article .foot").nth(feet).wait_for()
            assert page.locator(".foot").last.inner_text().endswith("stopped")
            page.wait_for_timeout(300)
            assert client.num_open_samples == 0, "the engine works on it no more"
            assert page.get_by_role("button", name="Send").is_enabled()
        assert page.locator("#error").is_hidden()


@pytest.mark.slow
def test_a_conversation_goes_on_and_keys_and_errors_are_shown(browser):
    with served(template=TEMPLATE, api_keys=("secret",)) as (address, _):
        context = browser.new_context()
        page = context.new_page()
        page.goto(address)
        page.wait_for_selector("#error:not([hidden])")
        assert "401" in shown(page, "error")
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").press("Tab")
        page.wait_for_selector("#model option", state="attached")
        assert page.locator("#error").is_hidden()
        sent = []
        page.on("request", lambda each: sent.append(each.post_data_json) if each.method == "POST" else None)
        page.get_by_label("Tokens at most").fill("5")
        page.get_by_label("Seed").fill("3")
        for index, text in enumerate(("Hello <b>there</b>", "Again")):
            page.get_by_label("Message", exact=False).first.fill(text)
            page.keyboard.press("Enter")
            page.locator("article .foot").nth(index).wait_for()
        assert page.locator("article b").count() == 0, "text is never markup"
        assert [message["role"] for message in sent[1]["messages"]] == ["user", "assistant", "user"]
        assert sent[1]["seed"] == 3
        page.get_by_label("Tokens at most").fill("100000")
        page.locator("#prompt").fill("Too long")
        page.keyboard.press("Enter")
        page.wait_for_selector("#error:not([hidden])")
        assert "400" in shown(page, "error")
        assert page.locator("#prompt").input_value() == "Too long", "what was written isn't lost"
        page.get_by_role("button", name="Clear").click()
        assert page.locator("article").count() == 0
        context.close()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read_in_light_and_dark_and_on_a_narrow_screen(browser, scheme):
    contrast = """() => {
        const light = (colour) => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map((each) => {
            const part = each / 255; return part <= .03928 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4; });
            return .2126 * r + .7152 * g + .0722 * b; };
        const ground = (element) => { for (; element; element = element.parentElement) {
            const colour = getComputedStyle(element).backgroundColor; if (!/, 0\\)$/.test(colour)) return colour; } };
        return [...document.querySelectorAll("h1, h2, dt, dd, legend, label, label > span, .key span, #hint, #empty, button")]
            .filter((element) => element.offsetParent && !element.disabled).map((element) => {
                const [one, two] = [light(getComputedStyle(element).color), light(ground(element))].sort((a, b) => b - a);
                return [(one + .05) / (two + .05), element.outerHTML.slice(0, 80)]; }); }"""
    with (
        served() as (address, _),
        opened(browser, address, viewport={"width": 360, "height": 740}, color_scheme=scheme) as page,
    ):
        for ratio, element in page.evaluate(contrast):
            assert ratio >= 4.5, f"{element}: contrast {ratio:.1f}"
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is cut off at the side"
        page.get_by_label("Tokens at most").fill("8")
        page.locator("#prompt").fill("import")
        page.keyboard.press("Enter")
        page.wait_for_selector("article .foot")
        if SCREENSHOT:
            page.screenshot(path=SCREENSHOT.replace(".png", f"-{scheme}-narrow.png"), full_page=True)
