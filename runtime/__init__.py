"""The paged runtime: engine, scheduler, sampler, models. What is named here is its public face."""

from radixrt.radix import Explanation, RadixrtError

from . import checks
from .config import EngineConfig
from .counting import Counters, trie_size
from .engine import Engine, EngineStats
from .errors import InvalidRequest, ModelError, RecordError
from .fences import Fence
from .geometry import KVGeometry
from .grammar import Grammar
from .loading import load_model, load_tokenizer
from .model import Forward, Model
from .outputs import (
    Choice,
    ChoiceEvent,
    Event,
    FinishEvent,
    FinishReason,
    Handle,
    Logprob,
    Output,
    Score,
    TokenEvent,
    TokenLogprobs,
    Usage,
)
from .params import BeamParams, Params, SamplingParams, ScoreParams
from .pins import PinnedPrefix
from .record import Replay, replay
from .request import CacheUse
from .tier import Transfers
from .tokenizer import Tokenizer

__all__ = [
    "BeamParams",
    "CacheUse",
    "Choice",
    "ChoiceEvent",
    "Counters",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Event",
    "Explanation",
    "Fence",
    "FinishEvent",
    "FinishReason",
    "Forward",
    "Grammar",
    "Handle",
    "InvalidRequest",
    "KVGeometry",
    "Logprob",
    "Model",
    "ModelError",
    "Output",
    "Params",
    "PinnedPrefix",
    "RadixrtError",
    "RecordError",
    "Replay",
    "SamplingParams",
    "Score",
    "ScoreParams",
    "TokenEvent",
    "TokenLogprobs",
    "Tokenizer",
    "Transfers",
    "Usage",
    "checks",
    "load_model",
    "load_tokenizer",
    "replay",
    "trie_size",
]
