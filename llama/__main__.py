"""python -m llama generate SOURCE --prompt TEXT: text from a checkpoint of any mesh, or from published weights."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from data.tokenizer import Tokenizer, load_tokenizer
from llama.generate import generate
from llama.hf import DTYPES, dtype_name, empty_model, load_weights, open_weights

if TYPE_CHECKING:
    from llama.model import Llama


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m llama", description="Text from a Llama.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "generate",
        help="go on from prompts",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    command.add_argument(
        "source",
        metavar="SOURCE",
        type=Path,
        help="a checkpoint, a run folder (its newest checkpoint), or a folder in Hugging Face's or Meta's layout",
    )
    command.add_argument(
        "--prompt", nargs="+", action="extend", required=True, metavar="TEXT", help="one or more, run as one batch"
    )
    command.add_argument("--max_new_tokens", type=int, default=64, metavar="N")
    command.add_argument("--temperature", type=float, default=0.8, metavar="T", help="0: always the likeliest token")
    command.add_argument("--top_p", type=float, default=0.95, metavar="P", help="1: all tokens")
    command.add_argument("--top_k", type=int, default=0, metavar="K", help="0: all tokens")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    command.add_argument(
        "--dtype", choices=tuple(DTYPES), help="of the weights (default: bf16 on a GPU, fp32 on a CPU)"
    )
    command.add_argument("--compile", action="store_true", help="torch.compile the blocks: slow to start, then faster")
    command.add_argument("--tokenizer", help="bytes, or a tokenizer file or folder, where SOURCE has none")
    call = parser.parse_args(arguments)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a text may hold what the terminal cannot show
    try:
        _check(call)
        model, tokenizer, stop_ids = _open(call)
        prompts = _encode(call.prompt, tokenizer)
        if call.compile:
            for block in model.layers:
                block.compile(dynamic=False)
        _print_text(call, model, tokenizer, prompts, stop_ids)
    except BrokenPipeError:  # who reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check(call: argparse.Namespace) -> None:
    for option, value, fits, takes in (
        ("max_new_tokens", call.max_new_tokens, 1 <= call.max_new_tokens <= 10**6, "a number from 1 to 1,000,000"),
        ("seed", call.seed, 0 <= call.seed < 2**63, "a number from 0 to 2^63 - 1"),
        ("temperature", call.temperature, 0 <= call.temperature < float("inf"), "0 or more"),
        ("top_p", call.top_p, 0 < call.top_p <= 1, "more than 0, at most 1"),
        ("top_k", call.top_k, call.top_k >= 0, "0 or more"),
    ):
        if not fits:
            raise ValueError(f"--{option} is {value}; it takes {takes}")
    for prompt in call.prompt:
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise ValueError(f"the prompt {prompt!r} is not UTF-8")
    if call.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device cuda, but torch {torch.__version__} finds no CUDA device here; use cpu")


def _open(call: argparse.Namespace) -> tuple[Llama, Tokenizer, set[int]]:
    """The model on its device, its tokenizer, and the ids that end a text."""
    import checkpoints
    from checkpoints.convert import CheckpointWeights

    path = call.source
    if (path / "checkpoints").is_dir():
        newest = checkpoints.latest(path / "checkpoints")
        if newest is None:
            raise FileNotFoundError(f"{path} holds no complete checkpoint")
        path = newest
    weights = CheckpointWeights(path) if (path / checkpoints.MANIFEST).is_file() else open_weights(path)
    tokenizer = _find_tokenizer(call.tokenizer, path, weights.assets)
    if tokenizer.vocab_size > weights.config.vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size:,} ids, the model in {path} a vocabulary of "
            f"{weights.config.vocab_size:,}; give the tokenizer that the model was trained with (--tokenizer)"
        )
    device = "cuda" if call.device != "cpu" and torch.cuda.is_available() else "cpu"
    dtype = DTYPES[call.dtype or ("bf16" if device == "cuda" else "fp32")]
    print(f"{path}: {weights.config.parameters:,} parameters, {dtype_name(dtype)} on {device}", file=sys.stderr)
    model = empty_model(weights.config, device, dtype)
    if isinstance(weights, CheckpointWeights):
        weights.read_into(model)
    else:
        load_weights(model, weights)
    stop_ids = set() if tokenizer.end_id is None else {tokenizer.end_id}
    return model, tokenizer, stop_ids | _end_ids(weights.assets)


def _find_tokenizer(asked: str | None, path: Path, assets: dict[str, Path]) -> Tokenizer:
    if asked is not None:
        return load_tokenizer(asked)
    for name in ("tokenizer.json", "tokenizer.model"):
        if name in assets:
            return load_tokenizer(assets[name])
    raise FileNotFoundError(f"{path} holds no tokenizer; name one with --tokenizer (a file, or `bytes`)")


def _end_ids(assets: dict[str, Path]) -> set[int]:
    """eos_token_id of generation_config.json: one id, several, or none."""
    if "generation_config.json" not in assets:
        return set()
    path = assets["generation_config.json"]
    try:
        said = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    ids = said if isinstance(said, list) else [] if said is None else [said]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise ValueError(f"{path} says eos_token_id {said!r}; it should be an id, several, or null")
    return set(ids)


def _encode(texts: list[str], tokenizer: Tokenizer) -> list[list[int]]:
    """Ids of each prompt, the begin token once before them."""
    begin = [] if tokenizer.begin_id is None else [tokenizer.begin_id]
    prompts = [begin + tokenizer.encode(text) for text in texts]
    if not all(prompts):
        raise ValueError("a prompt is empty, and the tokenizer has no token that begins a text")
    return prompts


def _print_text(
    call: argparse.Namespace, model: Llama, tokenizer: Tokenizer, prompts: list[list[int]], stop_ids: set[int]
) -> None:
    """One prompt: its text as it grows. Several: one text after the other, when all have ended."""
    new: list[list[int]] = [[] for _ in prompts]
    shown = ""
    if len(prompts) == 1:
        print(call.prompt[0], end="", flush=True)
    for step in generate(
        model,
        prompts,
        max_new_tokens=call.max_new_tokens,
        temperature=call.temperature,
        top_k=call.top_k,
        top_p=call.top_p,
        seed=call.seed,
        stop_ids=stop_ids,
        vocab_size=tokenizer.vocab_size,
    ):
        for ids, drawn in zip(new, step, strict=True):
            if drawn is not None:
                ids.append(drawn)
        if len(prompts) == 1:
            text = tokenizer.decode(new[0])
            if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
                print(text[len(shown) :], end="", flush=True)
                shown = text
    if len(prompts) == 1:
        print(tokenizer.decode(new[0])[len(shown) :])
        return
    for number, (prompt, ids) in enumerate(zip(call.prompt, new, strict=True), 1):
        print(f"[{number}] {prompt}{tokenizer.decode(ids)}\n")


if __name__ == "__main__":
    sys.exit(main())
