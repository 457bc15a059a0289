"""The paged runtime: engine, scheduler, sampler, models. What is named here is its public face."""

from radixrt.radix import RadixrtError

from .config import EngineConfig
from .counting import Counters, trie_size
from .engine import Engine, EngineStats
from .errors import InvalidRequest, ModelError
from .loading import load_model
from .model import Forward, Model
from .outputs import (
    Choice,
    Event,
    FinishEvent,
    FinishReason,
    Handle,
    Logprob,
    Output,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from .params import SamplingParams
from .record import Replay, replay
from .tokenizer import Tokenizer

__all__ = [
    "Choice",
    "Counters",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Event",
    "FinishEvent",
    "FinishReason",
    "Forward",
    "Handle",
    "InvalidRequest",
    "Logprob",
    "Model",
    "ModelError",
    "Output",
    "RadixrtError",
    "Replay",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
    "Tokenizer",
    "Usage",
    "load_model",
    "replay",
    "trie_size",
]
