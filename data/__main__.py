"""python -m data prepare SOURCE... --out DIR --tokenizer T | inspect DIR | adopt FILE... --out DIR ..."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from data.prepare import HELD_OUT, Encoder, prepare_parts
from data.read import (
    Part,
    describe_inputs,
    documents_of_dataset,
    find_files,
    parts_of_documents,
    parts_of_file,
    parts_of_lines,
    parts_of_stream,
    standard_input,
)
from data.tokenizer import digest, load_tokenizer
from data.tokens import TokenDataset, adopt, fingerprint, read_index


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 2 the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m data", description="Text to token folders, and what is in them.")
    commands = parser.add_subparsers(dest="command", required=True)
    usual = argparse.ArgumentDefaultsHelpFormatter
    command = commands.add_parser("prepare", help="tokenize text into a token folder", formatter_class=usual)
    command.add_argument(
        "sources",
        nargs="+",
        metavar="SOURCE",
        help="files or folders of text and source code, .jsonl[.gz|.zst], .parquet; - for standard input; "
        "hf:NAME[:SPLIT] for a data set of the library datasets",
    )
    command.add_argument(
        "--out", required=True, type=Path, metavar="DIR", help="the token folder, which must not exist"
    )
    command.add_argument("--tokenizer", required=True, help="bytes, a tokenizer.json, or Llama 3's tokenizer.model")
    command.add_argument("--text_field", default="text", help="of JSON lines, Parquet and data sets")
    command.add_argument("--validation", type=float, default=HELD_OUT, help="share of documents to hold out")
    command.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    command.add_argument("--on_bad", choices=("stop", "skip"), default="stop", help="at a line that is no text")
    command.add_argument("--stdin", choices=("text", "jsonl"), default="text", help="what standard input holds")
    command = commands.add_parser("inspect", help="what a token folder holds")
    command.add_argument("folder", type=Path, metavar="DIR")
    command.add_argument("--documents", type=int, default=3, metavar="N", help="first documents to show (default 3)")
    command.add_argument("--verify", action="store_true", help="compare every file with its checksum")
    command = commands.add_parser("adopt", help="make a token folder of .bin files of ids, as nanoGPT's scripts write")
    command.add_argument("--train", nargs="+", required=True, type=Path, metavar="FILE")
    command.add_argument("--validation", nargs="+", required=True, type=Path, metavar="FILE")
    command.add_argument("--out", required=True, type=Path, metavar="DIR")
    command.add_argument("--dtype", required=True, choices=("uint16", "uint32"), help="width of an id")
    command.add_argument("--vocab_size", required=True, type=int, metavar="V", help="every id is below it")
    command.add_argument("--tokenizer", help="that made the ids, for text samples and bits a byte")
    command.add_argument("--begin_id", type=int, help="id that begins a document")
    command.add_argument("--end_id", type=int, help="id that ends a document")
    call = parser.parse_args(arguments)
    try:
        {"prepare": prepare, "inspect": inspect, "adopt": adopt_files}[call.command](call)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def prepare(call: argparse.Namespace) -> None:
    """Tokenize, or say that it is done already."""
    if not 0 < call.validation < 1:
        raise ValueError(f"--validation is {call.validation}; it takes a share above 0 and below 1")
    if call.workers < 1:
        raise ValueError(f"--workers is {call.workers}; it takes a number of at least 1")
    tokenizer = load_tokenizer(call.tokenizer)
    streams = [s for s in call.sources if s == "-" or s.startswith("hf:")]
    files, others = find_files(s for s in call.sources if s not in streams)
    if not files and not streams:
        raise ValueError(f"{', '.join(call.sources)}: no file of a kind that is read (--help lists them)")
    settings = {"text_field": call.text_field, "validation": call.validation, "tokenizer_sha256": digest(tokenizer)}
    inputs = {"files": len(files), "digest": describe_inputs(files), "streams": streams, **settings}
    if call.out.exists():
        _compare(call.out, inputs)
        return
    if others:
        print(f"left out {len(others):,} files of other kinds, such as {others[0]}", file=sys.stderr)

    def parts() -> Iterator[Part]:
        for path in files:
            yield from parts_of_file(path, call.text_field)
        for stream in streams:
            if stream != "-":
                texts = documents_of_dataset(stream.removeprefix("hf:"), call.text_field)
                yield from parts_of_documents(stream, texts)
            elif call.stdin == "jsonl":
                yield from parts_of_lines("standard input", standard_input())
            else:
                yield from parts_of_stream("standard input", standard_input())

    from tqdm import tqdm

    total = None if streams else sum(path.stat().st_size for path in files)
    started = time.perf_counter()
    encoder = Encoder(tokenizer, call.text_field, call.validation)
    with tqdm(total=total, unit="B", unit_scale=True, desc="prepare", mininterval=0.5) as bar:
        skip = call.on_bad == "skip"
        index = prepare_parts(parts(), call.out, encoder, call.workers, {"inputs": inputs}, skip, bar.update)
    seconds = time.perf_counter() - started
    for message in index["bad"][:10]:
        print(f"left out: {message}", file=sys.stderr)
    if len(index["bad"]) > 10:
        print(f"... and {len(index['bad']) - 10:,} more", file=sys.stderr)
    print(f"wrote {call.out} in {seconds:.1f} s: {_counts(index)}")


def _compare(out: Path, inputs: dict) -> None:
    """Say that the folder is made already.

    Raises:
        ValueError: from other inputs; they are named.
    """
    made = read_index(out).get("inputs")
    if made is None:
        raise ValueError(f"{out} exists, and does not say what it was made from; choose another --out")
    differing = [f"{key} was {made.get(key)}, is {inputs[key]}" for key in inputs if made.get(key) != inputs[key]]
    if "-" in inputs["streams"]:
        differing.append("standard input cannot be compared")
    if differing:
        raise ValueError(f"{out} exists, made from other input: {'; '.join(differing)}; choose another --out")
    print(f"{out} is made from these inputs already: {_counts(read_index(out))}")


def _counts(index: dict) -> str:
    said = []
    for name, split in index["splits"].items():
        tokens = sum(shard["tokens"] for shard in split["shards"])
        size = f", {split['text_bytes']:,} bytes of text" if split["text_bytes"] else ""
        said.append(f"{name} {split['documents']:,} documents, {tokens:,} tokens{size}")
    return "; ".join(said)


def inspect(call: argparse.Namespace) -> None:
    """Counts, fingerprint, the first documents decoded."""
    index = read_index(call.folder, compare_all=call.verify)
    print(f"{call.folder}: fingerprint {fingerprint(index)}, {index['dtype']}, vocabulary {index['vocab_size']:,}")
    print(f"tokenizer {index['tokenizer']}, documents begin with {index['begin_id']} and end with {index['end_id']}")
    for part in _counts(index).split("; "):
        print(part)
    dataset = TokenDataset(call.folder, 1)
    if dataset.tokenizer is None:
        print(f"first ids: {dataset.read(0, min(32, dataset.tokens)).tolist()}")
        return
    for number, ids in enumerate(dataset.documents(call.documents), 1):
        text = dataset.tokenizer.decode(ids)
        shown = text if len(text) <= 300 else f"{text[:300]}..."
        print(f"\n[document {number}, {len(ids):,} tokens]\n{shown}")


def adopt_files(call: argparse.Namespace) -> None:
    """Make a token folder of files of ids."""
    tokenizer = load_tokenizer(call.tokenizer) if call.tokenizer else None
    files = {"train": call.train, "validation": call.validation}
    index = adopt(files, call.out, call.dtype, call.vocab_size, tokenizer, call.begin_id, call.end_id)
    print(f"wrote {call.out}: {_counts(index)}")


if __name__ == "__main__":
    sys.exit(main())
