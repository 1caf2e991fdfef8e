"""The page of `adaptrt serve` in a real browser: prompts, live state, stop, search, keys, and hostile names."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import adaptrt
from support import browser as browsers
from support import seeing
from support.browser import Browser, open_browser
from support.http_server import http_server
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

pytestmark = pytest.mark.skipif(browsers.missing() is not None, reason=browsers.missing() or "")

HOSTILE = '<img src=x onerror="window.wasRun = true"><script>window.wasRun = true</script>'
COPIES = [f"copy-{i}" for i in range(120)]
NEVER_ENDING = 90_000
WAIT_SECONDS = 60
AT_A_TIME = 5
LEAST_CONTRAST = 4.5  # WCAG 2, level AA
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,!?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves a random model of letters that never ends an answer by itself."""
    root = tmp_path_factory.mktemp("model")
    directory = save_model(ModelSpec(max_position_embeddings=100_000), root / "model")
    weights = load_file(directory / "model.safetensors")
    head = weights["lm_head.weight"].copy()
    head[:2] = 0  # another token always has a larger logit than zero
    save_file(
        {**weights, "lm_head.weight": np.ascontiguousarray(head)}, directory / "model.safetensors", {"format": "pt"}
    )
    pieces = ["<s>", "</s>", *LETTERS.replace(" ", "Ġ")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[str, Path]:
    """Returns the adapters by their names in the server."""
    first, second = (save_adapter(model, model.parent / f"adapter-{seed}", seed, r=4) for seed in (1, 2))
    return {"first": first, "second": second, HOSTILE: first, **dict.fromkeys(COPIES, second)}


@pytest.fixture(scope="module")
def engine(model: Path) -> Path:
    return build_engine(model, model.parent, max_seq_len=100_000)


@pytest.fixture(scope="module")
def server(engine: Path, adapters: dict[str, Path]) -> Iterator[str]:
    modules = [json.dumps({"name": name, "path": str(path)}) for name, path in adapters.items()]
    with http_server(engine, "--kv_cache_tokens", 1_000_000, "--num_threads", 1, "--lora_modules", *modules) as address:
        yield address


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


class Page:
    """The page's controls, and the text that a person sees."""

    def __init__(self, browser: Browser, url: str) -> None:
        self.browser = browser
        browser.driver.get(f"{url}/")

    def find(self, selector: str) -> WebElement:
        return self.browser.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        return self.browser.driver.find_elements(By.CSS_SELECTOR, selector)

    def until(self, condition: Callable[[], Any]) -> Any:
        """Waits until the condition is true and returns its value."""
        return WebDriverWait(self.browser.driver, WAIT_SECONDS, 0.05).until(lambda _: condition())

    def connected(self) -> Page:
        self.until(lambda: self.find("#link").text == "connected")
        return self

    def rows(self) -> dict[str, str]:
        """Returns the names in the list with their marks."""
        return dict(
            self.browser.run(
                "return [...document.querySelectorAll('#list li')].map((item) =>"
                " [item.querySelector('bdi').textContent, item.querySelector('.marks').textContent])"
            )
        )

    def search(self, text: str) -> None:
        field = self.find("#search")
        field.send_keys(Keys.CONTROL, "a")
        field.send_keys(text or Keys.DELETE)

    def choose(self, *names: str) -> None:
        """Selects only these names, with the keyboard; no names means the base."""
        self.until(lambda: self.rows())
        for box in self.find_all("#adapters input[type=checkbox]:checked"):
            box.send_keys(Keys.SPACE)
        for name in names:
            boxes = self.browser.run(
                "return [...document.querySelectorAll('#list li')].filter((item) =>"
                " item.querySelector('bdi').textContent === arguments[0]).map((item) => item.querySelector('input'))",
                name,
            )
            boxes[0].send_keys(Keys.SPACE)
        assert [item.text for item in self.find_all("#chosen bdi")] == list(names)

    def ask(self, prompt: str, max_tokens: int) -> None:
        field = self.find("#max-tokens")
        field.clear()
        field.send_keys(str(max_tokens))
        field = self.find("#prompt")
        field.clear()
        field.send_keys(prompt, Keys.CONTROL, Keys.ENTER)

    def answer(self, name: str) -> WebElement:
        return next(card for card in self.find_all(".answer") if card.get_dom_attribute("data-name") == name)

    def state(self, name: str) -> str:
        return str(self.answer(name).get_dom_attribute("data-state"))

    def text(self, name: str) -> str:
        return str(self.answer(name).find_element(By.CSS_SELECTOR, ".text").get_property("textContent"))

    def finished(self) -> None:
        self.until(lambda: not self.find_all(".answer[data-state=queued], .answer[data-state=streaming]"))

    def stop_all(self) -> None:
        self.find("#stop-all").click()
        self.until(lambda: self.find("#running").text == "0")


@pytest.fixture
def page(shared_browser: Browser, server: str) -> Iterator[Page]:
    """Yields the connected page. At the end the console must be empty and no other host may have been contacted."""
    shared_browser.resize(1280)
    shared_browser.driver.get("about:blank")
    shared_browser.complaints()
    shared_browser.requested()
    page = Page(shared_browser, server).connected()
    yield page
    shared_browser.driver.get("about:blank")
    hosts = {urlsplit(address).netloc for address in shared_browser.requested() if address != "about:blank"}
    assert hosts == {urlsplit(server).netloc}
    assert shared_browser.complaints() == []


def test_two_adapters_are_asked_and_answer_as_the_executor_does(
    page: Page, engine: Path, model: Path, adapters: dict[str, Path]
) -> None:
    page.choose("first", "second")
    page.ask("hello there", 40)
    page.finished()
    with adaptrt.LLM(engine, tokenizer=model) as llm:
        expected = {}
        for name in ("first", "second"):
            llm.executor.add_adapter(name, adapters[name])
            expected[name] = llm.generate("hello there", lora=name, max_tokens=40).text
    assert {name: page.text(name) for name in expected} == expected
    assert expected["first"] != expected["second"]
    for name in expected:
        assert page.state(name) == "finished"
        said = page.answer(name).find_element(By.CSS_SELECTOR, ".facts").text
        assert "40 tokens" in said
        assert "tokens per second" in said
        assert "cut at the token limit" in said
    assert page.find("#progress").get_property("textContent") == "2 of 2 answers ended"
    page.until(lambda: page.rows()["first"].endswith("device"))


def test_answers_stream_side_by_side_and_each_can_be_stopped(page: Page) -> None:
    page.choose("first", "second")
    page.ask("hello", NEVER_ENDING)
    page.until(lambda: page.text("first") and page.text("second"))
    assert (page.state("first"), page.state("second")) == ("streaming", "streaming")
    page.until(lambda: page.find("#running").text == "2")
    page.until(lambda: "1 running" in page.rows()["second"])
    page.answer("first").find_element(By.CSS_SELECTOR, "button").click()
    page.until(lambda: page.find("#running").text == "1")
    assert page.state("first") == "stopped"
    stopped, going = page.text("first"), page.text("second")
    page.until(lambda: len(page.text("second")) > len(going) + 20)
    assert page.text("first") == stopped
    page.until(lambda: float(page.find("#rate").text.replace(",", "")) > 0)
    page.stop_all()
    assert page.state("second") == "stopped"
    page.until(lambda: "running" not in page.rows()["second"])


def test_more_answers_than_connections_take_turns(page: Page) -> None:
    names = COPIES[: AT_A_TIME + 2]
    page.search("copy-")
    page.until(lambda: "first" not in page.rows())
    page.choose(*names)
    page.ask("hello", NEVER_ENDING)
    page.until(lambda: page.find("#running").text == str(AT_A_TIME))
    assert [page.state(name) for name in names] == ["streaming"] * AT_A_TIME + ["queued"] * 2
    page.answer(names[0]).find_element(By.CSS_SELECTOR, "button").click()
    page.until(lambda: page.text(names[AT_A_TIME]))
    assert page.state(names[AT_A_TIME + 1]) == "queued"
    page.stop_all()
    assert {page.state(name) for name in names} == {"stopped"}
    assert page.text(names[AT_A_TIME + 1]) == ""


def test_adapters_are_searched_on_the_server(page: Page) -> None:
    page.until(lambda: page.find("#shown").text == "100 of 123 shown")
    page.find("#show-more").click()
    page.until(lambda: len(page.rows()) == 123)
    page.search("COPY-11")
    page.until(lambda: list(page.rows()) == ["copy-11", *(f"copy-11{i}" for i in range(10))])
    page.search("nobody")
    page.until(lambda: page.find("#shown").text == "No adapter matches.")
    page.search("")
    page.until(lambda: len(page.rows()) == 100)


def test_a_level_shows_its_adapters(page: Page) -> None:
    page.choose("second")
    page.ask("a", 1)
    page.finished()
    page.find("#levels input[value=device]").send_keys(Keys.SPACE)
    page.until(lambda: "second" in page.rows() and {mark for mark in page.rows().values()} == {"device"})
    assert int(page.find("#count-device").text) == len(page.rows())


def test_a_hostile_name_is_text(page: Page) -> None:
    page.until(lambda: HOSTILE in page.rows())
    page.search("<img")
    page.until(lambda: list(page.rows()) == [HOSTILE])
    page.choose(HOSTILE)
    page.ask("hello", 5)
    page.finished()
    assert page.state(HOSTILE) == "finished"
    assert page.answer(HOSTILE).find_element(By.CSS_SELECTOR, "h3").text == HOSTILE
    assert page.browser.run("return window.wasRun === undefined && document.images.length === 0")
    assert len(page.find_all("script")) == 1


def test_an_error_is_told_in_the_servers_words(page: Page) -> None:
    page.choose("first")
    page.find("#modes input[value=chat]").send_keys(Keys.SPACE)
    page.ask("hello", 5)
    page.finished()
    assert page.state("first") == "failed"
    assert "chat template" in page.answer("first").find_element(By.CSS_SELECTOR, ".problem").text
    # Chromium also logs a refused request as an error on the console.
    (complaint,) = page.browser.complaints()
    assert "status of 400" in complaint


def test_without_a_chosen_model_nothing_is_sent(page: Page) -> None:
    page.choose()
    assert not page.find("#send").is_enabled()
    assert page.find("#none").is_displayed()
    page.find("#prompt").send_keys("hello", Keys.CONTROL, Keys.ENTER)
    assert page.find_all(".answer") == []


def test_everything_can_be_named(page: Page) -> None:
    page.choose("first")
    page.ask("a", 1)
    page.finished()
    for control in page.find_all("input, textarea, button, [role=region], section, fieldset, form"):
        if control.is_displayed():
            assert control.accessible_name, control.get_dom_attribute("id") or control.get_property("outerHTML")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280, 2400])
