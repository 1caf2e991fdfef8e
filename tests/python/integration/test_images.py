"""Prompts with images against transformers + PEFT in float32, with adapters on all parts of the model."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest

import adaptrt
from adaptrt import LLM, AdapterError, CheckpointError, ConfigError, RequestError, SamplingParams
from adaptrt.builder.cli import main
from adaptrt.runtime.images.opened import ImageLimits, open_image
from support.seeing import (
    ADAPTERS,
    SMOLVLM,
    SeeingReference,
    check_crowd,
    engine_of_model,
    load,
    question,
    random_image,
    save_adapters,
    save_model,
)

# The tower's rows and the model's logits are sums in float32, in another order than torch's.
TOLERANCE = 2e-5
LENGTH = 6
GREEDY = SamplingParams(max_tokens=LENGTH, temperature=0, logprobs=0, ignore_eos=True)
LARGE, SMALL = random_image(61, 47, 1), random_image(5, 9, 2)
QUESTION = question(LARGE, "what is this", SMALL, "and red")


class Seeing:
    """The model, its engine and its adapters."""

    def __init__(self, directory: Path) -> None:
        self.model = save_model(directory / "model")
        self.engine = engine_of_model(self.model, directory / "engine")
        self.adapters = save_adapters(self.model, directory / "adapters")

    def reference(self, adapter: str | None) -> SeeingReference:
        return SeeingReference(self.model, None if adapter is None else self.adapters[adapter])


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Seeing:
    return Seeing(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def llm(seeing: Seeing) -> Iterator[LLM]:
    with LLM(seeing.engine) as made:
        for name, directory in seeing.adapters.items():
            made.load_lora(name, directory)
        yield made


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_answers_are_those_of_transformers(seeing: Seeing, llm: LLM, adapter: str | None) -> None:
    prompt, tokens, scores = seeing.reference(adapter).answer(QUESTION, LENGTH)
    found = llm.chat(QUESTION, GREEDY, lora=adapter)
    assert list(found.prompt_token_ids) == prompt
    assert list(found.token_ids) == tokens
    np.testing.assert_allclose([one.log_prob for one in found.log_probs], scores, atol=TOLERANCE)


@pytest.mark.parametrize("adapter", [None, *ADAPTERS])
def test_rows_are_those_of_transformers(seeing: Seeing, llm: LLM, adapter: str | None) -> None:
    tower = llm._vision._running()
    tiles = tower.model.tiles(open_image(LARGE, "image", ImageLimits()), "image")
    assert len(tiles.pixels) == 5
    (rows,) = tower.rows([tiles], None if adapter is None else llm.executor.adapters.get(adapter))
    expected = seeing.reference(adapter).rows(LARGE)
    assert np.abs(rows - expected).max() <= TOLERANCE * np.ptp(expected)


def test_an_image_is_queued_while_another_is_computed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More are queued together only if a step takes them all, and equal images once. No pixels are hashed for that."""
    tower = llm._vision._running()
    monkeypatch.setattr("adaptrt.runtime.images.vision.digest_of", None)
    order: list[str] = []
    enqueued, finished = tower._enqueued, tower._finished

    def enqueue(*given: Any) -> Any:
        order.append("queued")
        return enqueued(*given)

    def finish(image: Any) -> Any:
        order.append("finished")
        return finished(image)

    monkeypatch.setattr(tower, "_enqueued", enqueue)
    monkeypatch.setattr(tower, "_finished", finish)
    asked = [
        question(*(random_image(9, 7, seed) for seed in seeds), "red") for seeds in ((90, 91, 92), (93, 94, 93, 95, 98))
    ]
    before = tower.seconds
    llm.chat(asked[0], GREEDY)
    assert tower._step_tokens < 2 * 80  # an image has five tiles of 16 patches
    assert order == ["queued", "queued", "finished", "queued", "finished", "finished"]
    assert tower.seconds > before
    del order[:]
    monkeypatch.setattr(tower, "_step_tokens", 3 * 80)
    llm.chat(asked[1], GREEDY)
    assert order == ["queued"] * 3 + ["finished", "queued"] + ["finished"] * 3


