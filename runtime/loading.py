"""From a model's name or path to a model that is ready to serve, and its tokenizer.

Knows nothing of engines or requests; the default model's conversion is in conversion.py.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from .conversion import DEFAULT_MODEL, default_model, first_line, quiet_transformers
from .errors import ModelError
from .tokenizer import HFTokenizer
from .transformer import TransformerModel

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve(name: str | Path, *, progress: bool = False) -> str:
    """What transformers loads for `name`: an existing model directory, or a hub id (which only loading can check).

    The default model is converted first if need be. Raises ModelError for a path where no model is.
    """
    if str(name) == DEFAULT_MODEL:
        return str(default_model(progress=progress))
    path = Path(name).expanduser()
    if str(name) and path.is_dir():
        _require_model(name, path)
        return str(path)
    if str(name) and path.exists():
        raise ModelError(f"model {str(name)!r}: that is a file; give a directory with config.json and *.safetensors")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"model {str(name)!r}: no such directory; give a directory that holds config.json and *.safetensors, a hub "
            f"id, or {DEFAULT_MODEL!r}"
        )
    return name


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> tuple[TransformerModel, HFTokenizer]:
    """Load weights and tokenizer and run the fidelity probe (about 4 s for the default model).

    Only safetensors are read, and no code that comes with a model is ever run. Raises ModelError with one line: what
    was asked, what was there, what to do.
    """
    resolved_dtype = _dtype(dtype)
    if str(device) != "cpu":
        raise ModelError(f"device {str(device)!r} was asked for; models run on 'cpu' in this version")
    source = resolve(name, progress=progress)
    is_path = Path(source).is_dir()
    unreachable = None if is_path else _ask_hub(source)
    try:
        with quiet_transformers():
            hf_model, report, tokenizer = _read(source, resolved_dtype, local=is_path or unreachable is not None)
    except Exception as error:
        raise _load_error(name, error, unreachable, is_path=is_path) from error
    absent = sorted(str(key) for key in (*report["missing_keys"], *report["mismatched_keys"]))
    if absent:
        raise ModelError(
            f"model {str(name)!r}: its files lack {len(absent)} of the weights that {type(hf_model).__name__} needs "
            f"({absent[0]} ...); download it again"
        )
    if resolved_dtype == torch.float64:
        hf_model.set_experts_implementation("eager")  # the default for mixtures of experts has no float64
    return TransformerModel(hf_model, name=str(name)), HFTokenizer(tokenizer)


def _read(source: str, dtype: torch.dtype, *, local: bool) -> tuple[Any, dict[str, Any], Any]:
    """transformers' model, its report of what was missing in the files, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    auto_model: Any = AutoModelForCausalLM
    options: dict[str, Any] = {"trust_remote_code": False, "local_files_only": local}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    hf_model, report = auto_model.from_pretrained(
        source,
        dtype=dtype,
        attn_implementation="eager",
        use_safetensors=True,
        output_loading_info=True,
        **options,
    )
    return hf_model, report, tokenizer


def _ask_hub(hub_id: str) -> str | None:
    """Why the hub does not give this model, or None. One request: transformers would retry for a minute."""
    from huggingface_hub import HfApi

    try:
        HfApi().model_info(hub_id, timeout=10)
    except Exception as error:
        return first_line(error)
    return None


def _require_model(name: str | Path, path: Path) -> None:
    missing = [what for what in ("config.json", "*.safetensors") if not any(path.glob(what))]
    if missing:
        found = sorted(entry.name for entry in path.iterdir())
        listing = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "nothing"
        raise ModelError(
            f"model {str(name)!r}: the directory has no {' and no '.join(missing)} (there is {listing}); give a "
            "directory that transformers' save_pretrained wrote"
        )


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    known = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(dtype)
    if known is None or known not in _DTYPES.values():
        raise ModelError(f"dtype {str(dtype)!r} was asked for; served are {', '.join(_DTYPES)}")
    return known


def _load_error(name: str | Path, error: Exception, unreachable: str | None, *, is_path: bool) -> ModelError:
    if is_path:
        return ModelError(f"model {str(name)!r}: its directory cannot be loaded ({first_line(error)})")
    return ModelError(
        f"model {str(name)!r}: no such directory, and the model hub did not give it "
        f"({unreachable or first_line(error)}); check the name and the network, or use {DEFAULT_MODEL!r}"
    )
