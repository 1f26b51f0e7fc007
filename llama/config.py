"""The numbers of a Llama: its shape, its named presets, its parameter and FLOP arithmetic."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 / 3.2 rotary frequency scaling (``rope_type: llama3`` in a Hugging Face config).

    Wavelengths above ``original_max_position / low_freq_factor`` positions are stretched by ``factor``, those under
    ``original_max_position / high_freq_factor`` are left alone, those between are blended linearly in frequency.
    Source: Meta's ``llama-models``, function ``apply_scaling``.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def __post_init__(self) -> None:
        if not (self.factor > 0 and self.high_freq_factor > self.low_freq_factor and self.original_max_position > 0):
            raise ValueError(f"{self} needs factor > 0, high_freq_factor > low_freq_factor, original_max_position > 0")


@dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Immutable: parallelism never edits it, local head counts follow from tensor shapes.

    Raises:
        ValueError: if the numbers cannot make a model (heads that KV heads do not divide, an odd head_dim, ...).
    """

    vocab_size: int
    dim: int  # width of the residual stream
    n_layers: int
    n_heads: int  # query heads
    n_kv_heads: int  # key and value heads; query head h reads KV head h // (n_heads // n_kv_heads)
    head_dim: int
    ffn_dim: int  # width of the SwiGLU feed-forward
    rope_theta: float = 500_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False  # the output projection uses the embedding's matrix
    max_position: int = 8192  # longest sequence the published weights were trained for; not enforced

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
        for name in sizes:
            if type(getattr(self, name)) is not int or not 1 <= getattr(self, name) < 2**31:
                raise ValueError(
                    f"LlamaConfig.{name} is {getattr(self, name)!r}; it must be a whole number of at least 1, "
                    "and below 2^31"
                )
        for name in ("rope_theta", "norm_eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"LlamaConfig.{name} is {getattr(self, name)}; it must be a number above 0")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"{self.n_heads} query heads cannot share {self.n_kv_heads} KV heads evenly; "
                "n_heads must be a multiple of n_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding rotates pairs, so it must be even")

    @classmethod
    def preset(cls, name: str) -> LlamaConfig:
        """The config of a named preset (see ``PRESETS``).

        Raises:
            ValueError: if there is no such preset.
        """
        if name not in PRESETS:
            raise ValueError(f"no preset is called '{name}'; there are: {', '.join(PRESETS)}")
        return PRESETS[name]

    @classmethod
    def from_hf(cls, folder: str | Path) -> LlamaConfig:
        """Read a Hugging Face ``config.json``; every number comes from the file.

        Raises:
            FileNotFoundError: if the folder holds no ``config.json``.
            ValueError: if the file describes something that this model does not compute; all reasons are listed.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; a Hugging Face model folder holds a config.json")
        try:
            hf = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as e:
            raise ValueError(f"{path} is not JSON: {e}") from None
        if not isinstance(hf, dict):
            raise ValueError(f"{path} holds no JSON object")
        try:
            return cls._from_hf(hf)
        except (KeyError, TypeError, AttributeError, ZeroDivisionError) as e:
            raise ValueError(f"{path} cannot be understood: {type(e).__name__} {e}") from None
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None

    @classmethod
    def _from_hf(cls, hf: dict) -> LlamaConfig:
        needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
        missing = [key for key in needed if key not in hf]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        refused = _unsupported(hf)
        if refused:
            raise ValueError(f"it describes a model that this Llama does not compute: {'; '.join(refused)}")

        # transformers 5 writes theta and scaling into `rope_parameters`; earlier versions write `rope_theta` and
        # `rope_scaling` beside each other. Where a value stands in two places, both must say the same.
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        theta = _agreed("rope_theta", rope, hf)
        scaling = None
        if _rope_type(rope) == "llama3":
            original = _agreed("original_max_position_embeddings", rope, hf)
            scaling = RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                # transformers falls back on the longest position
                original_max_position=int(hf["max_position_embeddings"] if original is None else original),
            )
        heads = hf["num_attention_heads"]
        return cls(
            vocab_size=hf["vocab_size"],
            dim=hf["hidden_size"],
            n_layers=hf["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=hf.get("num_key_value_heads") or heads,
            head_dim=hf.get("head_dim") or hf["hidden_size"] // heads,
            ffn_dim=hf["intermediate_size"],
            # 10000, 1e-6 and 2048 are the defaults of transformers' LlamaConfig for keys left out of the file
            rope_theta=10_000.0 if theta is None else float(theta),
            rope_scaling=scaling,
            norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            tied_embeddings=_of_type(hf, "tie_word_embeddings", bool, False),
            max_position=_of_type(hf, "max_position_embeddings", int, 2048),
        )

    @classmethod
    def from_dict(cls, values: dict) -> LlamaConfig:
        """The inverse of ``to_dict``."""
        scaling = values.get("rope_scaling")
        return cls(**{**values, "rope_scaling": RopeScaling(**scaling) if scaling else None})

    def to_dict(self) -> dict:
        """Plain values only, for checkpoints and manifests."""
        return asdict(self)

    def to_hf(self) -> dict:
        """The content of a Hugging Face config.json, in the form that transformers 4 and 5 and other tools read."""
        hf = {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": False,
            "attention_dropout": 0.0,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.dim,
            "initializer_range": 0.02,
            "intermediate_size": self.ffn_dim,
            "max_position_embeddings": self.max_position,
            "mlp_bias": False,
            "model_type": "llama",
            "num_attention_heads": self.n_heads,
            "num_hidden_layers": self.n_layers,
            "num_key_value_heads": self.n_kv_heads,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied_embeddings,
            "use_cache": True,
            "vocab_size": self.vocab_size,
        }
        if self.rope_scaling is not None:
            hf["rope_scaling"] = {
                "factor": self.rope_scaling.factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_position,
                "rope_type": "llama3",
            }
        return hf

    @property
    def embedding_parameters(self) -> int:
        """Elements of the embedding matrix: vocab_size x dim."""
        return self.vocab_size * self.dim

    @property
    def parameters(self) -> int:
        """Unique parameters; tied matrices count once."""
        attention = self.dim * self.head_dim * (2 * self.n_heads + 2 * self.n_kv_heads)
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        outer = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        return self.n_layers * block + self.dim + outer

    def flops_per_token(self, sequence_length: int) -> int:
        """Model FLOPs of one trained token, forward and backward, as MFU counts them.

        The rule: 6 x (parameters without the embedding look-up, the output projection included once, tied or not)
        + 12 x layers x heads x head_dim x sequence_length. Causal sparsity is not subtracted and recomputation is
        not added. Source: PaLM (arXiv 2204.02311), appendix B; torchtitan counts the same way.
        """
        looked_up = 0 if self.tied_embeddings else self.embedding_parameters
        attention = 12 * self.n_layers * self.n_heads * self.head_dim * sequence_length
        return 6 * (self.parameters - looked_up) + attention


def _agreed(key: str, rope: dict, hf: dict) -> float | None:
    """A value that may stand among the RoPE parameters or at the top, or None."""
    inner, outer = rope.get(key), hf.get(key)
    if inner is not None and outer is not None and inner != outer:
        raise ValueError(f"it says {key} twice: {inner} among the RoPE parameters, {outer} at the top")
    value = outer if inner is None else inner
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise ValueError(f"its {key} is {value!r}, which is no number")
    return value


def _of_type(hf: dict, key: str, kind: type, default: Any) -> Any:
    value = hf.get(key, default)
    if type(value) is not kind:
        raise ValueError(f"its {key} is {value!r}, which is no {kind.__name__}")
    return value


def _rope_type(rope: dict) -> str:
    return rope.get("rope_type", rope.get("type", "default"))


def _unsupported(hf: dict) -> list[str]:
    """What a Hugging Face config asks for that ``llama.model`` does not compute, one phrase each."""
    reasons = []
    if hf.get("model_type", "llama") != "llama":
        reasons.append(f"model_type is '{hf['model_type']}', not 'llama'")
    architectures = hf.get("architectures") or ["LlamaForCausalLM"]
    if "LlamaForCausalLM" not in architectures:
        reasons.append(f"architectures is {architectures}, not ['LlamaForCausalLM']")
    if hf.get("hidden_act", "silu") not in ("silu", "swish"):
        reasons.append(f"hidden_act is '{hf['hidden_act']}', not 'silu'")
    for key in ("attention_bias", "mlp_bias"):
        if hf.get(key):
            reasons.append(f"{key} is true")
    if hf.get("sliding_window"):
        reasons.append(f"sliding_window is {hf['sliding_window']}")
    for key in ("quantization_config", "compression_config"):
        if hf.get(key):
            reasons.append(f"the weights are quantised ({key})")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if hf.get("rope_parameters") and hf.get("rope_scaling"):
        inner, outer = ({k: v for k, v in hf[key].items() if k not in ("type", "rope_theta")} for key in
                        ("rope_parameters", "rope_scaling"))  # fmt: skip
        if inner != outer:
            reasons.append(f"rope_parameters says {inner}, rope_scaling {outer}")
    if _rope_type(rope) not in ("default", "llama3"):
        reasons.append(f"rope_type is '{_rope_type(rope)}', not 'default' or 'llama3'")
    rotated = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if rotated not in (None, 1.0):
        reasons.append(f"partial_rotary_factor is {rotated}, not 1")
    return reasons


# Shapes as published in each model's config.json; "llama2-7b" is the shape of Lightning's tensor-parallel example;
# "tiny" is ours: 256 byte values and the special tokens of data/tokenizer.py in a vocabulary padded to 64.
PRESETS: dict[str, LlamaConfig] = {
    "tiny": LlamaConfig(vocab_size=320, dim=128, n_layers=2, n_heads=8, n_kv_heads=4, head_dim=16, ffn_dim=384),
    "llama3-8b": LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336),
    "llama3.1-8b": LlamaConfig(128256, 4096, 32, 32, 8, 128, 14336, rope_scaling=RopeScaling(8.0), max_position=131072),
    "llama3.1-70b": LlamaConfig(
        128256, 8192, 80, 64, 8, 128, 28672, rope_scaling=RopeScaling(8.0), max_position=131072
    ),
    "llama3.1-405b": LlamaConfig(
        128256, 16384, 126, 128, 8, 128, 53248, rope_scaling=RopeScaling(8.0), max_position=131072
    ),
    "llama3.2-1b": LlamaConfig(
        128256, 2048, 16, 32, 8, 64, 8192, rope_scaling=RopeScaling(32.0), tied_embeddings=True, max_position=131072
    ),
    "llama3.2-3b": LlamaConfig(
        128256, 3072, 28, 24, 8, 128, 8192, rope_scaling=RopeScaling(32.0), tied_embeddings=True, max_position=131072
    ),
    "llama2-7b": LlamaConfig(32000, 4096, 32, 32, 32, 128, 11008, rope_theta=10_000.0, max_position=4096),
}