@pytest.mark.parametrize("form", ["chat", "generate"])
def test_images_of_several_prompts_are_encoded_together(llm: LLM, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    tower = llm._vision._running()
    images = [random_image(9, 7, seed) for seed in range(200 + len(form), 203 + len(form))]
    queued: list[Any] = []
    all_queued = threading.Event()
    enqueued, finished = tower._enqueued, tower._finished

    def enqueue(*given: Any) -> Any:
        queued.append(enqueued(*given))
        if len(queued) == len(images):
            all_queued.set()
        return queued[-1]

    def finish(image: Any) -> Any:
        assert all_queued.wait(60), "images of other prompts were not queued meanwhile"
        return finished(image)

    monkeypatch.setattr(tower, "_enqueued", enqueue)
    monkeypatch.setattr(tower, "_finished", finish)
    lora = [None, "everything", "tower"]
    text = "User:<image>red<end_of_utterance>\nAssistant:"
    if form == "chat":
        together = llm.chat([question(image, "red") for image in images], GREEDY, lora=lora)
    else:
        prompts = [{"prompt": text, "multi_modal_data": {"image": image}} for image in images]
        together = llm.generate(prompts, GREEDY, lora=lora)
    monkeypatch.undo()
    alone = [llm.chat(question(image, "red"), GREEDY, lora=name) for image, name in zip(images, lora, strict=True)]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert [one.log_probs for one in together] == [one.log_probs for one in alone]


def test_images_after_one_that_fails_leave_the_tower(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = llm._vision._running()
    taken: list[int] = []
    result = tower._result

    def fails_first(number: int) -> Any:
        taken.append(number)
        rows = result(number)
        if len(taken) == 1:
            raise RequestError("the vision tower: broken")
        return rows

    monkeypatch.setattr(tower, "_result", fails_first)
    asked = question(random_image(9, 7, 96), random_image(9, 7, 97))
    with pytest.raises(RequestError, match="the vision tower: broken"):
        llm.chat(asked, GREEDY)
    assert len(taken) == 5 + 5
    assert len(set(taken)) == len(taken)
    assert llm.chat(asked, GREEDY).token_ids


def test_a_request_of_the_executor_has_images(llm: LLM) -> None:
    expected = llm.chat(QUESTION, GREEDY, lora="everything")
    ids, rows = llm.chat_prompt(QUESTION, lora="everything")
    assert len(ids) == len(expected.prompt_token_ids)
    request = adaptrt.Request(ids, LENGTH, prompt_tuning_config=rows)
    (response,) = llm.executor.await_responses(llm.executor.enqueue_request(request, adapter="everything"))
    assert response.result.output_token_ids[0][len(ids) :] == list(expected.token_ids)
    text = question("what is this")
    assert llm.chat_prompt(text) == (list(llm.chat(text, GREEDY).prompt_token_ids), None)


def test_prompts_of_vllm_have_images(llm: LLM) -> None:
    expected = llm.chat(QUESTION, GREEDY, lora="dora")
    text = "User:<image>what is this<image>and red<end_of_utterance>\nAssistant:"
    prompt = {"prompt": text, "multi_modal_data": {"image": [LARGE, SMALL]}}
    found = llm.generate([prompt, "what is this"], GREEDY, lora="dora")[0]
    assert (found.prompt_token_ids, found.token_ids) == (expected.prompt_token_ids, expected.token_ids)
    assert "".join(llm.stream(prompt, GREEDY, lora="dora")) == expected.text
    one = {"prompt": "<image>", "multi_modal_data": {"image": 5}}
    with pytest.raises(RequestError, match=r"prompts\['multi_modal_data'\]\['image'\]\[0\] is 5; expected an image"):
        llm.generate(one, GREEDY)


def test_a_crowd_changes_no_bit(seeing: Seeing, llm: LLM) -> None:
    crowd = [
        (None, QUESTION),
        ("everything", question("what is this")),
        ("tower", question(SMALL, "red")),
        ("dora", question(LARGE)),
        ("connector", question(random_image(30, 90, 3), SMALL, SMALL)),
    ]
    check_crowd(llm, seeing.engine, seeing.adapters, crowd, GREEDY)


def test_prefixes_with_images_are_reused_by_content(llm: LLM) -> None:
    def cached(image: Any) -> int:
        return llm.chat(question(image, "what is this red and blue"), GREEDY).num_cached_tokens or 0

    first, second = random_image(61, 47, 11), random_image(61, 47, 12)
    cached(first)
    assert cached(first) >= 32
    assert cached(second) < cached(first)


def test_other_prompts_are_refused(llm: LLM) -> None:
    for conversation, complaint in (
        (question(b"no image"), "cannot be read as an image"),
        ([{"role": "user", "content": [{"type": "image", "image": "http://host/image.png"}]}], "expected a data: URL"),
        (question(SMALL, "what <image>"), "2 tokens <image> for 1 images"),
        ([{"role": "user", "content": [{"type": "video", "video": "x"}]}], "expected"),
        (question(*[SMALL] * 33), "have 33 images; expected at most 32"),
    ):
        with pytest.raises(RequestError, match=complaint):
            llm.chat(conversation, GREEDY)
    with pytest.raises(RequestError, match="a weighted sum; expected one adapter"):
        llm.chat(QUESTION, GREEDY, lora="everything:0.5+text:0.5")


def test_adapters_that_act_later_share_images_with_the_base(seeing: Seeing, llm: LLM, tmp_path: Path) -> None:
    """PEFT's aLoRA acts from its invocation tokens on; an image has none."""
    invocation = [5, 6]  # what is
    fields = {"r": 2, "task_type": "CAUSAL_LM", "alora_invocation_tokens": invocation}
    parts = {"later": r".*text_model.*(q_proj|down_proj)", "tower-later": r".*vision_model.*q_proj"}
    model = replace(SMOLVLM, adapters={name: {"target_modules": part, **fields} for name, part in parts.items()})
    for name, directory in save_adapters(seeing.model, tmp_path, model).items():
        llm.load_lora(name, directory)
    asked, without = question(LARGE, "what is this"), question(LARGE, "red is this")
    before = llm._vision.stats()
    base = [llm.chat(prompt, GREEDY) for prompt in (asked, without)]
    found = [llm.chat(prompt, GREEDY, lora="later") for prompt in (asked, without)]
    assert found[0].token_ids != base[0].token_ids
    assert (found[0].num_cached_tokens or 0) >= 32
    assert [one.log_prob for one in found[1].log_probs] == [one.log_prob for one in base[1].log_probs]
    assert llm._vision.stats().num_misses <= before.num_misses + 1
    with pytest.raises(AdapterError, match="alora_invocation_tokens and changes the vision tower or the connector"):
        llm.chat(asked, GREEDY, lora="tower-later")


def test_virtual_tokens_are_refused_with_images(llm: LLM, tmp_path: Path, seeing: Seeing) -> None:
    sizes = {"num_transformer_submodules": 1, "num_layers": 2, "num_attention_heads": 4}
    base = load(seeing.model)
    config = peft.PromptTuningConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, token_dim=base.config.text_config.hidden_size, **sizes
    )
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "tuned")
    llm.load_lora("tuned", tmp_path / "tuned")
    assert llm.chat(question("what is this"), GREEDY, lora="tuned").token_ids
    with pytest.raises(RequestError, match="lora is 'tuned', an adapter of virtual tokens; expected a LoRA"):
        llm.chat(QUESTION, GREEDY, lora="tuned")


