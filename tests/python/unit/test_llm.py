"""Text in and out of a small random engine: whole, streamed, on an asyncio loop, and cancelled."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import warnings
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import adaptrt
from support.models import ModelSpec, save_adapter, save_model
from support.serving import build_engine

SPEC = ModelSpec()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("llm")
    model = save_model(SPEC, root / "model")
    return build_engine(model, root, lora_dir=save_adapter(model, root / "first", 0, r=4))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    words = {f"w{i}": i for i in range(SPEC.vocab_size)}
    made = Tokenizer(models.WordLevel(words, unk_token="w2"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_text_in_and_out(engine: Path, tokenizer: Path) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        (name,) = llm.executor.adapters.names
        base = llm.generate("w3 w4 w5", max_tokens=6)
        adapted = llm.generate("w3 w4 w5", max_tokens=6, lora=name)
        assert base.text == " ".join(f"w{token}" for token in base.token_ids)
        assert llm.generate(["w3 w4 w5", "w3 w4 w5"], lora=[None, name], max_tokens=6) == [base, adapted]
        assert "".join(llm.stream("w3 w4 w5", max_tokens=6)) == base.text
        with pytest.raises(adaptrt.RequestError, match="1 names for 2 prompts"):
            llm.generate(["w3", "w4"], lora=["x"])
        with pytest.raises(adaptrt.AdapterError, match="no adapter named"):
            llm.generate(["w3", "w4"], lora=[None, "x"])
        assert llm.executor.get_num_responses_ready() == 0


def test_prompts_may_be_ids_and_dictionaries(engine: Path, tokenizer: Path) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        base = llm.generate("w3 w4 w5", max_tokens=6)
        ids = [3, 4, 5]
        for prompt in (ids, {"prompt": "w3 w4 w5"}, {"prompt_token_ids": ids}):
            assert llm.generate(prompt, max_tokens=6) == base
            assert llm.generate([prompt, "w3 w4 w5"], max_tokens=6) == [base, base]
            assert llm.generate(prompt, max_tokens=6, n=1) == [base]
            assert "".join(llm.stream(prompt, max_tokens=6)) == base.text

            async def ask(given: object = prompt) -> adaptrt.Completion:
                return await llm.generate_async(given, max_tokens=6)  # type: ignore[arg-type]

            assert asyncio.run(ask()) == base
        (name,) = llm.executor.adapters.names
        assert llm.generate([ids, ids], lora=[None, name], max_tokens=6)[0] == base
        assert llm.generate([], max_tokens=6) == []
        for ask_wrongly in (llm.generate, llm.stream):
            with pytest.raises(adaptrt.RequestError, match="has the key 'text'; expected 'prompt'"):
                ask_wrongly({"text": "w3"})
        with pytest.raises(adaptrt.RequestError, match=f"input_token_ids.0. is {SPEC.vocab_size}; the vocabulary"):
            llm.generate([SPEC.vocab_size])
        with pytest.raises(adaptrt.RequestError, match="a text is 4; expected a text, or a pair of texts"):
            llm.embed([4], pooling_type=adaptrt.PoolingType.LAST, normalize=True)  # type: ignore[list-item]


def test_completions_have_cached_tokens_and_metrics(engine: Path, tokenizer: Path) -> None:
    measured = adaptrt.SamplingParams(temperature=0, max_tokens=2, return_perf_metrics=True)
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        first = llm.generate([3] * 200, max_tokens=2)
        assert (first.num_cached_tokens, first.request_perf_metrics) == (0, None)
        second = llm.generate([3] * 200, measured)
        assert 0 < second.num_cached_tokens < 200
        assert second == first
        metrics = second.request_perf_metrics
        assert metrics is not None
        assert metrics.kv_cache_metrics.num_reused_blocks > 0
        assert metrics.timing_metrics.last_token_time >= metrics.timing_metrics.first_token_time
        both = llm.generate([3] * 200, adaptrt.SamplingParams(temperature=1, seed=1, max_tokens=2, n=2))
        assert [answer.num_cached_tokens for answer in both] == [second.num_cached_tokens] * 2
        other = llm.generate([3] * 200, max_tokens=2, lora=llm.executor.adapters.names[0])
        assert other.num_cached_tokens == 0


def test_a_token_that_the_model_does_not_have_is_text(engine: Path, tokenizer: Path) -> None:
    """Tokenizers often name a padding token that is not in the vocabulary."""
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        expected = llm.generate("[PAD] w3", max_tokens=4)
    (tokenizer / "tokenizer_config.json").write_text('{"pad_token": "[PAD]"}')
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        assert llm.generate("[PAD] w3", max_tokens=4) == expected


def test_a_temperature_without_effect_is_told_once(engine: Path, tokenizer: Path) -> None:
    sampling = adaptrt.SamplingConfig(temperature=0.8)
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        with pytest.warns(UserWarning, match=r"temperature is 0\.8\d* without top_k, top_p or min_p") as warned:
            first = llm.generate("w3", max_tokens=4, sampling_config=sampling)
        assert warned[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert llm.generate("w3", max_tokens=4, sampling_config=sampling) == first
            assert llm.generate("w3", max_tokens=4) == first


def test_more_than_one_greedy_completion_is_refused(engine: Path, tokenizer: Path) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        for sampling in (None, adaptrt.SamplingConfig(), adaptrt.SamplingConfig(top_k=1, temperature=3.0)):
            with pytest.raises(adaptrt.RequestError, match="n is 2 with greedy sampling_config, which makes the same"):
                llm.generate("w3", n=2, sampling_config=sampling)
        assert len(llm.generate("w3", n=2, max_tokens=3, sampling_config=adaptrt.SamplingConfig(top_p=1.0))) == 2
        assert len(llm.generate("w3", n=1, max_tokens=3)) == 1


def test_a_stream_that_is_given_up_is_cancelled(engine: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        await_responses, cancel_request = llm.executor.await_responses, llm.executor.cancel_request
        waiting: list[adaptrt.Response] = []
        cancelled: list[int] = []

        def await_one(request_id: int) -> list[adaptrt.Response]:
            if not waiting:
                waiting.extend(await_responses(request_id))
            return [waiting.pop(0)]

        def record_and_cancel(request_id: int) -> None:
            cancelled.append(request_id)
            cancel_request(request_id)

        # The stream gets one response at a time, even if more are ready.
        monkeypatch.setattr(llm.executor, "await_responses", await_one)
        monkeypatch.setattr(llm.executor, "cancel_request", record_and_cancel)
        stream = llm.stream("w3 w4 w5", max_tokens=600)
        next(stream)
        stream.close()
        (request_id,) = cancelled
        assert not waiting
        (response,) = await_responses(request_id)
        assert response.error_msg == f"ReqId {request_id} has already been processed and was terminated."


def test_a_text_is_one_stop(engine: Path, tokenizer: Path) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        whole = llm.generate("w3 w4 w5", max_tokens=6).text
        stop = whole.split()[1]
        expected = whole[: whole.find(stop)]
        assert expected
        assert llm.generate("w3 w4 w5", max_tokens=6, stop=stop).text == expected
        assert llm.generate("w3 w4 w5", max_tokens=6, stop=[stop]).text == expected
        with pytest.raises(adaptrt.RequestError, match="stop"):
            llm.generate("w3 w4 w5", max_tokens=6, stop="")


def test_answers_on_an_asyncio_loop(engine: Path, tokenizer: Path) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        (name,) = llm.executor.adapters.names
        prompts = [f"w{3 + i} w4 w5" for i in range(20)]
        expected = llm.generate(prompts, max_tokens=6)
        adapted = llm.generate(prompts[0], max_tokens=6, lora=name)

        async def body() -> None:
            answers = [llm.generate_async(prompt, max_tokens=6) for prompt in prompts]
            named = llm.generate_async(prompts[0], max_tokens=6, lora=name, streaming=True)
            assert await asyncio.gather(*answers) == expected
            assert [piece async for piece in answers[0]] == [expected[0].text]
            pieces = [piece async for piece in named]
            assert "".join(pieces) == adapted.text
            assert await named == adapted
            assert [piece async for piece in named] == []
            stopped = await llm.generate_async(prompts[0], max_tokens=6, stop=[expected[0].text.split()[1]])
            assert stopped.finish_reason is adaptrt.FinishReason.STOP_WORDS
            with pytest.raises(adaptrt.AdapterError, match="no adapter named"):
                llm.generate_async("w3", lora="x")
            with pytest.raises(adaptrt.RequestError, match="max_tokens is 0"):
                llm.generate_async("w3", max_tokens=0)

        asyncio.run(body())
        assert llm.executor.get_num_responses_ready() == 0
        with pytest.raises(RuntimeError, match="no running event loop"):
            llm.generate_async("w3")


def test_answers_that_nobody_waits_for_are_cancelled(
    engine: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        await_responses, cancel_request = llm.executor.await_responses, llm.executor.cancel_request
        cancelled: dict[int, threading.Event] = collections.defaultdict(threading.Event)

        def await_when_cancelled(request_id: int) -> list[adaptrt.Response]:
            assert cancelled[request_id].wait(60)
            return await_responses(request_id)

        def record_and_cancel(request_id: int) -> None:
            cancel_request(request_id)
            cancelled[request_id].set()

        # No response arrives before the request is cancelled, even from a fast engine.
        monkeypatch.setattr(llm.executor, "await_responses", await_when_cancelled)
        monkeypatch.setattr(llm.executor, "cancel_request", record_and_cancel)

        async def body() -> None:
            asked = llm.generate_async("w3 w4 w5", max_tokens=600)
            asked.cancel()
            assert (await asked).finish_reason in (adaptrt.FinishReason.CANCELLED, adaptrt.FinishReason.END_ID)
            kept = []  # An answer without references is cancelled too.
            for waiting in (anext, asyncio.ensure_future):
                kept.append(llm.generate_async("w3 w4 w5", max_tokens=600))
                task = asyncio.ensure_future(waiting(kept[-1]))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert sum(event.is_set() for event in cancelled.values()) == 1 + len(kept)
            dropped = llm.generate_async("w3 w4 w5", max_tokens=600)
            del dropped

        asyncio.run(body())
        assert len(cancelled) == 4
        assert all(event.wait(60) for event in cancelled.values())


def test_a_shutdown_ends_answers_on_a_loop(engine: Path, tokenizer: Path) -> None:
    llm = adaptrt.LLM(engine, tokenizer=tokenizer)

    async def body() -> None:
        answer = llm.generate_async("w3 w4 w5", max_tokens=600)
        await asyncio.to_thread(llm.shutdown)
        # The answer either ended before the shutdown, or raises an error with the reason.
        with contextlib.suppress(adaptrt.RequestError):
            assert (await answer).finish_reason is not adaptrt.FinishReason.NOT_FINISHED
        with pytest.raises(adaptrt.ExecutorClosedError):
            llm.generate_async("w3")

    asyncio.run(body())


def test_long_lists_of_prompts_show_how_far_they_are(
    engine: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with adaptrt.LLM(engine, tokenizer=tokenizer) as llm:
        answers = llm.generate(["w3"] * 120, max_tokens=1)
        assert capsys.readouterr().err == ""  # stderr is not a terminal
        assert llm.generate(["w3"] * 3, max_tokens=1, progress=True) == answers[:3]
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "prompts: 3"
        assert lines[-1].startswith("prompts: done in ")
        llm.generate(["w3"] * 120, max_tokens=1, progress=False)
        assert capsys.readouterr().err == ""


def test_text_without_a_tokenizer(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(adaptrt.ConfigError, match="there is no tokenizer"):
        adaptrt.LLM(engine, tokenizer=tmp_path)