def test_it_fits_and_can_be_read(page: Page, width: int, scheme: str) -> None:
    page.choose("first", HOSTILE)
    page.ask("hello", 200)
    page.finished()
    page.browser.resize(width, scheme=scheme)
    assert page.browser.run("return document.documentElement.scrollWidth") <= width
    assert {text: ratio for text, ratio in page.browser.contrasts().items() if ratio < LEAST_CONTRAST} == {}
    assert page.browser.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")


def test_the_policy_keeps_html_and_other_hosts_out(page: Page) -> None:
    """The policy also stops a script of the page itself."""
    refused = "try { document.body.innerHTML = '<b>x</b>'; return 'taken' } catch (error) { return error.name }"
    assert page.browser.run(refused) == "TypeError"
    reached = page.browser.driver.execute_async_script(
        "fetch('https://example.invalid/').then(() => arguments[0]('reached'), () => arguments[0]('refused'))"
    )
    assert reached == "refused"
    complaints = page.browser.complaints()
    assert any("TrustedHTML" in complaint for complaint in complaints)
    assert any("connect-src" in complaint for complaint in complaints)
    page.browser.requested()  # Chromium also counts the requests that it blocks
    page.browser.driver.refresh()
    page.connected()


def test_a_model_with_a_template_is_asked_in_it(
    shared_browser: Browser, engine: Path, model: Path, tmp_path: Path
) -> None:
    chatty = shutil.copytree(engine, tmp_path / "chatty")
    (chatty / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}! {% endfor %}")
    with http_server(chatty, "--kv_cache_tokens", 200_000) as address:
        page = Page(shared_browser, address).connected()
        assert page.find("#modes input[value=chat]").is_selected()
        page.find("#system").send_keys("Be kind")
        page.ask("hello", 20)
        page.finished()
        answer = page.text("")
    with adaptrt.LLM(engine, tokenizer=model) as llm:
        assert answer == llm.generate("Be kind! hello! ", max_tokens=20).text


