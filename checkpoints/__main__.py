"""python -m checkpoints list RUN | verify CHECKPOINT | from-hf FOLDER OUT | to-hf CHECKPOINT OUT | consolidate ..."""

import argparse
import sys
from pathlib import Path

from checkpoints.folders import read_manifest, steps, verify


def main(arguments: list[str] | None = None) -> int:
    """Exit code: 0 done, 1 a checkpoint is damaged, 2 the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m checkpoints", description="List, verify and convert checkpoints.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("list", help="the complete checkpoints of a run, oldest first")
    command.add_argument("run", metavar="RUN", type=Path, help="a run folder")
    command = commands.add_parser("verify", help="compare every file of a checkpoint with its manifest")
    command.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    command = commands.add_parser("from-hf", help="published weights (Hugging Face's or Meta's layout) to a checkpoint")
    command.add_argument("folder", metavar="FOLDER", type=Path)
    command.add_argument("out", metavar="OUT", type=Path, help="the checkpoint, which must not exist")
    command = commands.add_parser("to-hf", help="a checkpoint of any mesh to a Hugging Face folder")
    command.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    command.add_argument("out", metavar="OUT", type=Path, help="the folder, which must not exist")
    command.add_argument(
        "--dtype",
        choices=("bf16", "fp32", "fp16"),
        help="default: that of the weights that the run started from, or else as stored",
    )
    command.add_argument(
        "--max_shard_gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="largest file, in 10^9 bytes, and what the export needs of memory (default 5; imported shards are kept)",
    )
    command = commands.add_parser("consolidate", help="the weights of a checkpoint as one file of torch or safetensors")
    command.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    command.add_argument("file", metavar="FILE", type=Path, help="NAME.pt or NAME.safetensors, which must not exist")
    call = parser.parse_args(arguments)
    try:
        return _run(call)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(call: argparse.Namespace) -> int:
    if call.command == "list":
        found = steps(call.run / "checkpoints")
        if not found:
            raise ValueError(f"{call.run} holds no complete checkpoint (looked in {call.run / 'checkpoints'})")
        for _, path in found:
            manifest = read_manifest(path)
            size = sum(file["size"] for file in manifest["files"].values())
            mesh = " x ".join(str(n) for n in (manifest.get("mesh") or {}).values())
            print(
                f"{path}  {manifest['tokens']:,} tokens  "
                + (f"mesh {mesh}  " if mesh else "")
                + f"{size / 2**20:,.1f} MiB"
            )
    elif call.command == "verify":
        read_manifest(call.checkpoint)  # no checkpoint at all is a wrong call, not a damaged checkpoint
        try:
            manifest = verify(call.checkpoint)
        except (ValueError, OSError) as error:
            print(f"damaged: {error}")
            return 1
        print(f"{call.checkpoint} is whole: step {manifest['step']}, {len(manifest['files'])} files")
    else:
        from checkpoints import convert  # it imports the model

        if call.command == "from-hf":
            print(f"wrote {convert.from_hf(call.folder, call.out)}; start a run with --init_from {call.out}")
        elif call.command == "to-hf":
            if not 0 < call.max_shard_gb < 10**9:
                raise ValueError(f"--max_shard_gb is {call.max_shard_gb}; it takes a number above 0")
            folder, dtype = convert.to_hf(call.checkpoint, call.out, call.dtype, int(call.max_shard_gb * 10**9))
            print(f"wrote {folder} in {dtype}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        else:
            print(f"wrote {convert.consolidate(call.checkpoint, call.file)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
