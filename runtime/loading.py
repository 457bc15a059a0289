"""From a model's name or path to a model that is ready to serve, and its tokenizer.

Knows nothing of engines or requests; the default model's conversion is in conversion.py.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .conversion import DEFAULT_MODEL, default_model, find_gguf, is_converted, quiet_transformers
from .errors import ModelError, first_line
from .tokenizer import HFTokenizer
from .transformer import TransformerModel

_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_PARAMETERS = (".weight", ".bias")
_CONFIG, _WEIGHTS = "config.json", "*.safetensors"


def resolve(name: str | Path, *, progress: bool = False) -> str:
    """What transformers loads for `name`: an existing model directory, or a hub id (which only loading can check).

    The default model is converted first if need be. Raises ModelError for a path where no model is.
    """
    if str(name) == DEFAULT_MODEL:
        return str(default_model(progress=progress))
    return _source(name, _CONFIG, _WEIGHTS)


def load_config(name: str | Path) -> Any:
    """transformers' config of a model, the part about text, by name, path or hub id. Reads no weights.

    ModelError where it cannot be had.
    """
    from transformers import AutoConfig

    options: dict[str, Any] = {"trust_remote_code": False}
    if str(name) != DEFAULT_MODEL:
        source = _source(name, _CONFIG)
    elif is_converted():
        source = str(default_model())
    else:  # as it comes, since a conversion unpacks the weights
        gguf = find_gguf()
        source, options["gguf_file"] = str(gguf.parent), gguf.name
    is_path = os.path.isdir(source)
    unreachable = None if is_path else _ask_hub(source)
    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(source, local_files_only=is_path or unreachable is not None, **options)
    except Exception as error:
        raise _load_error(name, error, unreachable, is_path=is_path) from error
    return config.get_text_config(decoder=True)


def _source(name: str | Path, *needed: str) -> str:
    """The directory `name`, which must hold what is `needed`, or the hub id; ModelError for what is neither."""
    if not isinstance(name, (str, Path)):
        raise ModelError(f"{_called(name)}: neither text nor a path; give a directory, a hub id or {DEFAULT_MODEL!r}")
    path = os.path.expanduser(name) if str(name) else ""
    if os.path.isdir(path):  # unlike Path.is_dir, no error for names that no file system takes
        _require_files(name, Path(path), needed)
        return path
    if os.path.exists(path):
        raise ModelError(f"{_called(name)}: that is a file; give a directory with config.json and *.safetensors")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(name):
        raise ModelError(
            f"{_called(name)}: no such directory; give a directory that holds config.json and *.safetensors, a hub id, "
            f"or {DEFAULT_MODEL!r}"
        )
    return name


def load_model(
    name: str | Path,
    *,
    dtype: str | torch.dtype = "float32",
    device: str | torch.device = "cpu",
    exact: bool | None = None,
    cpu_kernel: str | None = None,
    progress: bool = False,
) -> tuple[TransformerModel, HFTokenizer]:
    """Load weights and tokenizer and run the fidelity probe (about 4 s for the default model).

    `exact` and `cpu_kernel` as for TransformerModel. Only safetensors are read, and no code that comes with a model
    is ever run. Raises ModelError with one line: what was asked, what was there, what to do.
    """
    resolved_dtype, resolved_device = dtype_named(dtype), _device(device)
    source = resolve(name, progress=progress)
    is_path = Path(source).is_dir()
    unreachable = None if is_path else _ask_hub(source)
    try:
        with quiet_transformers():
            hf_model, report, tokenizer = _read(source, resolved_dtype, local=is_path or unreachable is not None)
    except Exception as error:
        raise _load_error(name, error, unreachable, is_path=is_path) from error
    _check_weights(name, type(hf_model).__name__, report)
    if resolved_dtype == torch.float64:
        hf_model.set_experts_implementation("eager")  # the default for mixtures of experts has no float64
    model = TransformerModel(
        hf_model.to(resolved_device), name=str(name), exact=exact, cpu_kernel=cpu_kernel, owned=True
    )
    unused = sorted(report["unexpected_keys"])
    if unused:
        model.notes += (f"{len(unused)} tensors of its files are no weights of the model and unused: {_some(unused)}",)
    return model, HFTokenizer(tokenizer)


def load_tokenizer(name: str | Path) -> tuple[HFTokenizer, int]:
    """A model's tokenizer, by name, path or hub id, and how many ids it has. Reads no weights.

    ModelError where it cannot be had.
    """
    from transformers import AutoTokenizer

    source = resolve(name) if str(name) == DEFAULT_MODEL else _source(name)
    is_path = os.path.isdir(source)
    unreachable = None if is_path else _ask_hub(source)
    local = is_path or unreachable is not None
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False, local_files_only=local)
    except Exception as error:
        raise _load_error(name, error, unreachable, is_path=is_path) from error
    return HFTokenizer(tokenizer), len(tokenizer)


def _check_weights(name: str | Path, architecture: str, report: dict[str, Any]) -> None:
    """Refuse where files and config are not of one model: what runs would be another, or random in part.

    `report` is transformers'. Tensors that are not named as parameters are may be left over: old buffers.
    """
    wrong = {
        "lack weights that it needs": report["missing_keys"],
        "give weights in other shapes": [
            f"{key} is {list(its)}, not {list(needed)}" for key, its, needed in report["mismatched_keys"]
        ],
        "hold weights that it does not use": [key for key in report["unexpected_keys"] if key.endswith(_PARAMETERS)],
    }
    for what, keys in wrong.items():
        if keys:
            raise ModelError(
                f"{_called(name)}: config.json asks for {architecture}, and the files {what} ({_some(sorted(keys))}); "
                "download it again, or correct config.json"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _called(name: object) -> str:
    """How an error names the model, at a length that does not grow with what was given."""
    text = repr(str(name) if isinstance(name, Path) else name)
    return f"model {text if len(text) <= 300 else text[:300] + '...'}"


def _read(source: str, dtype: torch.dtype, *, local: bool) -> tuple[Any, dict[str, Any], Any]:
    """transformers' model, its report of how the files fit it, and its tokenizer."""
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
        ignore_mismatched_sizes=True,  # so that they come with the report
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