def test_other_images_do_not_wait_for_an_adapter(seeing: Seeing, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = llm._vision._running()
    llm.chat(question(SMALL, "red"), GREEDY, lora="tower")  # its adapter is read from now on
    begun, go_on = threading.Event(), threading.Event()
    read = tower._read

    def slow(adapter: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return read(adapter)

    monkeypatch.setattr(tower, "_read", slow)
    llm.load_lora("slow", seeing.adapters["tower"])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(llm.chat, question(SMALL, "red"), GREEDY, lora="slow")
        assert begun.wait(60)
        assert llm.chat(question(random_image(9, 8, 77), "red"), GREEDY, lora="tower").token_ids
        go_on.set()
        answer = waiting.result(60)
    assert answer.token_ids == llm.chat(question(SMALL, "red"), GREEDY, lora="tower").token_ids


def test_the_tower_is_loaded_when_asked_and_all_images_together_have_a_limit(seeing: Seeing) -> None:
    with LLM(seeing.engine) as llm:
        llm._vision._limits = ImageLimits(max_images=0)
        llm._vision.load()
        assert llm._vision._tower is None
        llm._vision._limits = ImageLimits(max_all_pixels=61 * 47 + 45)
        llm._vision.load()
        assert llm._vision._tower is not None
        assert llm.chat(QUESTION, GREEDY).token_ids
        with pytest.raises(RequestError, match="more than 2912 pixels together"):
            llm.chat(question(LARGE, random_image(46, 1)), GREEDY)


def test_a_replaced_adapter_has_its_own_rows(seeing: Seeing, llm: LLM) -> None:
    llm.load_lora("changing", seeing.adapters["tower"])
    before = llm.chat(QUESTION, GREEDY, lora="changing")
    llm.load_lora("changing", seeing.adapters["everything"], replace=True)
    after = llm.chat(QUESTION, GREEDY, lora="changing")
    expected = [llm.chat(QUESTION, GREEDY, lora=name) for name in ("tower", "everything")]
    for found, same in zip((before, after), expected, strict=True):
        assert [one.log_prob for one in found.log_probs] == [one.log_prob for one in same.log_probs]


def test_engines_without_a_tower_take_only_texts(seeing: Seeing, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(seeing.model, model)
    (model / "preprocessor_config.json").unlink()
    engine = engine_of_model(model, tmp_path / "engine")
    assert not (engine / "vision").exists()
    with LLM(engine) as llm:
        assert llm.chat(question("what is this"), GREEDY).token_ids
        with pytest.raises(RequestError, match="takes no images"):
            llm.chat(QUESTION, GREEDY)
        with pytest.raises(AdapterError, match="belongs to the vision tower"):
            llm.load_lora("tower", seeing.adapters["tower"])


def test_the_build_says_that_the_engine_takes_images(
    seeing: Seeing, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    command = ["build", "--model_dir", str(seeing.model), "--output_dir", str(tmp_path / "engine")]
    for flags in ([], ["--quantization", "w8a16"]):  # the second build replaces the directory
        assert main([*command, "--max_seq_len", "64", *flags]) == 0
        printed = capsys.readouterr().out
        assert "vision layers" in printed
        assert "2 of hidden size 24, mlp 40, float32" in printed
    assert "linear layers W8A16" in printed
    assert "vision.attention.qkv" in printed


def test_caches_leave_memory_for_the_tower(seeing: Seeing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adaptrt.runtime.images.tower.MAX_CACHED_BYTES", 1 << 60)
    with pytest.raises(ConfigError, match="of memory are free"):
        LLM(seeing.engine)


def test_tiles_that_do_not_fit_the_tower_are_refused(seeing: Seeing, tmp_path: Path) -> None:
    shutil.copytree(seeing.model, tmp_path / "model")
    path = tmp_path / "model" / "preprocessor_config.json"
    path.write_text(path.read_text().replace('"longest_edge": 28', '"longest_edge": 21'))
    with pytest.raises(CheckpointError, match="max_image_size is 21, which is 3 patches of 7 pixels"):
        engine_of_model(tmp_path / "model", tmp_path / "engine")


def test_executors_take_adapters_of_the_tower(seeing: Seeing) -> None:
    """The executor of texts uses its part of an adapter, which may be nothing."""
    with adaptrt.Executor(seeing.engine, adaptrt.ModelType.DECODER_ONLY, adaptrt.ExecutorConfig()) as executor:
        for name in ("tower", "connector", "dora"):
            executor.add_adapter(name, seeing.adapters[name])

        def tokens(adapter: str | None) -> Any:
            number = executor.enqueue_request(adaptrt.Request([5, 6, 7], 4), adapter=adapter)
            return executor.await_responses(number)[-1].result.output_token_ids

        assert tokens("tower") == tokens("connector") == tokens(None)
