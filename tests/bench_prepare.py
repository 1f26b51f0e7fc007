"""`python -m data prepare` beside `datasets.map`: the same text, tokenizer and number of processes.

    python tests/bench_prepare.py [COPIES OF THE STANDARD LIBRARY, 8] [PROCESSES, 2]

Both read one file of JSON lines, encode it with Llama 3's tokenizer, and end with a file of uint32 ids; the second is
timed without its import of the tokenizer's package. Prints seconds, MB/s and the ratio.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

THEIRS = """
import sys, datasets, numpy
from pathlib import Path
from llama_models.llama3 import tokenizer
folder, processes = Path(sys.argv[1]), int(sys.argv[2])
encoder = tokenizer.Tokenizer.get_instance()
rows = datasets.load_dataset("json", data_files=str(folder / "text.jsonl"), split="train", cache_dir=str(folder / "c"))
rows = rows.map(lambda row: {"ids": encoder.encode(row["text"], bos=True, eos=True)}, num_proc=processes,
                remove_columns=["text"])
with (folder / "theirs.bin").open("wb") as file:
    for batch in rows.with_format("numpy").iter(1000):
        for ids in batch["ids"]:
            file.write(numpy.asarray(ids, dtype=numpy.uint32).tobytes())
"""


def timed(*command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - started


def main(copies: int = 8, processes: int = 2) -> None:
    import llama_models

    from data.prepare import standard_library_documents

    model = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"
    documents = list(standard_library_documents()) * copies
    size = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        with (Path(folder) / "text.jsonl").open("w") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in documents)
        call = ["prepare", f"{folder}/text.jsonl", "--out", f"{folder}/ours", "--tokenizer", str(model)]
        ours = timed(sys.executable, "-m", "data", *call, "--workers", str(processes))
        theirs = timed(sys.executable, "-c", THEIRS, folder, str(processes))
        written = sum(path.stat().st_size for path in Path(folder, "ours").glob("*.bin"))
        assert written == Path(folder, "theirs.bin").stat().st_size, "the two made different numbers of ids"
    print(f"{size:.0f} MB of text, {processes} processes")
    print(f"prepare      {ours:6.1f} s  {size / ours:5.1f} MB/s")
    print(f"datasets.map {theirs:6.1f} s  {size / theirs:5.1f} MB/s  ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