def _require_files(name: str | Path, path: Path, needed: Sequence[str]) -> None:
    try:
        found = sorted(os.listdir(path))
    except OSError as error:
        raise ModelError(f"{_called(name)}: the directory cannot be read ({first_line(error)})") from error
    missing = [what for what in needed if not fnmatch.filter(found, what)]
    if missing:
        listing = ", ".join(found[:5]) + (", ..." if len(found) > 5 else "") if found else "nothing"
        raise ModelError(
            f"{_called(name)}: the directory has no {' and no '.join(missing)} (there is {listing}); give a "
            "directory that transformers' save_pretrained wrote"
        )


def dtype_named(dtype: str | torch.dtype) -> torch.dtype:
    """One of the dtypes that are served; ModelError for any other."""
    known = dtype if isinstance(dtype, torch.dtype) else _DTYPES.get(str(dtype))
    if known is None or known not in _DTYPES.values():
        raise ModelError(f"dtype {str(dtype)!r} was asked for; served are {', '.join(_DTYPES)}")
    return known


def _device(device: str | torch.device) -> torch.device:
    try:
        known = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"device {device!r} was asked for; served are 'cpu' and 'cuda'") from error
    if known.type == "cuda" and not torch.cuda.is_available():
        raise ModelError(
            f"device {str(device)!r} was asked for, and this torch ({torch.__version__}) sees no GPU; use 'cpu'"
        )
    if known.type not in ("cpu", "cuda"):
        raise ModelError(f"device {str(device)!r} was asked for; served are 'cpu' and 'cuda'")
    return known


def _load_error(name: str | Path, error: Exception, unreachable: str | None, *, is_path: bool) -> ModelError:
    if is_path:
        return ModelError(f"{_called(name)}: its directory cannot be loaded ({first_line(error)})")
    return ModelError(
        f"{_called(name)}: no such directory, and the model hub did not give it "
        f"({unreachable or first_line(error)}); check the name and the network, or use {DEFAULT_MODEL!r}"
    )