DROP = """
const bytes = Uint8Array.from(atob(arguments[1]), (letter) => letter.charCodeAt(0));
const dataTransfer = new DataTransfer();
dataTransfer.items.add(new File([bytes], arguments[0], { type: arguments[2] }));
document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true, cancelable: true }));
"""


def test_images_are_attached_dropped_and_removed(shared_browser: Browser, tmp_path: Path) -> None:
    model = seeing.save_model(tmp_path / "model")
    engine = seeing.engine_of_model(model, tmp_path / "engine")
    for i in range(3):
        seeing.random_image(20, 30, i).save(tmp_path / f"{i}.png")
    files = [base64.b64encode((tmp_path / f"{i}.png").read_bytes()).decode() for i in range(3)]
    with http_server(engine, "--num_threads", 1, "--max_images", 2) as address:
        page = Page(shared_browser, address).connected()
        page.find("#files").send_keys(f"{tmp_path}/0.png\n{tmp_path}/1.png")
        page.until(lambda: len(page.find_all("#images img")) == 2)
        assert page.browser.run("return document.querySelector('#images img').naturalHeight") == 30
        for name, kind, said in (
            ("2.png", "image/png", "A request has at most 2 images."),
            ("2.txt", "text/plain", "2.txt is not an image."),
        ):
            page.browser.run(DROP, name, files[2], kind)
            page.until(lambda said=said: page.find("#image-problem").text == said)
        page.find("#images button").click()
        page.browser.run(DROP, HOSTILE, files[2], "image/png")
        page.until(lambda: len(page.find_all("#images img")) == 2)
        assert page.find_all("#images bdi")[1].text == HOSTILE
        assert not page.find("#image-problem").is_displayed()
        for control in page.find_all("#images-field button"):
            assert control.accessible_name
        page.ask("what is this", 4)
        page.finished()
        answer = page.text("")
        for width in (360, 1280):
            page.browser.resize(width)
            assert page.browser.run("return document.documentElement.scrollWidth") <= width
            assert {text: ratio for text, ratio in page.browser.contrasts().items() if ratio < LEAST_CONTRAST} == {}
        # A completion has no images.
        page.find("#modes input[value=completion]").send_keys(Keys.SPACE)
        assert not page.find("#images-field").is_displayed()
        parts = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{file}"}} for file in files[1:]]
        content = [*parts, {"type": "text", "text": "what is this"}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
        expected = httpx.post(f"{address}/v1/chat/completions", json=body).json()
        assert answer == expected["choices"][0]["message"]["content"]


def test_adapters_below_a_root_are_listed_before_they_are_loaded_and_pins_are_seen(
    shared_browser: Browser, engine: Path, adapters: dict[str, Path]
) -> None:
    root = adapters["first"].parent
    flags = ("--kv_cache_tokens", 200_000, "--adapter_root", root, "--enable_lora_loading")
    with http_server(engine, *flags) as address:
        body = {"lora_name": "kept", "lora_path": adapters["second"].name, "pinned": True}
        httpx.post(f"{address}/load_lora_adapter", json=body).raise_for_status()
        page = Page(shared_browser, address).connected()
        page.until(lambda: page.rows().get("kept", "").startswith("pinned"))
        name = adapters["first"].name
        page.until(lambda: page.rows().get(name) == "not loaded")
        assert page.find("#total").text.endswith(" not loaded")
        page.choose(name)
        page.ask("hello", 3)
        page.finished()
        assert page.state(name) == "finished"
        page.search(name)
        page.until(lambda: page.rows() == {name: "device"})
        assert [box.is_selected() for box in page.find_all("#list input")] == [True]
        # The page also finds a new adapter by name, before the server has listed the roots again.
        shutil.copytree(adapters["first"], root / "newest")
        page.search("newest")
        page.until(lambda: page.find("#by-name").is_displayed() or page.rows() == {"newest": "not loaded"})
        shutil.rmtree(root / "newest")


def test_a_key_is_asked_for_kept_in_memory_and_a_gone_server_is_told(shared_browser: Browser, engine: Path) -> None:
    with http_server(engine, "--kv_cache_tokens", 1000, "--api_key", "a-secret") as address:
        page = Page(shared_browser, address)
        page.until(lambda: page.find("#key-form").is_displayed())
        assert page.find("#link").text == "locked"
        page.find("#key").send_keys("another", Keys.ENTER)
        page.until(lambda: page.find("#trouble").text == "The server does not accept this key.")
        page.find("#key").send_keys("a-secret", Keys.ENTER)
        page.connected()
        assert not page.find("#key-form").is_displayed()
        page.ask("hello", 3)
        page.finished()
        assert page.state("") == "finished"
        assert page.browser.run("return [localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.browser.driver.refresh()
        page.until(lambda: page.find("#key-form").is_displayed())
        page.find("#key").send_keys("a-secret", Keys.ENTER)
        page.connected()
    page.until(lambda: page.find("#trouble").text == "The server cannot be reached.")
    assert page.find("#link").text == "not connected"
